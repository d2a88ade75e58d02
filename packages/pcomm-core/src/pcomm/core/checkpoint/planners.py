"""How torch.distributed.checkpoint reads and writes regions."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

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
from pcomm.core.errors import ConfigError

__all__ = ["ShardLoadPlanner", "ShardSavePlanner"]


class ShardSavePlanner(DefaultSavePlanner):
    """Writes each region's pieces; a piece that several replicas hold is written by one."""

    def __init__(self) -> None:
        # Names are flat already, and a region is none of the tensors that torch would flatten.
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Remember what is saved."""
        self.state_dict = state_dict
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """All pieces that this rank holds; the global plan removes duplicates."""
        regions: Mapping[str, ShardView] = self.state_dict
        self.plan = SavePlan([i for name, r in regions.items() for i in r.write_items(name)])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The piece that a write item names."""
        region: ShardView = self.state_dict[index.fqn]
        assert index.offset is not None
        return region.piece_at(index.offset)


class ShardLoadPlanner(LoadPlanner):
    """Reads into each region the parts of saved pieces that overlap it, whatever wrote them."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Remember what is wanted and what there is."""
        assert metadata is not None
        self._regions: Mapping[str, ShardView] = state_dict
        self._saved = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        """One read for each overlap of a saved piece with one of ours.

        Raises:
            ConfigError: A tensor is missing, has another logical shape, or was not saved in whole;
                raised before anything is read.
        """
        items: list[ReadItem] = []
        for name, region in self._regions.items():
            saved = self._saved.get(name)
            if not isinstance(saved, TensorStorageMetadata) or saved.size != region.logical_shape:
                found = "nothing" if saved is None else f"shape {tuple(getattr(saved, 'size', ()))}"
                raise ConfigError(
                    f"checkpoint: {name} of shape {tuple(region.logical_shape)}",
                    found=f"{found} under that name",
                    why="The checkpoint was written by a model of another shape.",
                    fix="Load it with the configuration that stands beside it.",
                )
            chunks = [chunk for chunk, _ in region.pieces()]
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
        """Never called: everything that is not a tensor is in the run's own JSON file."""
        raise AssertionError(f"{read_item.dest_index.fqn} is not a tensor")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The part of our tensor that a read fills."""
        index = read_item.dest_index
        assert index.offset is not None
        target = self._regions[index.fqn].piece_at(index.offset)
        for dim, (start, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            target = target.narrow(dim, start, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing to do: the part was filled in place."""


def _check_covered(
    name: str, chunks: Sequence[ChunkStorageMetadata], reads: Sequence[ReadItem]
) -> None:
    """Refuse a plan that leaves a part of a chunk as it was: old numbers among loaded ones."""
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
                found="no saved piece that holds these elements",
                why="They would keep what they were before, and a model would be partly loaded.",
                fix="Load another checkpoint: in this one a rank's part was not saved.",
            )
