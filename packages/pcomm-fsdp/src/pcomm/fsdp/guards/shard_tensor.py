"""Tensors of one rank that torch's functions must not take for those of the whole model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["NORMS", "ShardTensor"]

NORMS = frozenset({"norm", "vector_norm", "linalg_norm", "linalg_vector_norm"})
"""Names of torch's functions that return a norm."""


class ShardTensor(Tensor):
    """Has two class methods decide about every function of torch that gets one."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Collection[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Return what the class has instead of `func`, or its result as the class takes it."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        given: list[Any] = []
        for one in (*args, *kwargs.values()):
            given += one if isinstance(one, list | tuple) else [one]
        result = cls._instead_of(name, types, args, kwargs, given)
        if result is NotImplemented:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
            result = cls._taken(name, result, args, given)
        return result

    @classmethod
    def _instead_of(
        cls,
        name: str,
        types: Collection[type],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        given: Sequence[Any],
    ) -> Any:
        """The result of something else; `NotImplemented` for the function itself; or an error."""
        raise NotImplementedError

    @classmethod
    def _taken(cls, name: str, result: Any, args: Sequence[Any], given: Sequence[Any]) -> Any:
        """The result of the function as the caller gets it, or an error."""
        raise NotImplementedError
