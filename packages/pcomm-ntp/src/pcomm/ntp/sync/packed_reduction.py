"""Slices of several tensors in one contiguous buffer, and one all-reduce of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pcomm.core.collectives.protocol import Pending
from pcomm.core.groups.group import Group

__all__ = ["PackedReduction", "Slice"]


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
