"""A bucket of gradients summed over replicas of different degrees, in one of two ways; the norm.

| | interval | gather-core |
|---|---|---|
| inside a tensor-parallel group | nothing | an exchange to as few ranks as the least degree has |
| between replicas | a sum for each segment | a sum for each of these ranks |
| afterwards | nothing | the exchange back |

The norm of all gradients counts each once, and has the same bits on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pcomm.core.collectives.protocol import Collectives, Pending
from pcomm.core.exchange.exchange import Exchange, SectionExchange
from pcomm.core.groups.group import Group
from pcomm.core.layout import Layout
from pcomm.core.tensor_parallel.optimizers import sum_of_squares
from pcomm.ntp.planning.cuts import SegmentGroup
from pcomm.ntp.planning.plan import NtpPlan
from pcomm.ntp.sync.grad_groups import TensorGroup, all_tensor_groups, core_group, tensor_groups
from pcomm.ntp.sync.params import SyncedParam

__all__ = ["BucketSum", "GatherCoreSum", "IntervalSum", "NormSlots", "SumPlan", "canonical_norm"]


class BucketSum(Protocol):
    """The sum of the gradients of one bucket, which begins in backward and ends in `finish`."""

    def start(self, gradients: Sequence[Tensor], weight: float) -> None:
        """Begin to sum `weight` times the gradients. Collective over the bucket's groups."""
        ...

    def finish(self, gradients: Sequence[Tensor]) -> None:
        """Wait, and write the sums into the gradients. Collective for gather-core."""
        ...


class IntervalSum:
    """Each range of units is summed over the ranks that hold it; nothing moves inside a group."""

    def __init__(self, params: Sequence[SyncedParam], sums: SumPlan) -> None:
        slices: dict[tuple[int, ...], list[Slice]] = {}
        index = sums.place.index
        for number, param in enumerate(params):
            shape = param.parameter.shape
            if param.units is None:
                whole = Slice(number, shape, adds=param.adds)
                slices.setdefault(sums.stage_ranks, []).append(whole)
                continue
            for one in sums.segments(param.key):
                own = slices.setdefault(one.ranks, [])
                for run in param.local_ranges(index, one.start, one.stop):
                    own.append(_cut(number, shape, param.dim, run.start, run.length))
        self._reductions = sums.reductions(slices, params[0])

    def start(self, gradients: Sequence[Tensor], weight: float) -> None:
        """Pack every range and start its all-reduce. Collective over the bucket's groups."""
        for reduction in self._reductions:
            reduction.start(gradients, weight)

    def finish(self, gradients: Sequence[Tensor]) -> None:
        """Wait, and write the sums into the gradients. Local."""
        for reduction in self._reductions:
            reduction.finish(gradients)


class GatherCoreSum:
    """All groups take on the layouts of the least degree, sum there, and take back their own.

    The exchanges block; between the two, sums are in flight while backward goes on. Ranks of one
    tensor-parallel group start buckets in one order, as they compute the same backward.
    """

    def __init__(self, params: Sequence[SyncedParam], sums: SumPlan) -> None:
        plan, place = sums.plan, sums.place
        groups = sums.tensor_groups
        core = core_group(plan, groups, place.stage)
        own = next(group for group in groups if sums.rank in group.ranks)
        self._split = [i for i, param in enumerate(params) if param.units is not None]
        self._ways: tuple[SectionExchange, SectionExchange] | None = None
        self._group: Group | None = None
        layouts = [plan.layout(params[i].key, core.replica, place.stage) for i in self._split]
        if plan.form(own.replica, place.stage) != plan.form(core.replica, place.stage):
            self._group = sums.open_group(own.ranks)
            if self._split:
                exchanges = [
                    _exchange(params[i], layout, own)
                    for i, layout in zip(self._split, layouts, strict=True)
                ]
                back = Exchange.sections([one.inverse for one in exchanges])
                self._ways = Exchange.sections(exchanges), back
        slices: dict[tuple[int, ...], list[Slice]] = {}
        if place.index < len(core.ranks):
            ranks = tuple(sorted(group.ranks[place.index] for group in groups))
            for i, layout in zip(self._split, layouts, strict=True):
                shape = list(params[i].parameter.shape)
                shape[params[i].dim] = layout.sizes[place.index]
                slices.setdefault(ranks, []).append(Slice(i, torch.Size(shape)))
        for i, param in enumerate(params):
            if param.units is None:
                whole = Slice(i, param.parameter.shape, adds=param.adds)
                slices.setdefault(sums.stage_ranks, []).append(whole)
        self._reductions = sums.reductions(slices, params[0])
        self._regions: list[Tensor] = []

    def start(self, gradients: Sequence[Tensor], weight: float) -> None:
        """Exchange, pack, and start the sums. Collective over the bucket's groups."""
        self._regions = list(gradients)
        if self._ways is not None and self._group is not None:
            own = [gradients[i] for i in self._split]
            found = self._ways[0].apply(own, self._group.collectives)
            for i, region in zip(self._split, found, strict=True):
                self._regions[i] = region
        for reduction in self._reductions:
            reduction.start(self._regions, weight)

    def finish(self, gradients: Sequence[Tensor]) -> None:
        """Wait, exchange back, and write the sums into the gradients. Collective."""
        regions, self._regions = self._regions, []
        for reduction in self._reductions:
            reduction.finish(regions)
        if self._ways is not None and self._group is not None:
            own = [regions[i] for i in self._split]
            found = self._ways[1].apply(own, self._group.collectives)
            for i, gradient in zip(self._split, found, strict=True):
                gradients[i].copy_(gradient)


