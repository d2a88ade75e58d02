"""State that is looked up when it is saved or loaded, and need not be a tensor, nor be there yet.

An optimizer makes its state in its first step, and may put other objects in its place later. So a
region of it knows where the value is, and not which tensor it was once. What is no tensor is saved
as text (JSON, so that nothing is executed when it is read), and so is that there is nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pcomm.core.checkpoint.shard_view import ShardView
from pcomm.core.errors import ConfigError
from pcomm.core.tensor_parallel.param_layout import ParamLayout

__all__ = ["VALUE", "StateView", "decoded", "encoded"]

VALUE = ".value"
"""Ends the name of what is saved as text."""

_ABSENT = object()


@dataclass(frozen=True)
class StateView(ShardView):
    """A region of what a mapping has under a key, whenever that is asked.

    `tensor` is what it was when the region was made; on the meta device, and of the shape that it
    will have, where there was none yet.

    Args:
        holder: Returns the mapping.
        key: In it.
        is_spread: Whether the value is spread as `part` and `placement` say; if not, all ranks
            have the same.
        device: Where a tensor goes that is not there yet.
        must_agree: Whether it is an error that ranks have different values of what is no tensor, or
            a single number; without it the first rank's is saved.
    """

    holder: Callable[[], MutableMapping[Any, Any]] = dict
    key: str = ""
    is_spread: bool = False
    device: torch.device | None = None
    must_agree: bool = False

    def value(self) -> Any:
        """What there is now; `absent` says whether it is nothing. Local."""
        return self.holder().get(self.key, _ABSENT)

    def of(self, tensor: Tensor) -> ShardView:
        """A region of another tensor in the same place."""
        tensor = tensor.detach().as_subclass(Tensor)
        if self.is_spread:
            return ShardView(tensor, self.placement, self.rank, self.part)
        return ShardView(tensor, ParamLayout(), 0)

    def saved(self, name: str) -> tuple[str, ShardView]:
        """The name and the region under which the value is saved. Local.

        Raises:
            ConfigError: The value is no tensor, number, text, or list of such.
        """
        value = self.value()
        if isinstance(value, Tensor):
            return name, self.of(value)
        return name + VALUE, ShardView(encoded(name, value), ParamLayout(), 0)

    def target(self, size: torch.Size, dtype: torch.dtype) -> Tensor:
        """The tensor to load into: that which is there, or a new one. Local.

        Args:
            size: Shape of the saved one, where all ranks have the same.
            dtype: Of the saved one.
        """
        value = self.value()
        if isinstance(value, Tensor) and (self.is_spread or value.shape == size):
            return value
        if self.is_spread:
            return torch.empty_like(self.tensor, device=self.device)
        return torch.empty(size, dtype=dtype, device=self.device)

    def put(self, value: Any) -> None:
        """Put a loaded value in its place, or remove what is there. Local."""
        holder = self.holder()
        if value is _ABSENT:
            holder.pop(self.key, None)
        elif value is not holder.get(self.key, _ABSENT):
            holder[self.key] = value


def encoded(name: str, value: Any) -> Tensor:
    """A value that is no tensor as bytes; the inverse of `decoded`.

    Raises:
        ConfigError: It is none of None, bool, int, float, str, and lists, tuples and dicts of such.
    """
    text = json.dumps(None if value is _ABSENT else [_tagged(name, value)])
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def decoded(data: Tensor) -> Any:
    """The value of `encoded`; `StateView.put` understands that of nothing."""
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
