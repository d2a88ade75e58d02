"""The two ways in which a bucket of gradients is summed over replicas of different degrees.

| | interval | gather-core |
|---|---|---|
| inside a tensor-parallel group | nothing | an exchange to as few ranks as the least degree has |
| between replicas | a sum for each segment | a sum for each of these ranks |
| afterwards | nothing | the exchange back |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from pcomm.core.exchange.exchange import Exchange
from pcomm.core.exchange.sections import SectionExchange
from pcomm.core.groups.group import Group
from pcomm.core.layout import Layout
from pcomm.ntp.planning.plan import Plan
from pcomm.ntp.planning.segments import SegmentGroup
from pcomm.ntp.sync.grad_groups import TensorGroup, core_group, tensor_groups
from pcomm.ntp.sync.packed_reduction import PackedReduction, Slice
from pcomm.ntp.sync.synced_params import SyncedParam

__all__ = ["BucketSum", "GatherCoreSum", "IntervalSum", "SumPlan"]


class BucketSum(Protocol):
    """The sum of the gradients of one bucket, which begins in backward and ends in `finish`."""

    def start(self, gradients: Sequence[Tensor], weight: float) -> None:
        """Begin to sum `weight` times the gradients. Collective over the bucket's groups."""
        ...

    def finish(self, gradients: Sequence[Tensor]) -> None:
        """Wait, and write the sums into the gradients. Collective for gather-core."""
        ...


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
        replicated: All used ranks of this stage, ascending.
        open_group: Function from a set of ranks to the open group.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        names: Mapping[tuple[int, ...], str],
        group: Callable[[tuple[int, ...]], Group],
    ) -> None:
        self.plan, self.rank, self.place = plan, rank, plan.place(rank)
        self.tensor_groups = tensor_groups(plan, self.place.stage)
        self.replicated = tuple(sorted(r for one in self.tensor_groups for r in one.ranks))
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


class IntervalSum:
    """Each range of units is summed over the ranks that hold it; nothing moves inside a group."""

    def __init__(self, params: Sequence[SyncedParam], sums: SumPlan) -> None:
        slices: dict[tuple[int, ...], list[Slice]] = {}
        index = sums.place.index
        for number, param in enumerate(params):
            shape = param.parameter.shape
            if param.units is None:
                whole = Slice(number, shape, adds=param.adds)
                slices.setdefault(sums.replicated, []).append(whole)
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
                slices.setdefault(sums.replicated, []).append(whole)
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
