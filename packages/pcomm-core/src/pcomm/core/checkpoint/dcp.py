"""Shards in torch.distributed.checkpoint: planners, proof that they cover, and a safe reader."""

from __future__ import annotations

import io
import pathlib
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.serialization import _get_layout

from pcomm.core.checkpoint.views import ShardView
from pcomm.core.errors import ConfigError, DivergenceError

__all__ = ["Box", "SafeReader", "ShardLoadPlanner", "ShardSavePlanner", "first_gap"]


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


class _RankData(NamedTuple):
    """Data that a rank sends to the coordinator beside its chunks.

    Attributes:
        same: Values that every rank must have as well, by name.
        of_first_rank: Names of tensors that are taken from the first rank that has them.
    """

    same: dict[str, str]
    of_first_rank: frozenset[str]


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


class Box(NamedTuple):
    """Elements of a tensor between two corners.

    Attributes:
        starts: The first index of each dimension.
        stops: The index behind the last of each dimension.
    """

    starts: tuple[int, ...]
    stops: tuple[int, ...]

    @classmethod
    def at(cls, offsets: Sequence[int], sizes: Sequence[int]) -> Box:
        """The box of `sizes` at `offsets`."""
        stops = tuple(offset + size for offset, size in zip(offsets, sizes, strict=True))
        return cls(tuple(offsets), stops)

    @property
    def is_empty(self) -> bool:
        """True if it has no element; a box without dimensions has one."""
        return any(start >= stop for start, stop in zip(self.starts, self.stops, strict=True))

    def without(self, other: Box) -> list[Box]:
        """The elements of this box that are not in `other`, as boxes that do not overlap."""
        common = Box(
            tuple(map(max, self.starts, other.starts)), tuple(map(min, self.stops, other.stops))
        )
        if common.is_empty:
            return [self]
        rest: list[Box] = []
        starts, stops = list(self.starts), list(self.stops)
        # Cut off what lies before and behind, one dimension after another; what remains of the
        # box is then common in that dimension.
        for dim in range(len(starts)):
            for first, last in ((starts[dim], common.starts[dim]), (common.stops[dim], stops[dim])):
                if first < last:
                    rest.append(
                        Box(
                            (*starts[:dim], first, *starts[dim + 1 :]),
                            (*stops[:dim], last, *stops[dim + 1 :]),
                        )
                    )
            starts[dim], stops[dim] = common.starts[dim], common.stops[dim]
        return rest

    def __str__(self) -> str:
        ranges = (f"{start}:{stop}" for start, stop in zip(self.starts, self.stops, strict=True))
        return f"[{', '.join(ranges)}]"


def first_gap(whole: Box, parts: Iterable[Box]) -> Box | None:
    """A box of `whole` that no part holds, the one with the lowest corner; None if there is none.

    Args:
        whole: The box to cover.
        parts: Boxes that cover it; they may overlap, and reach beyond it.
    """
    missing = [] if whole.is_empty else [whole]
    # In ascending order, so that what is missing stays one box where parts are rows.
    for part in sorted(parts):
        missing = [rest for box in missing for rest in box.without(part)]
        if not missing:
            return None
    return min(missing, default=None)


_METADATA = (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)


def _memory_format(kind: object, name: str) -> object:
    """A member of one enumeration, as Python 3.11.2 pickles it: by `getattr`, and its name."""
    formats = metadata._MEM_FORMAT_ENCODING
    if kind is not formats or name not in formats.__members__:
        raise pickle.UnpicklingError(f"it asks for {name!r} of {kind!r}, which no index does")
    return formats[name]


_DTYPES = tuple(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))
_ALLOWED = MappingProxyType(
    {
        **{(metadata.__name__, name): getattr(metadata, name) for name in _METADATA},
        **{("torch", name): getattr(torch, name) for name in _DTYPES},
        ("torch", "Size"): torch.Size,
        ("builtins", "getattr"): _memory_format,
        ("torch.serialization", "_get_layout"): _get_layout,
        (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
        # Where the checkpoint was written, which says nothing about where it is now.
        ("pathlib", "PosixPath"): pathlib.PurePosixPath,
        ("pathlib", "WindowsPath"): pathlib.PureWindowsPath,
        ("pathlib._local", "PosixPath"): pathlib.PurePosixPath,
        ("pathlib._local", "WindowsPath"): pathlib.PureWindowsPath,
    }
)
"""What may be named in an index, by module and name."""


class SafeReader(FileSystemReader):
    """Reads what torch's own reader reads; an index that names anything else is an error.

    Tensors are read by torch with `weights_only=True`, from files beside the index alone.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index.

        Raises:
            pickle.UnpicklingError: It names what no index holds, or is no index.
        """
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            index = _IndexUnpickler(io.BytesIO(file.read())).load()
        if not isinstance(index, Metadata) or not isinstance(index.storage_data, dict):
            raise pickle.UnpicklingError(f"a {type(index).__name__} in place of an index")
        for entry in index.storage_data.values():
            _check_entry(entry)
        if index.storage_meta is None:
            index.storage_meta = StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it names {module}.{name}, which is not part of an index"
            ) from None


def _check_entry(entry: object) -> None:
    """Refuse an entry that leads out of the folder, or through a decoder that we did not write."""
    if not isinstance(entry, filesystem._StorageInfo) or not isinstance(entry.relative_path, str):
        raise pickle.UnpicklingError(f"a {type(entry).__name__} in place of a file's name")
    if Path(entry.relative_path).name != entry.relative_path or entry.relative_path in ("", ".."):
        raise pickle.UnpicklingError(f"the file {entry.relative_path!r}, outside of its folder")
    if getattr(entry, "transform_descriptors", None):
        raise pickle.UnpicklingError(f"a file that was written as {entry.transform_descriptors}")
