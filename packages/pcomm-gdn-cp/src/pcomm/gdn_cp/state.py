"""Mode `state`: tokens stay where they are, and what travels is what each piece does to a state.

Each rank holds pieces of sequences. Its convolution needs the last inputs of the pieces before
(the halo, one gather), its recurrence the state in which each piece starts. For that every piece
that goes on elsewhere is summed up as an affine map, all maps are gathered (one more), and each
rank composes those that lie before its own pieces. The halo cannot ride with the maps, which are
made of what comes out of the convolution. Backward is the same with reduce-scatters.
"""

# F pieces on this rank, S pieces that go on, t tokens of this rank, H heads, K key dim, V value dim

from __future__ import annotations

from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from pcomm.core.collectives.differentiable import differentiable
from pcomm.core.collectives.protocol import Collectives
from pcomm.core.errors import LayoutError, UnsupportedError
from pcomm.gdn_cp.cores.gated_delta_summary import apply_summary
from pcomm.gdn_cp.cores.state_space_summary import apply_decay_summary
from pcomm.gdn_cp.pieces import Pieces
from pcomm.gdn_cp.route import Route, Traffic
from pcomm.gdn_cp.specs import AttentionSpec, Spec
from pcomm.gdn_cp.tokens import Tokens

__all__ = ["StateRoute"]


