"""What a CTA does to symmetric memory, in the words of a protocol.

The memory order is that of a GPU at system scope. A load or store completes at any time between
the step that orders it and the next `Arrive` of its CTA that releases, or the end of the kernel. A
store waits for the loads before it, whose results it may carry; a load waits for the polls before
it, and for stores of its own CTA to the same elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias


class Cell(NamedTuple):
    """One element of symmetric memory: the smallest that is written and read at once.

    Attributes:
        rank: Rank whose memory it is.
        memory: Name of a part of the workspace, such as "barrier"; parts do not overlap.
        slot: Number of the slot in that part.
        element: Number of the element in the slot. Negative numbers are flags.
    """

    rank: int
    memory: str
    slot: int
    element: int

    def __str__(self) -> str:
        name = f"flag {-self.element - 1}" if self.element < 0 else f"element {self.element}"
        return f"{name} of {self.memory} slot {self.slot} on rank {self.rank}"


class Value(NamedTuple):
    """What an element holds: data, told apart by its origin alone.

    Attributes:
        operation: Number of the operation that wrote it, counted from 0.
        rank: Rank that wrote it.
        reduced: True for the result of a reduction, false for an input.
    """

    operation: int
    rank: int
    reduced: bool = False

    def __str__(self) -> str:
        kind = "result" if self.reduced else "data"
        return f"the {kind} that rank {self.rank} wrote in operation {self.operation}"


@dataclass(frozen=True)
class Write:
    """Store values to elements, on the own rank, on another one, or by multicast on all.

    Stores to elements that a `Poll` reads arrive at each rank by themselves. Those to other
    elements count as one step: whether two ranks see them at different moments changes no verdict,
    since only what comes after the next release may depend on them.

    Args:
        values: The value of each element; None is the sentinel that a poll waits to see replaced.
        verb: Word for the trace, such as "puts" or "clears".
    """

    values: Mapping[Cell, Value | None]
    verb: str = "writes"


@dataclass(frozen=True)
class Read:
    """Load elements, on the own rank or on others; a violation where one holds another value.

    Args:
        values: The value that each element must hold.
        verb: Word for the trace, such as "reads" or "pulls".
    """

    values: Mapping[Cell, Value]
    verb: str = "reads"


@dataclass(frozen=True)
class Poll:
    """Load elements until none of them holds the sentinel, and then as `Read`.

    Args:
        values: The value that each element must hold in the end.
        verb: Word for the trace.
    """

    values: Mapping[Cell, Value]
    verb: str = "polls"


@dataclass(frozen=True)
class Arrive:
    """Add one to the counter of a block on every rank.

    Args:
        block: Number of the block, usually that of the CTA.
        release: True if the loads and stores before it complete first.
    """

    block: int
    release: bool = True


@dataclass(frozen=True)
class Wait:
    """Wait until the counter of a block on the own rank has one arrival of each rank and epoch.

    The epoch is the number of waits for that block on the own rank so far, this one included. It
    is kept by the rank itself, so a rank that leaves out a barrier is an epoch behind.

    Args:
        block: Number of the block.
    """

    block: int


Step: TypeAlias = Write | Read | Poll | Arrive | Wait
