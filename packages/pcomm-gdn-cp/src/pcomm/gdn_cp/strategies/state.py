"""Strategy `state`: tokens stay, and what each segment does to a state travels.

Each rank holds segments of sequences, with all heads. A convolution needs the last inputs of the
segment before (the halo, one gather), a recurrence the state in which each segment starts. For that
each segment that is continued on another rank is summed up as an affine map, all maps are gathered
(one more), and each rank applies those before its own segments. The halo cannot travel with the
maps, which depend on the output of the convolution. Backward is the same with reduce-scatters.
Whole sequences send nothing.
"""

# N sequences, F segments of this rank, S continued segments, P = convolution width - 1, H heads,
# K key dim, V value dim, T tokens of this rank, W channels of the convolution

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from pcomm.core.collectives.autograd import differentiable
from pcomm.core.collectives.protocol import Collectives
from pcomm.core.errors import ConfigError, LayoutError, UnsupportedError
from pcomm.gdn_cp.pack_offsets import PackOffsets
from pcomm.gdn_cp.sequence_segments import SequenceSegments
from pcomm.gdn_cp.specs import Spec, Summary
from pcomm.gdn_cp.strategies.boundary_states import BoundaryStates
from pcomm.gdn_cp.strategies.head_share import HeadShare, Traffic
from pcomm.gdn_cp.strategies.strategy import Strategy
from pcomm.gdn_cp.token_layout import TokenLayout

__all__ = ["StatePassing", "StateStrategy"]


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


