"""The turn of the next operation: of the rotation, handed out before, or on trial."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pcomm.nvls.workspace.slots import Rotation, Turn
from pcomm.nvls.workspace.stream_order import StreamOrder

__all__ = ["Turns"]


class Turns:
    """Turns of the operations of one workspace, which stay on one stream.

    Args:
        rotation: Order of the slots.
        streams: Stream of the operations so far.

    Attributes:
        rotation: Order of the slots.
        last: Turn that was taken last.
        on_trial: Turn that every operation has while kernels are only compiled; usually None.
    """

    def __init__(self, rotation: Rotation, streams: StreamOrder) -> None:
        self.rotation, self._streams = rotation, streams
        self._prepared: Turn | None = None
        self._is_for_graph = False
        self.last: Turn | None = None
        self.on_trial: Turn | None = None

    def plain_stream(self) -> int | None:
        """Handle of the stream of the next turn, if that is one of the rotation; see `same`."""
        if self._prepared is not None or self.on_trial is not None:
            return None
        return self._streams.same()

    def take(self) -> Turn:
        """The turn of the operation that is launched next; once for each operation.

        Raises:
            ConfigError: It is on another stream than the operations before.
        """
        self._drop_unless_usable()
        turn = self._prepared
        if turn is None:
            turn = self._next()
        self._prepared, self.last = None, turn
        return turn

    def put_back(self, turn: Turn) -> None:
        """Have the next operation take the last turn, which was not used."""
        self.last = None
        if turn.is_prepared:
            self._prepared = turn
        elif self.on_trial is None:
            self.rotation.undo()

    def hand_out(self) -> tuple[Turn, bool]:
        """The turn of the next operation, whose slot the caller writes to before.

        Returns:
            The turn, again until it is taken, and whether all ranks have to meet now.

        Raises:
            ConfigError: It is on another stream than the operations before.
        """
        self._drop_unless_usable()
        if self._prepared is not None:
            return self._prepared, False
        turn = self._next()
        self._prepared = turn._replace(needs_entry=False, is_prepared=True)
        return self._prepared, turn.needs_entry

    def release(self, slot: int) -> None:
        """Have the slot handed out as if it had not been: what lies there has been used."""
        if self._prepared is not None and self._prepared.slot == slot:
            self._prepared = self._prepared._replace()

    def withdraw(self) -> None:
        """Undo `hand_out`, of which the ranks have not met."""
        self._prepared = None
        if self.on_trial is None:
            self.rotation.undo()

    @contextmanager
    def trial(self, *, needs_entry: bool) -> Iterator[None]:
        """Operations in this block have no effect on turns.

        Args:
            needs_entry: True if they are to wait for all ranks before they write.
        """
        kept = self._prepared, self.last
        self._prepared, self.on_trial = None, Turn(0, needs_entry, self.rotation.generation)
        try:
            yield
        finally:
            self.on_trial = None
            self._prepared, self.last = kept

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Operations in this block go into a graph; where it raises, none of them had a turn.

        Else a rank that has recorded fewer operations than others would use other slots than they.
        """
        kept, rotation = (self._prepared, self.last), vars(self.rotation).copy()
        try:
            yield
        except BaseException:
            self._prepared, self.last = kept
            vars(self.rotation).update(rotation)
            raise

    def _next(self) -> Turn:
        if self.on_trial is not None:
            return self.on_trial
        self._is_for_graph = self._streams.next_is_captured()
        return self.rotation.next(is_captured=self._is_for_graph)

    def _drop_unless_usable(self) -> None:
        """Withdraw a turn that was handed out within a graph and is used outside, or vice versa.

        The ranks have met once, where it was handed out. A replay that begins after that writes
        to the slot while they may still read what the replay before has left there.
        """
        if self._prepared is None or self.on_trial is not None:
            return
        if self._streams.next_is_captured() != self._is_for_graph:
            self.withdraw()