class StateRoute(Route):
    """The tokens of this rank as pieces of sequences, with all heads.

    Raises:
        UnsupportedError: The mixer has no state.
    """

    mode = "state"

    def __init__(self, spec: Spec, tokens: Tokens, rank: int) -> None:
        super().__init__(spec, tokens, rank)
        if isinstance(spec, AttentionSpec):
            raise UnsupportedError(
                f"make_plan: mode 'state' for {spec}",
                found="a mixer without a state",
                why="Softmax attention has to see every token before, not a summary of them.",
                fix="Use mode 'heads', 'docs' or 'gather' for it.",
            )
        self._mixer = spec

    @property
    def pieces(self) -> Pieces:
        """All pieces of all ranks, and how they follow each other."""
        return self.tokens.derived(Pieces, self._mixer.conv_width - 1)

    @cached_property
    def cu_seqlens(self) -> tuple[int, ...]:
        """Offsets of this rank's pieces."""
        own = self.pieces.of_rank(self.rank)
        return tuple(accumulate((own.stop - own.start).tolist(), initial=0))

    @property
    def core_rows(self) -> int:
        """Tokens of this rank."""
        return self.tokens.local_tokens

    @property
    def needs_summary(self) -> bool:
        """Whether any piece of any rank goes on elsewhere; the same on all ranks."""
        return self.pieces.num_slots > 0

    def core_tokens(self) -> Tensor:
        """The tokens of this rank, as they lie."""
        return self.tokens.of_rank(self.rank)

    def traffic(self, rank: int, element_bytes: int, hidden_dim: int | None) -> Traffic:
        """Halo rows and maps to everybody; back, the gradients of the others' to each of them."""
        if not self.pieces.num_slots:
            return Traffic()
        num_heads, key_dim, value_dim = self._mixer.state_shape
        transition = key_dim * key_dim if self._mixer.transition == "matrix" else 1
        map_bytes = num_heads * (transition + key_dim * value_dim) * 4
        row_bytes = self._mixer.conv_channels * element_bytes
        slots, rows = self.pieces.slot_counts, self.pieces.tail_counts
        own = slots[rank] * map_bytes + rows[rank] * row_bytes
        everything = sum(slots) * map_bytes + sum(rows) * row_bytes
        steps = 2 if sum(rows) else 1
        return Traffic(
            ("all_gather",) * steps,
            ("reduce_scatter",) * steps,
            own * (self.tokens.size - 1),
            everything - own,
        )

    def conv_halo(self, x_TW: Tensor, collectives: Collectives) -> Tensor | None:
        """`[F, conv_width - 1, W]`: the inputs before each piece, zeros before a sequence."""
        if not sum(self.pieces.tail_counts):
            return None
        self.check_rows("Plan.conv_halo", x_TW, self.core_rows)
        tails = x_TW.index_select(0, self.on(x_TW.device, self._tail_rows))
        gathered = differentiable(collectives).all_gather(tails, sizes=self.pieces.tail_counts)
        # The row of zeros also keeps the gather in the graph of a rank that needs nothing of it:
        # backward is a collective, and every rank has to come.
        rows = torch.cat([gathered, gathered.new_zeros(1, gathered.shape[1])])
        halo = rows.index_select(0, self.on(x_TW.device, self._halo_rows))
        return halo.view(len(self.cu_seqlens) - 1, self._mixer.conv_width - 1, -1)

    def entry_states(
        self, summary: tuple[Tensor, Tensor], collectives: Collectives
    ) -> Tensor | None:
        """`[F, H, K, V]`: the state in which each piece starts; zeros if it is the first."""
        if not self.pieces.num_slots:
            return None
        for x in summary:
            self._check_pieces(x)
        own = self.on(summary[0].device, self._own_slots)
        message = torch.cat([x.index_select(0, own).flatten(1) for x in summary], 1)
        gathered = differentiable(collectives).all_gather(message, sizes=self.pieces.slot_counts)
        widths = [x[0].numel() for x in summary]
        parts = gathered.split(widths, 1)
        transitions, written = (
            part.unflatten(1, x.shape[1:]) for part, x in zip(parts, summary, strict=True)
        )
        return self._fold(transitions, written)

    def prepare(self, device: torch.device) -> None:
        """Rows of the halo, and the steps of the composition."""
        if self.pieces.num_slots:
            for make in (self._tail_rows, self._halo_rows, self._own_slots, self._first_slots):
                self.on(device, make)
            self._steps_on(device)

    # -- composing -----------------------------------------------------------------------

    def _fold(self, transitions: Tensor, written: Tensor) -> Tensor:
        """Walk through the pieces before each of mine, from the first one on."""
        apply = apply_summary if self._mixer.transition == "matrix" else apply_decay_summary
        # A piece that starts its sequence takes the zeros behind the last slot; see `conv_halo`.
        with_zero = torch.cat([written, torch.zeros_like(written[:1])])
        state = with_zero.index_select(0, self.on(written.device, self._first_slots))
        for mine, slots in self._steps_on(written.device):
            summary = transitions.index_select(0, slots), written.index_select(0, slots)
            after = apply(summary, state.index_select(0, mine))
            state = state.index_copy(0, mine, after)
        return state

    def _steps_on(self, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        """For each further piece before mine: which of mine have one, and its slot."""
        return [
            (self.on(device, self._with_slot, depth), self.on(device, self._slot_at, depth))
            for depth in range(1, self._deepest)
        ]

    @cached_property
    def _deepest(self) -> int:
        return max(self.pieces.num_before(self.rank).tolist(), default=0)

    def _with_slot(self, depth: int) -> Tensor:
        return (self.pieces.num_before(self.rank) > depth).nonzero().flatten()

    def _slot_at(self, depth: int) -> Tensor:
        return self.pieces.slot_before(self.rank, depth)

    def _first_slots(self) -> Tensor:
        num_before = self.pieces.num_before(self.rank)
        first = torch.full_like(num_before, self.pieces.num_slots)
        first[num_before > 0] = self.pieces.slot_before(self.rank, 0)
        return first

    def _own_slots(self) -> Tensor:
        return self.pieces.own_slots(self.rank)

    def _tail_rows(self) -> Tensor:
        return self.pieces.tail_rows(self.rank)

    def _halo_rows(self) -> Tensor:
        return self.pieces.halo_rows(self.rank).flatten()

    def _check_pieces(self, x: Tensor) -> None:
        num_pieces = len(self.cu_seqlens) - 1
        if x.dim() < 2 or x.shape[:2] != (num_pieces, self._mixer.state_shape[0]):
            raise LayoutError(
                f"Plan.entry_states: {type(self.spec).__name__}",
                found=f"shape {tuple(x.shape)} on rank {self.rank}",
                why=f"This rank has {num_pieces} pieces, with {self._mixer.state_shape[0]} heads.",
                fix="Use Plan.cu_seqlens_of(spec) for the core and for its summary.",
            )
