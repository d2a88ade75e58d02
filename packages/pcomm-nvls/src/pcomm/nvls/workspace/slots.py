"""Which slot an operation uses, on which stream, and whether it meets all ranks before it writes.

An operation writes one slot on all ranks and has a barrier before it reads. With two slots in turn
that is enough: slot k is written again by operation k + 2, after the barrier of operation k + 1,
which each rank reaches after it has read what operation k left. The checker of protocols among the
tests explores this.

A replayed CUDA graph breaks the turn: its operations use the slots that they were captured with,
whatever came before. So an operation in a graph, and one that may follow a replay, has a barrier
before it writes too, unless the operation before it is known: `SlotRing.sequence`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, Protocol

import torch

from pcomm.core.errors import ConfigError

__all__ = [
    "SLOTS",
    "CudaStream",
    "DeviceStream",
    "NoStream",
    "SlotLease",
    "SlotRing",
    "StreamOrder",
    "Turns",
    "stream_of",
]


SLOTS = 2


class SlotLease(NamedTuple):
    """A turn: the slot of one operation, and whether all ranks meet before it writes.

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


class SlotRing:
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

    def next(self, *, is_captured: bool) -> SlotLease:
        """The turn of the next operation.

        Args:
            is_captured: True if the operation goes into a CUDA graph.
        """
        generation = self._generation
        slot, waits = self.step(is_captured=is_captured)
        return SlotLease(slot, waits, generation)

    def step(self, *, is_captured: bool) -> tuple[int, bool]:
        """Take the turn that `next` gives: its slot, and whether it needs an entry barrier."""
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


class DeviceStream(Protocol):
    """What launches ask about the device; a test can describe any state of it so."""

    def current(self) -> int:
        """Handle of the current stream."""
        ...

    def is_captured(self) -> bool:
        """Whether a CUDA graph records the current stream."""
        ...

    def wait_for(self, handle: int) -> None:
        """Has the current stream wait for all that another one has so far."""
        ...

    def is_current_device(self) -> bool:
        """Whether launches go to the device now."""
        ...

    def on_device(self) -> AbstractContextManager[object]:
        """Makes the device the current one."""
        ...


