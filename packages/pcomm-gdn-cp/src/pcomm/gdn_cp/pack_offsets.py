"""The offsets of a pack, with the index tensors that were made from them.

Every core needs index tensors that follow from the offsets alone. They are kept with the offsets:
a plan owns those of its pack, so they live as long as the plan and not longer. Offsets that are
passed as plain integers are read again in each call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch

from pcomm.core.errors import LayoutError

__all__ = ["KeepsDerived", "PackOffsets", "check_offsets"]

_Made = TypeVar("_Made")


class KeepsDerived:
    """Base of immutable classes; nothing at module level keeps what is derived from an object."""

    def derived(self, make: Callable[..., _Made], *arguments: Hashable) -> _Made:
        """What `make(source, *arguments)` returns, made once. Local.

        Args:
            make: Function that computes it from this object, which it must not keep: without a
                cycle, tensors are freed with the object. Offsets of a pack are passed as a plain
                tuple, and may be kept.
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


class PackOffsets(KeepsDerived, tuple[int, ...]):
    """Where each sequence of a pack starts, and where the last one ends: a tuple with a memory.

    Equal to the tuple of the same integers, and of the same hash. Copies and pickles are plain
    tuples.
    """

    @classmethod
    def of(cls, cu_seqlens: Sequence[int]) -> PackOffsets:
        """`cu_seqlens` itself if it is one already, else its integers, checked.

        Raises:
            LayoutError: They do not start at 0, or decrease.
        """
        if isinstance(cu_seqlens, cls):
            return cu_seqlens
        offsets = cls(cu_seqlens)
        check_offsets("cu_seqlens", offsets)
        return offsets

    def _source(self) -> tuple[int, ...]:
        return tuple(self)

    def __reduce__(self) -> tuple[type, tuple[tuple[int, ...]]]:
        return tuple, (tuple(self),)


def check_offsets(asked: str, offsets: tuple[int, ...], *, are_integers: bool = True) -> None:
    """Refuse offsets that cannot be those of a pack. Local.

    Args:
        asked: Name of the offsets, for the error.
        offsets: Offsets of the sequences.
        are_integers: False to refuse them for their types.

    Raises:
        LayoutError: They do not start at 0, or decrease.
    """
    falls = [n for n, (start, stop) in enumerate(pairwise(offsets)) if stop < start]
    if not offsets or offsets[0] != 0 or falls or not are_integers:
        near = falls[0] if falls else 0
        raise LayoutError(
            asked,
            found=f"{list(offsets[near : near + 3])} from place {near} of {len(offsets)}",
            why="They are the integers where each sequence starts, and where the last one ends.",
            fix="Start at 0 and let no offset be smaller than the one before it.",
        )
