"""Tensors and other state as torch.distributed.checkpoint wants to see them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from pcomm.core.errors import ConfigError, LayoutError
from pcomm.core.tensor_parallel.split import ParamLayout

__all__ = ["FlatRange", "LoadTarget", "SavedView", "ShardView", "StateView"]


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


_VALUE = ".value"
"""End of the name of an entry that is saved as text."""

_ABSENT = object()


@dataclass(frozen=True)
class StateView(ShardView):
    """A view of the value that a mapping has under a key, whenever it is saved or loaded.

    `tensor` is the value when the view was made; on the meta device, and of the shape that it will
    have, where there was none yet.

    Args:
        holder: Function that returns the mapping.
        key: Key in the mapping.
        is_spread: True if the value is spread as `flat_range` and `param_layout` say; False if all
            ranks have the same.
        device: Device of a tensor that is not there yet.
        must_agree: True if different values on two ranks are an error, for a value that is no
            tensor or a single number; False saves the first rank's.
    """

    holder: Callable[[], MutableMapping[Any, Any]] = dict
    key: str = ""
    is_spread: bool = False
    device: torch.device | None = None
    must_agree: bool = False

    def to_save(self, name: str) -> SavedView:
        """The entry of the value that is there now. Local.

        Raises:
            ConfigError: The value is no tensor, number, text, or list of such.
        """
        value = self.holder().get(self.key, _ABSENT)
        same: str | None = None
        if isinstance(value, Tensor):
            if not self.is_spread and not value.dim():
                same = repr(value.item())
            saved = SavedView(name, self._of(value))
        else:
            same = _encoded(name, value)
            data = torch.frombuffer(bytearray(same.encode()), dtype=torch.uint8)
            saved = SavedView(name + _VALUE, ShardView(data, ParamLayout(), 0))
        return saved._replace(same=same) if self.must_agree else saved

    def to_load(self, name: str, saved: Mapping[str, object]) -> LoadTarget:
        """The entry to read: text, a tensor that is there, or a new one. Local."""
        text, tensor = saved.get(name + _VALUE), saved.get(name)
        if isinstance(text, TensorStorageMetadata):
            data = self.tensor.new_empty(text.size, dtype=text.properties.dtype, device="cpu")
            view = ShardView(data, ParamLayout(), 0)
            return LoadTarget(name + _VALUE, view, lambda: self._put(_decoded(data)))
        if not isinstance(tensor, TensorStorageMetadata):
            return LoadTarget(name, self)
        target = self._target(tensor.size, tensor.properties.dtype)
        return LoadTarget(name, self._of(target), partial(self._put, target))

    def _of(self, tensor: Tensor) -> ShardView:
        """A view of another tensor in the same place."""
        tensor = tensor.detach().as_subclass(Tensor)
        if self.is_spread:
            return ShardView(tensor, self.param_layout, self.rank, self.flat_range)
        return ShardView(tensor, ParamLayout(), 0)

    def _target(self, size: torch.Size, dtype: torch.dtype) -> Tensor:
        """The tensor that is there, or a new one for a saved one of this size and dtype."""
        value = self.holder().get(self.key)
        if isinstance(value, Tensor) and (self.is_spread or value.shape == size):
            return value
        if self.is_spread:
            return torch.empty_like(self.tensor, device=self.device)
        return torch.empty(size, dtype=dtype, device=self.device)

    def _put(self, value: Any) -> None:
        """Put a loaded value in its place, or remove the one that is there."""
        holder = self.holder()
        if value is _ABSENT:
            holder.pop(self.key, None)
        elif value is not holder.get(self.key, _ABSENT):
            holder[self.key] = value


def _encoded(name: str, value: Any) -> str:
    """A value that is no tensor as text; the inverse of `_decoded`.

    Raises:
        ConfigError: It is none of None, bool, int, float, str, and lists, tuples and dicts of such.
    """
    return json.dumps(None if value is _ABSENT else [_tagged(name, value)])


def _decoded(data: Tensor) -> Any:
    """The value of a text, as bytes."""
    found = json.loads(bytes(data.tolist()).decode())
    return _ABSENT if found is None else _untagged(found[0])


def _tagged(name: str, value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (list, tuple):
        return {type(value).__name__: [_tagged(name, one) for one in value]}
    if isinstance(value, Mapping):
        return {"dict": [[_tagged(name, k), _tagged(name, v)] for k, v in value.items()]}
    raise ConfigError(
        f"checkpoint: {name}",
        found=f"a value of type {type(value).__name__}",
        why="A checkpoint holds tensors that are spread like a parameter, tensors and plain values "
        "that are the same on all ranks, and nothing that would be code when it is read.",
        fix="Keep it as a tensor, a number, a text, or a list of those; or leave it out by keys=.",
    )


def _untagged(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, found),) = value.items()
    if kind == "dict":
        return {_untagged(k): _untagged(v) for k, v in found}
    return [_untagged(one) for one in found] if kind == "list" else tuple(map(_untagged, found))