def _exchange(param: SyncedParam, core: Layout, own: TensorGroup) -> Exchange:
    """From the layout of a group to that of the core group, on the group's first ranks."""
    assert param.layout is not None
    runs = [*core.runs, *([()] * (len(own.ranks) - core.size))]
    return Exchange({param.dim: param.layout}, {param.dim: Layout(core.length, runs)})


def _cut(tensor: int, shape: torch.Size, dim: int, start: int, length: int) -> Slice:
    own = list(shape)
    own[dim] = length
    return Slice(tensor, torch.Size(own), dim, start)


class SumPlan:
    """What the buckets of one rank have in common.

    Args:
        plan: Plan of the job.
        rank: Global rank of this process.
        names: Name of the group of each set of ranks, in one order for all.
        group: Function from such a set to the open group.

    Attributes:
        place: Place of this rank.
        tensor_groups: The tensor-parallel groups of this rank's stage.
        stage_ranks: All used ranks of this stage, ascending; they sum what is replicated.
        open_group: Function from a set of ranks to the open group.
    """

    def __init__(
        self,
        plan: NtpPlan,
        rank: int,
        names: Mapping[tuple[int, ...], str],
        group: Callable[[tuple[int, ...]], Group],
    ) -> None:
        self.plan, self.rank, self.place = plan, rank, plan.place(rank)
        self.tensor_groups = tensor_groups(plan, self.place.stage)
        self.stage_ranks = tuple(sorted(r for one in self.tensor_groups for r in one.ranks))
        self.open_group = group
        self._places = {ranks: number for number, ranks in enumerate(names)}
        self._segments: dict[str, list[SegmentGroup]] = {}

    def reductions(
        self, slices: Mapping[tuple[int, ...], Sequence[Slice]], like: SyncedParam
    ) -> list[PackedReduction]:
        """A reduction for each set of ranks, in the order of the groups."""
        device, dtype = like.parameter.device, like.reduce_dtype
        ordered = sorted(slices.items(), key=lambda pair: self._places[pair[0]])
        return [PackedReduction(self.open_group(r), own, dtype, device) for r, own in ordered]

    def segments(self, key: str) -> list[SegmentGroup]:
        """The ranges of units that this rank holds, each with the ranks that hold it."""
        if key not in self._segments:
            found = self.plan.groups(key, self.rank)
            self._segments[key] = [one for one in found if self.rank in one.ranks]
        return self._segments[key]


@dataclass(frozen=True)
class Slice:
    """Neighbouring positions of one tensor along one dimension.

    Args:
        tensor: Index of the tensor.
        shape: Shape of the slice.
        dim: Dimension along which the tensor is cut.
        start: First position along `dim`.
        adds: False if this rank adds nothing, and gets the sum of what the others add.
    """

    tensor: int
    shape: torch.Size
    dim: int = 0
    start: int = 0
    adds: bool = True

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """The slice, a view."""
        whole = tensors[self.tensor]
        if self.shape == whole.shape:
            return whole
        return whole.narrow(self.dim, self.start, self.shape[self.dim])


