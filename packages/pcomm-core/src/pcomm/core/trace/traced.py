"""Collectives of which every call becomes an event."""

from __future__ import annotations

from torch import Tensor

from pcomm.core.collectives.call import Call
from pcomm.core.collectives.instrumented import InstrumentedCollectives
from pcomm.core.collectives.protocol import Collectives, Pending
from pcomm.core.groups.groups import Groups
from pcomm.core.trace.event import WAIT, Event, StopIs, queue_of
from pcomm.core.trace.recorder import Recorder

__all__ = ["TracedCollectives", "traced", "traced_groups"]


def traced(
    collectives: Collectives, recorder: Recorder, *, group: str, role: str = ""
) -> Collectives:
    """`collectives` that do the same and record every call. Local.

    Put them under the differentiable ones, to see backward too; `traced_groups` does. Whether an
    event is kept is decided when it ends, by `recorder.is_on`.

    Args:
        collectives: Collectives that move the tensors.
        recorder: Recorder that the events are added to.
        group: Name of the group in events.
        role: Role of the group in events.
    """
    return TracedCollectives(collectives, recorder, group=group, role=role)


def traced_groups(groups: Groups, recorder: Recorder) -> Groups:
    """`groups` of which every call is recorded, also backward's. Local.

    Both use the same communicators; closing one closes those of the other too.
    """
    return groups.with_collectives(
        lambda group: traced(group.collectives, recorder, group=group.name, role=group.role)
    )


class TracedCollectives(InstrumentedCollectives):
    """The collectives that `traced` returns.

    An event starts when its operation is issued and stops when that has ended, also where it is
    waited for later. On gloo torch tells when that is. Where the end cannot be seen, the event
    stops at the wait, and says so. A wait is an event of its own, in the queue `"wait"`; on gloo
    that of a reduce-scatter includes its local sum.
    """

    def __init__(
        self, inner: Collectives, recorder: Recorder, *, group: str, role: str = ""
    ) -> None:
        super().__init__(inner)
        self._recorder, self._group, self._role = recorder, group, role
        self._queue = queue_of(group, role)

    def run(self, call: Call) -> Tensor:
        """Record from the call to its return."""
        sent_bytes = call.sent_bytes(self.rank, self.size)
        start_s = self._recorder.clock()
        result = self.inner.run(call)
        self._add(call.operation, sent_bytes, start_s, _end(call.x, "done"), True)
        return result

    def start(self, call: Call) -> Pending:
        """Record from the call to the end of the operation, and the wait."""
        # Not the call itself: it holds tensors.
        name, sent_bytes = call.operation, call.sent_bytes(self.rank, self.size)
        start_s = self._recorder.clock()
        pending = self.inner.start(call)
        is_seen = pending.on_done(lambda: self._add(name, sent_bytes, start_s, "done", False))
        stop_is = _end(call.x, "wait")

        def finish() -> Tensor:
            wait_s = self._recorder.clock()
            result = pending.wait()
            if not is_seen:
                self._add(name, sent_bytes, start_s, stop_is, False)
            self._add(f"wait {name}", 0, wait_s, "done", True, WAIT)
            return result

        return pending.around(finish)

    def _add(
        self,
        name: str,
        sent_bytes: int,
        start_s: float,
        stop_is: StopIs,
        blocks: bool,
        queue: str = "",
    ) -> None:
        recorder = self._recorder
        recorder.add(
            Event(
                self._group,
                self._role,
                name,
                sent_bytes,
                start_s,
                recorder.clock(),
                recorder.rank,
                queue or self._queue,
                stop_is,
                blocks,
            )
        )


def _end(x: Tensor, on_host: StopIs) -> StopIs:
    return on_host if x.device.type == "cpu" else "launch"
