"""One rank's shard of a logical tensor, as torch.distributed.checkpoint wants to see it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from pcomm.core.errors import LayoutError
from pcomm.core.tensor_parallel.param_layout import ParamLayout

__all__ = ["FlatRange", "LoadTarget", "SavedView", "ShardView"]


class FlatRange(NamedTuple):
    """A range of a flattened tensor, such as a shard of it.

    Attributes:
        start: Index of its first element.
        shape: Shape of the tensor that was flattened.
    """

    start: int
    shape: tuple[int, ...]


class SavedView(NamedTuple):
    """One entry of a checkpoint that is about to be written.

    Attributes:
        name: Name in the checkpoint.
        view: The tensor to write.
        same: Text of a value that every rank must have; None where ranks may differ.
    """

    name: str
    view: ShardView
    same: str | None = None


class LoadTarget(NamedTuple):
    """One entry of a checkpoint that is about to be read.

    Attributes:
        name: Name in the checkpoint.
        view: The tensor to read into.
        put: Puts what was read in its place; None where the tensor is the place.
    """

    name: str
    view: ShardView
    put: Callable[[], None] | None = None


@dataclass(frozen=True, eq=False)
class ShardView:
    """A local tensor and the place of its elements in the logical one.

    A fused weight has several chunks on a rank (some rows of the queries, some of the keys), and
    each is a chunk of its own in the checkpoint, at its logical offset. So any other layout finds
    the elements it needs. A range of a flattened tensor is one to several boxes of it.

    Args:
        tensor: This rank's elements; contiguous if they are a flat range.
        param_layout: The layout of the logical tensor over the ranks of its scope.
        rank: This rank's place in the group of that scope.
        flat_range: The range that `tensor` is of what the layout gives to this rank; None if it is
            all of that.
    """

    tensor: Tensor
    param_layout: ParamLayout
    rank: int
    flat_range: FlatRange | None = None

    @property
    def logical_shape(self) -> torch.Size:
        """Shape of the whole tensor."""
        return self.param_layout.logical_shape(self._local_shape)

    def clone(self) -> ShardView:
        """The same view with a copy of the tensor in host memory."""
        copy = torch.empty_like(self.tensor, device="cpu").copy_(self.tensor)
        return ShardView(copy, self.param_layout, self.rank, self.flat_range)

    def to_save(self, name: str) -> SavedView:
        """The entry of this view in a checkpoint. Local."""
        return SavedView(name, self)

    def to_load(self, name: str, saved: Mapping[str, object]) -> LoadTarget:
        """The entry to read into this view.

        Args:
            name: Name of the view.
            saved: The entries of the checkpoint, by name.
        """
        return LoadTarget(name, self)

    def chunks(self) -> Iterator[tuple[ChunkStorageMetadata, Tensor]]:
        """Each chunk's place in the logical tensor, and a view of it here.

        Raises:
            LayoutError: The tensor, or that of which it is a range, is not this rank's shard.
        """
        layout, dim = self.param_layout.layout, self._dim()
        for origin, box in self._boxes():
            if layout is None:
                yield _chunk(origin, box), box
                continue
            start = 0
            for run in layout.runs[self.rank]:
                first = max(start, origin[dim])
                last = min(start + run.length, origin[dim] + box.shape[dim])
                if first < last:
                    part = box.narrow(dim, first - origin[dim], last - first)
                    logical = [*origin[:dim], run.start + first - start, *origin[dim + 1 :]]
                    yield _chunk(logical, part), part
                start += run.length

    def chunk_at(self, offset: torch.Size) -> Tensor:
        """The view of the chunk at a logical offset."""
        return next(tensor for chunk, tensor in self.chunks() if chunk.offsets == offset)

    def write_items(self, name: str) -> list[WriteItem]:
        """One item for each chunk that has to be written."""
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(tensor),
                    size=self.logical_shape,
                ),
            )
            for chunk, tensor in self.chunks()
        ]

    @property
    def _local_shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape) if self.flat_range is None else self.flat_range.shape

    def _dim(self) -> int:
        """The dimension that is split, counted from the front; 0 where none is."""
        local, dim = self._local_shape, self.param_layout.dim
        if self.param_layout.layout is None:
            return 0
        # Rows beyond the shard would stay as they are when it is loaded, and a shorter tensor
        # would be saved as if the rest of the shard did not exist.
        size = self.param_layout.layout.sizes[self.rank]
        if not -len(local) <= dim < len(local) or local[dim] != size:
            raise LayoutError(
                f"ShardView of shape {tuple(local)} along dim {dim}",
                found=f"a shard of {size} positions on rank {self.rank}",
                why="A view is of what the layout gives to this rank, no more and no less.",
                fix="Pass the tensor, dimension and layout that belong together.",
            )
        return dim % len(local)

    def _boxes(self) -> Iterator[tuple[list[int], Tensor]]:
        """This rank's elements as boxes of its local tensor: origin, and a view."""
        if self.flat_range is None:
            yield [0] * self.tensor.dim(), self.tensor
            return
        flat = self.tensor.view(-1)
        start, shape = self.flat_range
        for origin, sizes in _boxes_of(shape, start, start + flat.numel()):
            first = _flat_index(origin, shape) - start
            yield origin, flat[first : first + math.prod(sizes)].view(sizes)


def _boxes_of(
    shape: Sequence[int], start: int, stop: int
) -> Iterator[tuple[list[int], tuple[int, ...]]]:
    """Elements `start` to `stop - 1` of a tensor in row-major order, as boxes: origin, sizes."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield [start] * len(shape), tuple([stop - start] * len(shape))
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:
        # All within one row.
        yield from _in_row(shape, last, start, stop)
        return
    yield from _in_row(shape, first - 1, start, first * row)
    if first < last:
        yield [first, *[0] * (len(shape) - 1)], (last - first, *shape[1:])
    yield from _in_row(shape, last, last * row, stop)


def _in_row(
    shape: Sequence[int], index: int, start: int, stop: int
) -> Iterator[tuple[list[int], tuple[int, ...]]]:
    begin = index * math.prod(shape[1:])
    for origin, sizes in _boxes_of(shape[1:], start - begin, stop - begin):
        yield [index, *origin], (1, *sizes)


def _flat_index(origin: Sequence[int], shape: Sequence[int]) -> int:
    index = 0
    for place, length in zip(origin, shape, strict=True):
        index = index * length + place
    return index


def _chunk(origin: Sequence[int], tensor: Tensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(origin), sizes=tensor.shape)