class PackedReduction:
    """Sums slices over a group, in one buffer that is kept from step to step.

    Args:
        group: Ranks that hold the same elements, in slices of the same shapes and order.
        slices: The slices of this rank.
        dtype: Data type of the sum.
        device: Device of the tensors.
    """

    def __init__(
        self, group: Group, slices: Sequence[Slice], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.group, self._slices = group, tuple(slices)
        self._dtype, self._device = dtype, device
        self._buffer: Tensor | None = None
        self._views: tuple[Tensor, ...] = ()
        self._pending: Pending | None = None

    def start(self, tensors: Sequence[Tensor], weight: float) -> None:
        """Pack, multiply by `weight`, and start the all-reduce. Collective over the group."""
        if self._buffer is None:
            self._allocate()
        assert self._buffer is not None
        adds = [(view, one) for view, one in zip(self._views, self._slices, strict=True)]
        if any(one.adds for one in self._slices):
            torch._foreach_copy_(
                [view for view, one in adds if one.adds],
                [one.of(tensors) for one in self._slices if one.adds],
            )
        for view, one in adds:
            if not one.adds:
                view.zero_()
        if weight != 1.0:
            self._buffer.mul_(weight)
        self._pending = self.group.collectives.all_reduce_async(self._buffer, out=self._buffer)

    def finish(self, tensors: Sequence[Tensor]) -> None:
        """Wait, and write the sums into the slices. Local."""
        assert self._pending is not None
        self._pending.wait()
        self._pending = None
        torch._foreach_copy_([one.of(tensors) for one in self._slices], list(self._views))

    def _allocate(self) -> None:
        sizes = [one.shape.numel() for one in self._slices]
        # Training cannot write into a tensor of inference mode, which may be on here.
        with torch.inference_mode(False):
            self._buffer = torch.empty(sum(sizes), dtype=self._dtype, device=self._device)
            parts = self._buffer.split(sizes)
            self._views = tuple(
                part.view(one.shape) for part, one in zip(parts, self._slices, strict=True)
            )


class NormSlots:
    """A number for each rank of one replica, in which only that rank adds anything.

    Sums of one number and zeros are exact, so every rank adds up the same numbers in the same
    order, whatever the order in which a backend reduces.

    Args:
        plan: Plan of the job.
        rank: Global rank of this process.

    Attributes:
        count: Number of numbers.
        own: Index of the number of this rank; None if another replica counts.
    """

    def __init__(self, plan: NtpPlan, rank: int) -> None:
        counted: list[int] = []
        for stage, groups in enumerate(all_tensor_groups(plan)):
            chosen = plan.canonical_replica(stage)
            counted += next(group.ranks for group in groups if group.replica == chosen)
        self.count = len(counted)
        self.own = counted.index(rank) if rank in counted else None
        self.is_first = plan.place(rank).index == 0


def canonical_norm(
    gradients: Sequence[tuple[SyncedParam, Tensor]],
    slots: NormSlots,
    collectives: Collectives,
    device: torch.device,
) -> Tensor:
    """The 2-norm in fp64, without a dimension. Collective: one all-reduce over all used ranks.

    Args:
        gradients: Parameters of this rank, each with its summed gradient.
        slots: Numbers of the job.
        collectives: Collectives of all used ranks.
        device: Device of the result.
    """
    squares = torch.zeros(slots.count, dtype=torch.float64, device=device)
    if slots.own is not None:
        counted = [
            # Torch adds up the squares of complex numbers one after another, in their precision.
            torch.view_as_real(gradient) if gradient.is_complex() else gradient
            for param, gradient in gradients
            if param.units is not None or slots.is_first
        ]
        wide = [gradient for gradient in counted if gradient.element_size() > 2]
        squares[slots.own] = sum_of_squares(wide, device)
        for gradient in counted:
            # Torch would round the norm of a gradient of 16 bits to its type. One copy at a time.
            if gradient.element_size() <= 2:
                squares[slots.own] += sum_of_squares([gradient.float()], device)
    return collectives.all_reduce(squares, out=squares).sum().sqrt()
