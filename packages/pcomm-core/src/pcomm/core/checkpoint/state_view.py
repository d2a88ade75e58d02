"""State that is looked up when it is saved or loaded, and need not be a tensor, nor be there yet.

An optimizer makes its state in its first step, and may put other objects in its place later. So a
view of it knows the mapping and the key, and not which tensor it was once. A value that is no
tensor is saved as text (JSON, so that nothing is executed when it is read), and so is its absence.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from pcomm.core.checkpoint.shard_view import LoadTarget, SavedView, ShardView
from pcomm.core.errors import ConfigError
from pcomm.core.tensor_parallel.param_layout import ParamLayout

__all__ = ["StateView"]

_VALUE = ".value"
"""End of the name of an entry that is saved as text."""

_ABSENT = object()


@dataclass(frozen=True)
class StateView(ShardView):
    """A view of the value that a mapping has under a key, whenever it is saved or loaded.

    `tensor` is the value when the view was made; on the meta device, and of the shape that it will
    have, where there was none yet.

    Args:
        holder: Returns the mapping.
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
