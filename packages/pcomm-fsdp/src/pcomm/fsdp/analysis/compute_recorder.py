"""Records what units compute, without the time in which they wait for communication."""

from __future__ import annotations

from pcomm.core.trace.event import COMPUTE, Event
from pcomm.core.trace.recorder import Recorder
from pcomm.fsdp.plan.units import ROOT
from pcomm.fsdp.runtime.schedule import Mark

__all__ = ["ComputeRecorder"]


class ComputeRecorder:
    """Turns marks of the engine into events `forward UNIT` and `backward UNIT`.

    Each segment of computing between two marks is one event, of the innermost unit; the engine's
    own time there is left out. On a GPU that is the time in which the host hands work over.

    Args:
        recorder: Takes the events.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._open: list[Mark] = []
        self._start_s = 0.0

    def pause(self, mark: Mark) -> None:
        """A unit begins or ends something; the engine takes over."""
        if (mark.kind, mark.unit, mark.phase) == ("use", ROOT, "forward"):
            # Units that are open are of a step that ended with an error.
            self._open.clear()
        if self._open:
            of, recorder = self._open[-1], self._recorder
            name = f"{of.phase} {of.unit}"
            now = recorder.clock()
            recorder.add(Event("", "", name, 0, self._start_s, now, recorder.rank, COMPUTE))
        if mark.kind == "use":
            self._open.append(mark)
        elif mark.kind == "done":
            self._open.remove(mark._replace(kind="use"))

    def resume(self) -> None:
        """The engine has done what it had to."""
        self._start_s = self._recorder.clock()
