"""Base of objects bound to this process: a copy of one is the object itself, pickling an error."""

from __future__ import annotations

from typing import SupportsIndex, TypeVar, cast

from pcomm.core.collectives.protocol import Collectives
from pcomm.core.errors import UnsupportedError

__all__ = ["Handle"]

H = TypeVar("H", bound="Handle")


class Handle:
    """Base of groups, and of collectives that hold a communicator.

    A module that holds them can be copied with `copy.deepcopy`: the copy has parameters of its
    own, and communicates through the same communicator.
    """

    __slots__ = ()

    def __copy__(self: H) -> H:
        """Itself."""
        return self

    def __deepcopy__(self: H, memo: dict[int, object]) -> H:
        """Itself."""
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        """Refuse to be pickled.

        Raises:
            UnsupportedError: Always.
        """
        collectives = cast(Collectives, self)
        raise UnsupportedError(
            f"pickle: {type(self).__name__}, or a module that holds it",
            found=f"the communicator of rank {collectives.rank} of {collectives.size}",
            why="A communicator belongs to the process that opened it, and to no other one.",
            fix="Save the module's state_dict, or its shards (pcomm.core.checkpoint), and build "
            "the module anew with the groups of the process that loads it.",
        )
