"""What all ranks did in a few steps of a run, written by the first one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pcomm.core import Group, Groups
from pcomm.core.trace import (
    Recorder,
    exposed_communication_s,
    gather_events,
    traced_groups,
    write_chrome_trace,
)

__all__ = ["StepTrace"]

_log = logging.getLogger("pcomm.train")

# The first step of a start allocates, and connects what is connected when it is used first.
_BEGIN, _END = 1, 4


class StepTrace:
    """Records the second to fourth step of this start, and writes them as soon as they are done.

    A run that has fewer steps left writes what there was of them when it ends.

    Args:
        path: The file; None to record nothing.
        rank: Global rank of this process.
        control: All ranks; carries the events and is not traced.
    """

    def __init__(self, path: Path | None, rank: int, control: Group) -> None:
        self.recorder = Recorder(rank, is_on=False)
        self._path, self._control = path, control
        self._steps = self._recorded = 0

    def watched(self, groups: Groups) -> Groups:
        """`groups` whose operations are recorded; themselves if nothing is. Local."""
        return groups if self._path is None else traced_groups(groups, self.recorder)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around every step. Collective after the last one that is recorded."""
        self.recorder.is_on = self._path is not None and _BEGIN <= self._steps < _END
        try:
            with self.recorder.span("step", queue="steps"):
                yield
        finally:
            self._recorded += self.recorder.is_on
            self.recorder.is_on = False
        self._steps += 1
        if self._steps == _END:
            self.finish()

    def finish(self) -> None:
        """Write what was recorded and not yet written. Collective."""
        if self._path is None or not self._recorded:
            return
        events = gather_events(self.recorder, self._control.collectives)
        if self._control.rank == 0:
            exposed_ms = exposed_communication_s(events) / self._recorded * 1e3
            try:
                write_chrome_trace(self._path, events)
            except OSError as error:
                # The run is worth more than its trace.
                _log.warning("no trace in %s: %s", self._path, error)
            else:
                _log.info(
                    "trace in %s: %.1f ms a step of communication exposed", self._path, exposed_ms
                )
        self.recorder.clear()
        self._recorded = 0
