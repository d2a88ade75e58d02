"""One rank's part of a logical tensor, as torch.distributed.checkpoint wants to see it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from pcomm.core.placement import Placement

__all__ = ["Region"]


@dataclass(frozen=True)
class Region:
    """A local tensor and where its pieces lie in the logical one.

    A fused weight has several pieces on a rank (some rows of the queries, some of the keys), and
    each is a chunk of its own in the checkpoint, at its logical offset. So any other layout finds
    the elements it needs.

    Args:
        tensor: What this rank holds.
        placement: How the logical tensor is spread.
        rank: This rank's place in the group over which it is spread.
    """

    tensor: Tensor
    placement: Placement
    rank: int

    @property
    def logical_shape(self) -> torch.Size:
        """Shape of the whole tensor."""
        return self.placement.logical_shape(self.tensor.shape)

    def clone(self) -> Region:
        """The same region with a copy of the tensor in host memory."""
        copy = torch.empty_like(self.tensor, device="cpu").copy_(self.tensor)
        return Region(copy, self.placement, self.rank)

    def pieces(self) -> Iterator[tuple[ChunkStorageMetadata, Tensor]]:
        """Each piece's place in the logical tensor, and a view of it here."""
        layout, dim = self.placement.layout, self.placement.dim
        origin = [0] * self.tensor.dim()
        if layout is None:
            yield _chunk(origin, self.tensor), self.tensor
            return
        start = 0
        for run in layout.runs[self.rank]:
            piece = self.tensor.narrow(dim, start, run.length)
            offsets = [run.start if d == dim else 0 for d in range(self.tensor.dim())]
            yield _chunk(offsets, piece), piece
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


def _chunk(offsets: list[int], piece: Tensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=piece.shape)
