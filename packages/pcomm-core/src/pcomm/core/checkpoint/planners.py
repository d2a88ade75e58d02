"""The planners with which torch.distributed.checkpoint writes and reads shard views."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from pcomm.core.checkpoint.coverage import Box, first_gap
from pcomm.core.checkpoint.shard_view import ShardView
from pcomm.core.errors import ConfigError, DivergenceError

__all__ = ["ShardLoadPlanner", "ShardSavePlanner"]


class _RankData(NamedTuple):
    """Data that a rank sends to the coordinator beside its chunks.

    Attributes:
        same: Values that every rank must have as well, by name.
        of_first_rank: Names of tensors that are taken from the first rank that has them.
    """

    same: dict[str, str]
    of_first_rank: frozenset[str]


class ShardSavePlanner(DefaultSavePlanner):
    """Writes each view's chunks; a chunk that several ranks hold is written by one of them.

    Args:
        is_first_rank_saved: True to write tensors that are not flat ranges on the first rank that
            has them, since they may differ between ranks, as running averages of BatchNorm do.
            False spreads them over the ranks that have them: the mean may then come from one rank
            and the variance from another.
    """

    def __init__(self, *, is_first_rank_saved: bool = False) -> None:
        # Names are flat already, and a view is none of the tensors that torch would flatten.
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._is_first_rank_saved = is_first_rank_saved

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Look values up, and remember them until they are written."""
        saved = [view.to_save(name) for name, view in state_dict.items()]
        self.state_dict = {one.name: one.view for one in saved}
        self.is_coordinator = is_coordinator
        self._data = _RankData(
            {one.name: one.same for one in saved if one.same is not None},
            frozenset(
                one.name
                for one in saved
                if self._is_first_rank_saved and one.view.flat_range is None
            ),
        )

    def create_local_plan(self) -> SavePlan:
        """All chunks that this rank holds; the global plan removes duplicates."""
        views: Mapping[str, ShardView] = self.state_dict
        items = [item for name, view in views.items() for item in view.write_items(name)]
        self.plan = SavePlan(items, planner_data=self._data)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Compare values that must be the same, and leave some tensors to their first rank.

        Raises:
            DivergenceError: Ranks have different values, and only one of them would be saved.
        """
        known: dict[str, tuple[int, str]] = {}
        taken: set[MetadataIndex] = set()
        kept: list[SavePlan] = []
        for rank, plan in enumerate(all_plans):
            data: _RankData = plan.planner_data
            for name, value in data.same.items():
                first, expected = known.setdefault(name, (rank, value))
                if value != expected:
                    raise _different(name, (first, expected), (rank, value))
            items = [
                item
                for item in plan.items
                if item.index.fqn not in data.of_first_rank or item.index not in taken
            ]
            taken.update(item.index for item in items)
            kept.append(replace(plan, items=items))
        return super().create_global_plan(kept)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The chunk that a write item names."""
        view: ShardView = self.state_dict[index.fqn]
        assert index.offset is not None
        return view.chunk_at(index.offset)


class ShardLoadPlanner(LoadPlanner):
    """Reads into each view the saved chunks that overlap it, whatever layout wrote them.

    The caller calls `put` after the load.
    """

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Find the saved entry of each view."""
        assert metadata is not None
        self._saved = metadata.state_dict_metadata
        targets = [view.to_load(name, self._saved) for name, view in state_dict.items()]
        self._views: dict[str, ShardView] = {target.name: target.view for target in targets}
        self._puts: list[Callable[[], None]] = [t.put for t in targets if t.put is not None]

    def put(self) -> None:
        """Put state that was loaded into new tensors, or as text, in its place. Local."""
        for put in self._puts:
            put()

    def create_local_plan(self) -> LoadPlan:
        """One read for each overlap of a saved chunk with one of ours.

        Raises:
            ConfigError: A tensor is missing, has another logical shape, or was not saved in whole;
                raised before anything is read.
        """
        items: list[ReadItem] = []
        for name, view in self._views.items():
            saved = self._saved.get(name)
            if not isinstance(saved, TensorStorageMetadata) or saved.size != view.logical_shape:
                found = "nothing" if saved is None else f"shape {tuple(getattr(saved, 'size', ()))}"
                raise ConfigError(
                    f"checkpoint: {name} of shape {tuple(view.logical_shape)}",
                    found=f"{found} under that name",
                    why="The checkpoint was written by a model of another shape.",
                    fix="Load it with the configuration that stands beside it.",
                )
            chunks = [chunk for chunk, _ in view.chunks()]
            reads = create_read_items_for_chunk_list(name, saved, chunks)
            _check_covered(name, chunks, reads)
            items += reads
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Each rank reads for itself."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Nothing to add."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Never called: every entry is a tensor."""
        raise AssertionError(f"{read_item.dest_index.fqn} is not a tensor")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The elements of our tensor that a read fills."""
        index = read_item.dest_index
        assert index.offset is not None
        target = self._views[index.fqn].chunk_at(index.offset)
        for dim, (start, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            target = target.narrow(dim, start, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing to do: the elements were filled in place."""


def _different(name: str, one: tuple[int, str], other: tuple[int, str]) -> DivergenceError:
    return DivergenceError(
        f"save_checkpoint: {name}",
        found=f"{one[1][:80]} on rank {one[0]}, {other[1][:80]} on rank {other[0]}",
        why="It is not spread like its parameter, so one value is saved for all.",
        fix="Use an optimizer with counts and averages that do not depend on the shard, "
        "or leave that key out by keys=.",
    )


def _check_covered(
    name: str, chunks: Sequence[ChunkStorageMetadata], reads: Sequence[ReadItem]
) -> None:
    """Refuse a plan that leaves some of a chunk as it was: old numbers among loaded ones."""
    parts: dict[torch.Size | None, list[Box]] = defaultdict(list)
    for read in reads:
        parts[read.dest_index.offset].append(Box.at(read.dest_offsets, read.lengths))
    for chunk in chunks:
        gap = first_gap(Box.at([0] * len(chunk.sizes), chunk.sizes), parts[chunk.offsets])
        if gap is not None:
            starts = [o + n for o, n in zip(chunk.offsets, gap.starts, strict=True)]
            stops = [o + n for o, n in zip(chunk.offsets, gap.stops, strict=True)]
            raise ConfigError(
                f"checkpoint: {name}{Box(tuple(starts), tuple(stops))}",
                found="no saved chunk that holds these elements",
                why="They would keep what they were before, and a model would be partly loaded.",
                fix="Load another checkpoint: in this one a rank's shard was not saved.",
            )
