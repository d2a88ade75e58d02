"""Communication and computation as events in time: traces, overlap, and divergence of ranks."""

from typing import TYPE_CHECKING

from pcomm.core.face import face

if TYPE_CHECKING:
    from pcomm.core.trace.chrome import write_chrome_trace
    from pcomm.core.trace.event import Event
    from pcomm.core.trace.gathering import gather_events
    from pcomm.core.trace.ledgered import ledgered_groups
    from pcomm.core.trace.overlap import exposed_communication_s, overlap_fraction
    from pcomm.core.trace.recorder import Recorder
    from pcomm.core.trace.traced import traced_groups

__all__ = [
    "Event",
    "Recorder",
    "exposed_communication_s",
    "gather_events",
    "ledgered_groups",
    "overlap_fraction",
    "traced_groups",
    "write_chrome_trace",
]

__getattr__, __dir__ = face(
    __name__,
    {
        "Event": "event",
        "Recorder": "recorder",
        "exposed_communication_s": "overlap",
        "gather_events": "gathering",
        "ledgered_groups": "ledgered",
        "overlap_fraction": "overlap",
        "traced_groups": "traced",
        "write_chrome_trace": "chrome",
    },
)
