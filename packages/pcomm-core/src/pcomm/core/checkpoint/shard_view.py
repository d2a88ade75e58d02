"""One rank's part of a logical tensor, as torch.distributed.checkpoint wants to see it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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

__all__ = ["FlatPart", "ShardView"]


class FlatPart(NamedTuple):
    """A stretch of a flattened tensor, such as a shard of it.

    Attributes:
        start: Its first element.
        shape: Shape of the tensor that was flattened.
    """

    start: int
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class ShardView:
    """A local tensor and where its pieces lie in the logical one.

    A fused weight has several pieces on a rank (some rows of the queries, some of the keys), and
    each is a chunk of its own in the checkpoint, at its logical offset. So any other layout finds
    the elements it needs. A stretch of a flattened tensor is one to several boxes of it.

    Args:
        tensor: What this rank holds, contiguous if it is a stretch.
        placement: How the logical tensor is spread.
        rank: This rank's place in the group over which it is spread: that of the placement's scope.
        part: Which stretch `tensor` is of what the placement gives to this rank; None if all.
    """

    tensor: Tensor
    placement: ParamLayout
    rank: int
    part: FlatPart | None = None

    @property
    def logical_shape(self) -> torch.Size:
        """Shape of the whole tensor."""
        return self.placement.logical_shape(self._local_shape)

    def clone(self) -> ShardView:
        """The same region with a copy of the tensor in host memory."""
        copy = torch.empty_like(self.tensor, device="cpu").copy_(self.tensor)
        return ShardView(copy, self.placement, self.rank, self.part)

    def pieces(self) -> Iterator[tuple[ChunkStorageMetadata, Tensor]]:
        """Each piece's place in the logical tensor, and a view of it here.

        Raises:
            LayoutError: The tensor, or that of which it is a stretch, is not this rank's share.
        """
        layout, dim = self.placement.layout, self._dim()
        for origin, box in self._boxes():
            if layout is None:
                yield _chunk(origin, box), box
                continue
            start = 0
            for run in layout.runs[self.rank]:
                first = max(start, origin[dim])
                last = min(start + run.length, origin[dim] + box.shape[dim])
                if first < last:
                    piece = box.narrow(dim, first - origin[dim], last - first)
                    logical = [*origin[:dim], run.start + first - start, *origin[dim + 1 :]]
                    yield _chunk(logical, piece), piece
                start += run.length

    def piece_at(self, offset: torch.Size) -> Tensor:
        """The view of the piece at a logical offset."""
        return next(piece for chunk, piece in self.pieces() if chunk.offsets == offset)

    def write_items(self, name: str) -> list[WriteItem]:
        """What has to be written for this region."""
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(piece),
                    size=self.logical_shape,
                ),
            )
            for chunk, piece in self.pieces()
        ]

    @property
    def _local_shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape) if self.part is None else self.part.shape

    def _dim(self) -> int:
        """The dimension that is split, counted from the front; 0 where none is."""
        local, dim = self._local_shape, self.placement.dim
        if self.placement.layout is None:
            return 0
        # Rows beyond the share would stay as they are when it is loaded, and a shorter tensor
        # would be saved as if the rest of the share did not exist.
        share = self.placement.layout.sizes[self.rank]
        if not -len(local) <= dim < len(local) or local[dim] != share:
            raise LayoutError(
                f"Region of shape {tuple(local)} along dim {dim}",
                found=f"a share of {share} positions on rank {self.rank}",
                why="A region is what the layout gives to this rank, no more and no less.",
                fix="Pass the tensor, dimension and layout that belong together.",
            )
        return dim % len(local)

    def _boxes(self) -> Iterator[tuple[list[int], Tensor]]:
        """What this rank holds as boxes of its local tensor: origin, and a view."""
        if self.part is None:
            yield [0] * self.tensor.dim(), self.tensor
            return
        flat = self.tensor.view(-1)
        start = self.part.start
        for origin, sizes in _boxes_of(self.part.shape, start, start + flat.numel()):
            first = _flat_index(origin, self.part.shape) - start
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


def _chunk(origin: Sequence[int], piece: Tensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(origin), sizes=piece.shape)
