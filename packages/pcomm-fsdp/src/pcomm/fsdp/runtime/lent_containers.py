"""Lists and dicts that a caller passes to a unit, which gets copies with other tensors in them."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any

from torch import Tensor

__all__ = ["LentContainers"]

_MUTABLE = (list, dict, OrderedDict, defaultdict, deque)


class LentContainers:
    """Gives what a unit has put into its copies, such as a cache or further losses, to the caller.

    Args:
        original: The arguments that the caller passed.
        copy: The same arguments with tensors replaced, made by `torch.utils._pytree`.
    """

    def __init__(self, original: object, copy: object) -> None:
        # Both are held, so that an id stands for one object.
        self._pairs: list[tuple[Any, Any]] = []
        self._originals: dict[int, Any] = {}
        self._walk(original, copy)

    def __bool__(self) -> bool:
        return any(type(original) in _MUTABLE for original, _ in self._pairs)

    def hand_back(self) -> list[Tensor]:
        """Make the caller's containers hold what the copies do. Local.

        Returns:
            The tensors that are new in them.
        """
        new: list[Tensor] = []
        for original, copy in self._pairs:
            if type(original) not in _MUTABLE:
                continue
            keys = list(copy) if isinstance(copy, dict) else range(len(copy))
            found = [self._originals.get(id(copy[key]), copy[key]) for key in keys]
            before = list(original.values() if isinstance(original, dict) else original)
            is_same_order = not isinstance(copy, dict) or list(original) == keys
            if is_same_order and len(found) == len(before) and all(map(_is, found, before)):
                continue
            known = {id(one) for one in before}
            new += [one for one in found if isinstance(one, Tensor) and id(one) not in known]
            original.clear()
            if isinstance(copy, dict):
                original.update(zip(keys, found, strict=True))
            else:
                original.extend(found)
        return new

    def _walk(self, original: Any, copy: Any) -> None:
        if original is copy:
            return
        self._pairs.append((original, copy))
        self._originals[id(copy)] = original
        for one, other in zip(_children(original), _children(copy), strict=True):
            self._walk(one, other)


def _children(container: Any) -> Iterator[Any]:
    if isinstance(container, dict):
        yield from container.values()
    elif isinstance(container, list | tuple | deque):
        yield from container


def _is(one: object, other: object) -> bool:
    return one is other
