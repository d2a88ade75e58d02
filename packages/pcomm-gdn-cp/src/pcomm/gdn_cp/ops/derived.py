"""Objects that keep what was made of them, such as index tensors, for as long as they live."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

__all__ = ["KeepsDerived"]

_Made = TypeVar("_Made")


class KeepsDerived:
    """Base of immutable classes; nothing at module level keeps what is derived from an object."""

    def derived(self, make: Callable[..., _Made], *arguments: Hashable) -> _Made:
        """What `make(source, *arguments)` returns, made once. Local.

        Args:
            make: Computes it from this object, which it must not keep: without a cycle, tensors are
                freed with the object. Offsets of a pack are passed as a plain tuple, and may be
                kept.
            arguments: Further arguments, such as a chunk size or a device.
        """
        # Filled on first use: the object is immutable, this is a memory of it.
        known: dict[Any, Any] = self.__dict__.setdefault("_derived", {})
        key = (make, arguments)
        if key not in known:
            # A tensor made in inference mode could not be used in training, and these are kept.
            with torch.inference_mode(False):
                known[key] = make(self._source(), *arguments)
        made: _Made = known[key]
        return made

    def _source(self) -> object:
        return self