class StatePassing(BoundaryStates):
    """States and halos that the segments of this rank take from earlier ones on other ranks.

    Args:
        share: The mixer, of which every rank has all heads.
        tokens: The pack and its layout.
        rank: This rank's place in the group.
        segments: All segments of all ranks, and how they follow each other.
    """

    def __init__(
        self, share: HeadShare, tokens: TokenLayout, rank: int, segments: SequenceSegments
    ) -> None:
        super().__init__(share, tokens, rank)
        self.segments = segments

    @property
    def cu_seqlens(self) -> PackOffsets:
        """Offsets of this rank's segments."""
        return self.segments.offsets_of(self.rank)

    @property
    def num_segments(self) -> int:
        """Number of segments of this rank."""
        return len(self.cu_seqlens) - 1

    @property
    def needs_summary(self) -> bool:
        """Whether a segment of any rank is continued on another one; the same on all ranks."""
        return self.segments.num_slots > 0

    def traffic(self, rank: int, element_bytes: int) -> Traffic:
        """Halo rows and maps to every rank; back, their gradients to the ranks that sent them."""
        if not self.segments.num_slots:
            return Traffic()
        num_heads, key_dim, value_dim = self.state.shape
        map_size = math.prod(self.state.transition.shape(key_dim)) + key_dim * value_dim
        map_bytes = num_heads * map_size * 4
        slots, rows = self.segments.slot_counts, self.segments.tail_counts
        steps = 2 if sum(rows) else 1
        row_bytes = self.convolution.channels * element_bytes if steps == 2 else 0
        own = slots[rank] * map_bytes + rows[rank] * row_bytes
        everything = sum(slots) * map_bytes + sum(rows) * row_bytes
        return Traffic(
            ("all_gather",) * steps,
            ("reduce_scatter",) * steps,
            own * (len(slots) - 1),
            everything - own,
        )

    def conv_halo(
        self, x_TW: Tensor, collectives: Collectives, initial_NPW: Tensor | None
    ) -> Tensor | None:
        """`[F, P, W]`: the inputs before each segment; before a sequence, `initial` or zeros."""
        self.check_initial("Plan.conv_halo", initial_NPW, self.halo_shape)
        if not sum(self.segments.tail_counts):
            return self._of_sequences(initial_NPW)
        self._check_tokens(x_TW)
        device = x_TW.device
        tails = x_TW.index_select(0, self.on(device, self.segments.tail_rows, self.rank))
        gathered = differentiable(collectives).all_gather(tails, sizes=self.segments.tail_counts)
        # What is appended also keeps the gather in the graph of a rank that needs nothing of it:
        # backward is a collective, and every rank has to take part.
        if initial_NPW is None:
            before = gathered.new_zeros(1, gathered.shape[1])
        else:
            before = initial_NPW.flatten(0, 1).to(gathered.dtype)
        rows_FP = self.on(device, self.segments.halo_rows, self.rank, initial_NPW is not None)
        halo = torch.cat([gathered, before]).index_select(0, rows_FP.flatten())
        return halo.view(self.num_segments, *self.halo_shape()[1:])

    def entry_states(
        self, summary: Summary | None, collectives: Collectives, initial_NHKV: Tensor | None
    ) -> Tensor | None:
        """`[F, H, K, V]`: the state in which each segment starts, the first ones in `initial`."""
        self.check_initial("Plan.entry_states", initial_NHKV, self.state_shape)
        if not self.segments.num_slots:
            return self._of_sequences(initial_NHKV)
        parts = self._checked(summary)
        own = self.on(parts[0].device, self.segments.own_slots, self.rank)
        message = torch.cat([x.index_select(0, own).flatten(1) for x in parts], 1)
        gathered = differentiable(collectives).all_gather(message, sizes=self.segments.slot_counts)
        columns = gathered.split([x.shape[1:].numel() for x in parts], 1)
        transitions, written = (
            column.unflatten(1, x.shape[1:]) for column, x in zip(columns, parts, strict=True)
        )
        return self._fold(transitions, written, initial_NHKV)

    def prepare(self, device: torch.device, is_continued: bool) -> None:
        """Rows of the halo, the steps of the composition, and where sequences begin and end."""
        segments = self.segments
        if is_continued:
            self.on(device, self._sequences)
            self.on(device, segments.own_ends, self.rank)
            for has_initial in (False, True):
                self.on(device, segments.end_rows, has_initial)
        if segments.num_slots:
            for make in (segments.tail_rows, segments.own_slots):
                self.on(device, make, self.rank)
            for has_initial in (False, True)[: 1 + is_continued]:
                self.on(device, segments.halo_rows, self.rank, has_initial)
            self.on(device, self._first_slots)
            self._steps_on(device, 0 if is_continued else 1)

    # -- applying maps -------------------------------------------------------------------

    def _fold(self, transitions: Tensor, written: Tensor, initial_NHKV: Tensor | None) -> Tensor:
        """Apply the maps of the segments before each of this rank's, from the first one on."""
        device = written.device
        # In both cases what was gathered stays in the graph of a rank whose segments are all first
        # ones; see `conv_halo`.
        if initial_NHKV is None:
            # From zero, the first segment leaves what it has written.
            depth, known = 1, torch.cat([written, torch.zeros_like(written[:1])])
            state = known.index_select(0, self.on(device, self._first_slots))
        else:
            depth, known = 0, torch.cat([initial_NHKV.to(written.dtype), written])
            state = known.index_select(0, self.on(device, self._sequences))
        for mine, slots in self._steps_on(device, depth):
            summary = transitions.index_select(0, slots), written.index_select(0, slots)
            after = self.state.transition.apply(summary, state.index_select(0, mine))
            state = state.index_copy(0, mine, after)
        return state

    def _steps_on(self, device: torch.device, first: int) -> list[tuple[Tensor, Tensor]]:
        """From each depth `first` on, the segments of this rank with one there, and its slot."""
        return [
            (
                self.on(device, self._with_slot, depth),
                self.on(device, self.segments.slot_before, self.rank, depth),
            )
            for depth in range(first, self._deepest)
        ]

    # -- gathering -----------------------------------------------------------------------

    def _of_all(
        self, final: Tensor, dim: int, collectives: Collectives, initial: Tensor | None
    ) -> Tensor:
        """What the last segment of each sequence left, or `initial` where a sequence is empty."""
        counts, device = self.segments.end_counts, final.device
        own = final.index_select(0, self.on(device, self.segments.own_ends, self.rank))
        gathered = differentiable(collectives).all_gather(own, sizes=counts) if sum(counts) else own
        if initial is None:
            nothing = gathered.new_zeros(1, *gathered.shape[1:])
        else:
            nothing = initial.to(gathered.dtype)
        rows = self.on(device, self.segments.end_rows, initial is not None)
        if sum(counts) < self.tokens.num_sequences:
            gathered = torch.cat([gathered, nothing])
        return gathered.index_select(0, rows)

    def _of_sequences(self, initial: Tensor | None) -> Tensor | None:
        """Initial values of the sequences of this rank, which are whole."""
        if initial is None:
            return None
        return initial.index_select(0, self.on(initial.device, self._sequences))

    # -- index tensors, made once --------------------------------------------------------

    @cached_property
    def _deepest(self) -> int:
        num_before = self.segments.num_before(self.rank)
        return int(num_before.max()) if len(num_before) else 0

    def _with_slot(self, depth: int) -> Tensor:
        return (self.segments.num_before(self.rank) > depth).nonzero().flatten()

    def _first_slots(self) -> Tensor:
        num_before = self.segments.num_before(self.rank)
        first = torch.full_like(num_before, self.segments.num_slots)
        first[num_before > 0] = self.segments.slot_before(self.rank, 0)
        return first

    def _sequences(self) -> Tensor:
        return self.segments.of_rank(self.rank).sequence

    # -- what fits -----------------------------------------------------------------------

    def _check_tokens(self, x_TW: Tensor) -> None:
        wanted = (self.cu_seqlens[-1], self.convolution.channels)
        if tuple(x_TW.shape) != wanted:
            raise LayoutError(
                f"Plan.conv_halo: {type(self.spec).__name__}",
                found=f"shape {tuple(x_TW.shape)} on rank {self.rank}",
                why=f"The convolution of this rank has {wanted[0]} tokens and {wanted[1]} "
                f"channels, those of {', '.join(self.convolution.names)}.",
                fix="Pass the inputs of the convolution, as to_heads(fused=...) returns them.",
            )

    def _checked(self, summary: Summary | None) -> Summary:
        if summary is None:
            raise ConfigError(
                f"Plan.entry_states: {type(self.spec).__name__}",
                found="no summary",
                why=f"{self.segments.num_slots} segments are continued on other ranks.",
                fix="Pass the summary of the core wherever Plan.needs_summary(spec) says so.",
            )
        wanted = (self.num_segments, self.state.num_heads)
        for x in summary:
            if x.dim() < 2 or tuple(x.shape[:2]) != wanted:
                raise LayoutError(
                    f"Plan.entry_states: {type(self.spec).__name__}",
                    found=f"shape {tuple(x.shape)} on rank {self.rank}",
                    why=f"This rank has {wanted[0]} segments, with {wanted[1]} heads.",
                    fix="Use Plan.cu_seqlens_of(spec) for the core and for its summary.",
                )
        return summary
