"""Strategy `state`: tokens stay, and what each segment does to a state travels.

Each rank holds segments of sequences, with all heads. `state_passing` tells what they exchange.
"""

from __future__ import annotations

from functools import cached_property

from torch import Tensor

from pcomm.core.errors import UnsupportedError
from pcomm.gdn_cp.layout.sequence_segments import SequenceSegments
from pcomm.gdn_cp.layout.token_layout import TokenLayout
from pcomm.gdn_cp.ops.pack_offsets import PackOffsets
from pcomm.gdn_cp.specs.spec import Spec
from pcomm.gdn_cp.strategies.state_passing import StatePassing
from pcomm.gdn_cp.strategies.strategy import Strategy
from pcomm.gdn_cp.strategies.traffic import Traffic

__all__ = ["StateStrategy"]


class StateStrategy(Strategy):
    """The tokens of this rank as segments of sequences, with all heads.

    Raises:
        UnsupportedError: The mixer has no state.
    """

    name = "state"

    def __init__(self, spec: Spec, tokens: TokenLayout, rank: int) -> None:
        super().__init__(spec, tokens, rank)
        if spec.state is None:
            raise UnsupportedError(
                f"make_plan: strategy 'state' for {spec}",
                found="a mixer without a state",
                why="Its core takes all earlier tokens, as softmax attention does, and no summary.",
                fix="Use strategy 'heads', 'docs' or 'gather' for it.",
            )

    @cached_property
    def boundary_states(self) -> StatePassing:
        """What segments take from those before them."""
        reach = self.spec.convolution.reach if self.spec.convolution is not None else 0
        segments = self.tokens.derived(_segments, reach)
        return StatePassing(self.share, self.tokens, self.rank, segments)

    @property
    def cu_seqlens(self) -> PackOffsets:
        """Offsets of this rank's segments."""
        return self.boundary_states.cu_seqlens

    @property
    def core_rows(self) -> int:
        """Tokens of this rank."""
        return self.tokens.local_tokens

    def core_tokens(self) -> Tensor:
        """The tokens of this rank, as they lie."""
        return self.tokens.of_rank(self.rank)

    def traffic(self, rank: int, element_bytes: int, hidden_dim: int | None) -> Traffic:
        """Halos and maps."""
        return self.boundary_states.traffic(rank, element_bytes)


def _segments(tokens: TokenLayout, reach: int) -> SequenceSegments:
    return SequenceSegments(tokens.cu_seqlens, tokens.layout, reach)
