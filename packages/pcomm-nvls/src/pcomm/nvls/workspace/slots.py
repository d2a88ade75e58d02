"""Which slot an operation uses, and whether it has to wait for all ranks before it writes there.

An operation writes one slot on all ranks and has a barrier before it reads. With two slots in turn
that is enough: slot k is written again by operation k + 2, after the barrier of operation k + 1,
which each rank reaches after it has read what operation k left. `pcomm.nvls.checker` explores this.

A replayed CUDA graph breaks the turn: its operations use the slots that they were captured with,
whatever came before. So an operation in a graph, and one that may follow a replay, has a barrier
before it writes too, unless the operation before it is known: `Rotation.sequence`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from pcomm.core.errors import ConfigError

__all__ = ["SLOTS", "Rotation", "Turn"]

SLOTS = 2


class Turn(NamedTuple):
    """The part of one operation in a workspace.

    Attributes:
        slot: Place of its slot.
        needs_entry: True where all ranks have to meet before it writes.
        generation: Number of operations before it.
        is_prepared: True if its slot has been handed out, for the caller to write the input there.
    """

    slot: int
    needs_entry: bool
    generation: int
    is_prepared: bool = False


class Rotation:
    """Turns of the operations of one workspace, in the order of their calls. Pure.

    Args:
        num_slots: Number of slots, at least 1; with one, each operation but the first waits.
    """

    def __init__(self, num_slots: int = SLOTS) -> None:
        if num_slots < 1:
            raise ConfigError(
                f"Workspace: slots={num_slots}",
                found="less than one slot",
                why="An operation writes into a slot.",
                fix=f"Pass {SLOTS}, or 1 to save memory for one more barrier an operation.",
            )
        self.num_slots = num_slots
        self._generation = 0
        self._was_captured = False
        self._in_sequence = self._follows = self._followed = False

    def next(self, *, is_captured: bool) -> Turn:
        """The turn of the next operation.

        Args:
            is_captured: True if the operation goes into a CUDA graph.
        """
        generation = self._generation
        slot, waits = self.step(is_captured=is_captured)
        return Turn(slot, waits, generation)

    def step(self, *, is_captured: bool) -> tuple[int, bool]:
        """As `next`: the slot, and whether all ranks have to meet before the operation writes."""
        self._was_captured |= is_captured
        # A graph may be replayed before anything else, and after any operation.
        may_repeat = self._was_captured and not self._follows
        waits = may_repeat or (self.num_slots == 1 and self._generation > 0)
        slot = self._generation % self.num_slots
        self._generation += 1
        self._followed, self._follows = self._follows, self._in_sequence
        return slot, waits

    def undo(self) -> None:
        """Have the next turn be the last one again, which was not used; once for each turn.

        Without this the operation after it would have the slot of the operation before it, which
        another rank may still read.
        """
        self._generation -= 1
        self._follows = self._followed

    @property
    def generation(self) -> int:
        """Number of turns so far."""
        return self._generation

    @contextmanager
    def sequence(self) -> Iterator[None]:
        """Operations in this block always run one after another, with none between them.

        Such as those of one CUDA graph. Only the first of them waits for all ranks before it
        writes.
        """
        if self._in_sequence:
            raise ConfigError(
                "Workspace.sequence",
                found="a sequence within a sequence",
                why="What follows what is known once.",
                fix="Leave the inner one out.",
            )
        self._in_sequence, self._follows, self._followed = True, False, False
        try:
            yield
        finally:
            self._in_sequence = self._follows = self._followed = False
