"""What sequences take over the boundaries of a pack: states and halos from before it and after it.

A recurrence starts in a state, and its convolution after a few inputs, the halo. Callers have both
for the whole pack and all heads, the same on every rank. Here sequences are whole on the ranks:
each rank takes the entries of its heads, and the final ones are gathered.
"""

# N sequences, F segments of this rank, P = convolution width - 1, H heads, K key dim, V value dim,
# T tokens of the core, W channels of the convolution

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from pcomm.core.collectives.autograd import differentiable
from pcomm.core.collectives.protocol import Collectives
from pcomm.core.errors import ConfigError, LayoutError
from pcomm.gdn_cp.specs import Convolution, RecurrentState, Summary
from pcomm.gdn_cp.strategies.head_share import HeadShare
from pcomm.gdn_cp.token_layout import IndexTensors, TokenLayout

__all__ = ["BoundaryStates"]


class BoundaryStates(IndexTensors):
    """States and halos of sequences that are whole on this rank, or of all heads and tokens.

    Args:
        share: The mixer, and its heads on this rank.
        tokens: The pack and its layout.
        rank: This rank's place in the group.
    """

    def __init__(self, share: HeadShare, tokens: TokenLayout, rank: int) -> None:
        super().__init__(tokens, rank)
        self.share, self.spec = share, share.spec

    @property
    def num_segments(self) -> int:
        """Sequences, or segments of them, that the core sees."""
        return self.tokens.num_sequences

    @property
    def needs_summary(self) -> bool:
        """Whether `entry_states` needs to know what each segment does to a state."""
        return False

    def conv_halo(
        self, x_TW: Tensor, collectives: Collectives, initial_NPW: Tensor | None
    ) -> Tensor | None:
        """`[F, P, W of this rank]`: the inputs before what the core sees; None if there are none.

        Args:
            x_TW: `[T, W]`, the inputs of the convolution.
            collectives: The group's collectives.
            initial_NPW: `[N, P, W]`, the inputs before the pack, of all channels.
        """
        self.check_initial("Plan.conv_halo", initial_NPW, self.halo_shape)
        if initial_NPW is None:
            return None
        return self.share.take(initial_NPW, self.convolution.names, dim=2)

    def entry_states(
        self, summary: Summary | None, collectives: Collectives, initial_NHKV: Tensor | None
    ) -> Tensor | None:
        """`[F, H of this rank, K, V]`: the states before what the core sees; None if all are zero.

        Args:
            summary: M and B of each segment; ignored where sequences are whole.
            collectives: The group's collectives.
            initial_NHKV: `[N, H, K, V]`, the states before the pack, of all heads.
        """
        self.check_initial("Plan.entry_states", initial_NHKV, self.state_shape)
        return None if initial_NHKV is None else self.share.take(initial_NHKV, "output", dim=1)

    def final_states(
        self, final_FHKV: Tensor, collectives: Collectives, initial_NHKV: Tensor | None
    ) -> Tensor:
        """`[N, H, K, V]` of the whole pack and all heads, from what the core returned."""
        asked = "Plan.final_states"
        self.check_initial(asked, initial_NHKV, self.state_shape)
        _, *dims = self.state_shape(self.share.output.num_heads)
        self.check_final(asked, final_FHKV, (self.num_segments, *dims))
        return self._of_all(final_FHKV, 1, collectives, initial_NHKV)

    def final_halo(
        self, halo_FPW: Tensor, collectives: Collectives, initial_NPW: Tensor | None
    ) -> Tensor:
        """`[N, P, W]` of the whole pack and all heads, from what the convolution returned."""
        asked = "Plan.final_halo"
        self.check_initial(asked, initial_NPW, self.halo_shape)
        names = self.convolution.names
        widths = [share.width for share in self.share.sections if share.section.name in names]
        _, *dims = self.halo_shape(sum(widths))
        self.check_final(asked, halo_FPW, (self.num_segments, *dims))
        gathered = self._of_all(halo_FPW, 2, collectives, initial_NPW)
        if self.share.size == 1:
            return gathered
        return gathered.index_select(2, self.on(gathered.device, self._conv_columns))

    def prepare(self, device: torch.device, is_continued: bool) -> None:
        """Make the index tensors on `device`."""
        if is_continued and self.share.size > 1 and self.spec.convolution is not None:
            self.on(device, self._conv_columns)

    # -- gathering -----------------------------------------------------------------------

    def _of_all(
        self, final: Tensor, dim: int, collectives: Collectives, initial: Tensor | None
    ) -> Tensor:
        """Those of all sequences and heads, rank after rank along `dim`, that of the heads."""
        if self.share.size == 1:
            return final
        return differentiable(collectives).all_gather(final, dim=dim)

    def _conv_columns(self) -> Tensor:
        return torch.tensor(self.share.gathered_columns(self.convolution.names))

    # -- what fits -----------------------------------------------------------------------

    @cached_property
    def state(self) -> RecurrentState:
        """The state of the mixer.

        Raises:
            ConfigError: The mixer has none.
        """
        if self.spec.state is None:
            raise ConfigError(
                f"Plan: states of {self.spec}",
                found="a mixer without a state",
                why="It continues a sequence from all earlier tokens, as from keys and values.",
                fix="Pass states of recurrent mixers only, such as Gated DeltaNet and Mamba-2.",
            )
        return self.spec.state

    @cached_property
    def convolution(self) -> Convolution:
        """The convolution of the mixer.

        Raises:
            ConfigError: The mixer has none.
        """
        if self.spec.convolution is None:
            raise ConfigError(
                f"Plan: halo of {self.spec}",
                found="a mixer without a convolution",
                why="A halo is what a convolution takes from before a sequence or segment.",
                fix="Pass halos of mixers with a convolution only.",
            )
        return self.spec.convolution

    def state_shape(self, num_heads: int | None = None) -> tuple[int, ...]:
        """`[N, H, K, V]` of all heads, or of `num_heads`."""
        all_heads, *dims = self.state.shape
        return (self.tokens.num_sequences, num_heads or all_heads, *dims)

    def halo_shape(self, num_channels: int | None = None) -> tuple[int, ...]:
        """`[N, P, W]` of all channels, or of `num_channels`."""
        num_channels = num_channels or self.convolution.channels
        return (self.tokens.num_sequences, self.convolution.reach, num_channels)

    def check_initial(
        self, asked: str, initial: Tensor | None, shape: Callable[[], tuple[int, ...]]
    ) -> None:
        """Refuse an initial value that is not of the whole pack, before anything is sent."""
        if initial is not None and tuple(initial.shape) != shape():
            raise LayoutError(
                f"{asked}: initial of {type(self.spec).__name__}",
                found=f"shape {tuple(initial.shape)}",
                why=f"It is that of all sequences of the pack and of all heads: {shape()}.",
                fix="Pass what final_states or final_halo of the pack before returned.",
            )

    def check_final(self, asked: str, final: Tensor, wanted: tuple[int, ...]) -> None:
        """Refuse what the core cannot have returned, before anything is sent."""
        if tuple(final.shape) != wanted:
            raise LayoutError(
                f"{asked}: {type(self.spec).__name__}",
                found=f"shape {tuple(final.shape)} on rank {self.rank}",
                why=f"The core of this rank sees {wanted[0]} sequences or segments of them, and "
                f"returns shape {wanted}.",
                fix="Use Plan.cu_seqlens_of(spec) for the core, and pass what it returns.",
            )