class CudaStream:
    """The current stream of a CUDA device.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._index = index
        # What torch's compiler calls; torch.cuda.current_stream makes an object each time.
        self._raw: Callable[[int], int] | None
        self._raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)

    def current(self) -> int:
        """Handle of the current stream."""
        if self._raw is not None:
            return self._raw(self._index)
        return int(torch.cuda.current_stream(self._index).cuda_stream)

    def is_captured(self) -> bool:
        """Whether a CUDA graph records the current stream."""
        return torch.cuda.is_current_stream_capturing()

    def wait_for(self, handle: int) -> None:
        """Has the current stream wait for all that another one has so far."""
        other = torch.cuda.ExternalStream(handle, device=self._index)
        torch.cuda.current_stream(self._index).wait_stream(other)

    def is_current_device(self) -> bool:
        """Whether launches go to the device now."""
        return torch.cuda.current_device() == self._index

    def on_device(self) -> AbstractContextManager[object]:
        """Makes the device the current one."""
        return torch.cuda.device(self._index)


class NoStream:
    """A CPU: everything happens at once, and no graph records it."""

    def current(self) -> int:
        """The handle 0, of the only stream."""
        return 0

    def is_captured(self) -> bool:
        """False, since no graph records a CPU."""
        return False

    def wait_for(self, handle: int) -> None:
        """Does nothing, since all has happened."""

    def is_current_device(self) -> bool:
        """True, since there is one CPU."""
        return True

    def on_device(self) -> AbstractContextManager[object]:
        """Changes nothing."""
        return nullcontext()


def stream_of(device: torch.device) -> DeviceStream:
    """What launches on a device ask. Local."""
    return CudaStream(device) if device.type == "cuda" else NoStream()


class StreamOrder:
    """The stream on which operations were enqueued so far. Local, without waiting.

    Operations that go into a CUDA graph are left alone: a graph is replayed on any stream.

    Args:
        stream: Source of the current stream of the device.
    """

    def __init__(self, stream: DeviceStream) -> None:
        self._stream = stream
        self._last: int | None = None

    def follow(self) -> None:
        """Go on on the current stream, which from now on is behind the operations so far."""
        if self._stream.is_captured():
            return
        current, last = self._stream.current(), self._last
        if last is not None and current != last:
            self._stream.wait_for(last)
        self._last = current

    def same(self) -> int | None:
        """Handle of the current stream, if that is the one so far and no CUDA graph records it."""
        current = self._stream.current()
        return current if current == self._last and not self._stream.is_captured() else None

    def next_is_captured(self) -> bool:
        """Whether the next operation goes into a CUDA graph.

        Raises:
            ConfigError: It does not, and the current stream is another than so far.
        """
        stream = self._stream
        if stream.is_captured():
            return True
        current, last = stream.current(), self._last
        if last is None:
            self._last = current
        elif current != last:
            raise ConfigError(
                "an operation on a workspace",
                found="another stream than that of the operations before",
                why="Operations of one workspace take turns in its memory in stream order.",
                fix="Open a workspace for each stream, or use nvls_collectives, whose operations "
                "follow each other also from stream to stream.",
            )
        return False


class Turns:
    """Turns of the operations of one workspace, which stay on one stream.

    Args:
        rotation: Order of the slots.
        streams: Stream of the operations so far.

    Attributes:
        rotation: Order of the slots.
        last: Turn that `take` gave last; `again` steps the rotation by itself.
        on_trial: Turn that every operation has while kernels are only compiled; usually None.
    """

    def __init__(self, rotation: SlotRing, streams: StreamOrder) -> None:
        self.rotation, self._streams = rotation, streams
        self._prepared: SlotLease | None = None
        self._is_for_graph = False
        self.last: SlotLease | None = None
        self.on_trial: SlotLease | None = None

    @property
    def handed_out(self) -> SlotLease | None:
        """The next turn, if `hand_out` gave it."""
        return self._prepared

    def plain_stream(self, lease: SlotLease | None = None) -> int | None:
        """Handle of the stream of the next turn, if no graph has to do with it; see `same`.

        Args:
            lease: The next turn as it was handed out; None for one of the rotation.
        """
        if self._prepared is not lease or self.on_trial is not None:
            return None
        if lease is not None and self._is_for_graph:
            return None
        return self._streams.same()

    def take(self) -> SlotLease:
        """The turn of the operation that is launched next; once for each operation.

        Raises:
            ConfigError: It is on another stream than the operations before.
        """
        self._drop_unless_usable()
        lease = self._prepared
        if lease is None:
            lease = self._next()
        self._prepared, self.last = None, lease
        return lease

    def put_back(self, lease: SlotLease) -> None:
        """Have the next operation take the last turn, which was not used."""
        self.last = None
        if lease.is_prepared:
            self._prepared = lease
        elif self.on_trial is None:
            self.rotation.undo()

    def hand_out(self) -> tuple[SlotLease, bool]:
        """The turn of the next operation, whose slot the caller writes to before.

        Returns:
            The turn, again until it is taken, and whether all ranks have to meet now.

        Raises:
            ConfigError: It is on another stream than the operations before.
        """
        self._drop_unless_usable()
        if self._prepared is not None:
            return self._prepared, False
        lease = self._next()
        self._prepared = lease._replace(needs_entry=False, is_prepared=True)
        return self._prepared, lease.needs_entry

    def release(self, slot: int) -> None:
        """Have the slot handed out as if it had not been: what lies there has been used."""
        if self._prepared is not None and self._prepared.slot == slot:
            # An equal turn in another object: `Workspace.empty` compares turns by `is`.
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
        self._prepared, self.on_trial = None, SlotLease(0, needs_entry, self.rotation.generation)
        try:
            yield
        finally:
            self.on_trial = None
            self._prepared, self.last = kept

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Operations in this block go into one graph, so only the first has an entry barrier.

        Where the block raises, none of them had a turn. Else a rank that has recorded fewer
        operations than others would use other slots than they.
        """
        kept, rotation = (self._prepared, self.last), vars(self.rotation).copy()
        try:
            with self.rotation.sequence():
                yield
        except BaseException:
            self._prepared, self.last = kept
            vars(self.rotation).update(rotation)
            raise

    def _next(self) -> SlotLease:
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
