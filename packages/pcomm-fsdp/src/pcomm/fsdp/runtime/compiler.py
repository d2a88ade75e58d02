"""From marks to steps: with foresight for a known trace, or on demand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pcomm.fsdp.runtime.schedule import (
    NOTHING_OWED,
    Mark,
    Owed,
    Phase,
    Schedule,
    ScheduledGroup,
    Step,
    marks_of,
)
from pcomm.fsdp.runtime.schedule_writer import ScheduleWriter

__all__ = ["OnDemand", "compile_schedule"]


def compile_schedule(
    marks: Sequence[Mark],
    groups: Iterable[ScheduledGroup],
    *,
    prefetch: int,
    prefetch_bytes: int | None,
    inflight_reduce: int,
    gathered: frozenset[str],
    is_last: bool,
    owed: Owed = NOTHING_OWED,
    taken: Sequence[Step] = (),
    prefetch_backward: int | None = None,
) -> Schedule:
    """The schedule of one micro-batch around what its units do.

    Before a unit is used, its own groups and those of the next `prefetch` units are in flight or
    gathered. After the forward of a unit its groups are released, unless they would be gathered
    again at once. In backward the next gather is issued before the reduce of the unit that has just
    ended, so that it does not queue behind it even on one communicator. A unit that backward comes
    to several times, as after two forwards, is reduced the last time.

    Without prefetch in backward, a gather is issued when the unit before it has ended, before the
    reduce of that one: a reduce alone is then in flight while a unit computes.

    Args:
        marks: Beginnings and ends of units, in order; the last one is `end`.
        groups: The parameter groups of all units.
        prefetch: Units gathered ahead.
        prefetch_bytes: Limit of bytes gathered ahead beyond the first unit; None for no limit.
        inflight_reduce: Units with a reduce in flight while the next one computes.
        gathered: Names of groups that are gathered already.
        is_last: True for the last micro-batch of a step.
        owed: Gradients that earlier micro-batches of the step have left.
        taken: Steps of this micro-batch that were taken already, around its first marks; the
            schedule goes on behind them, and gives back what was gathered ahead for nothing.
        prefetch_backward: Units gathered ahead in backward; None for `prefetch`. As many units stay
            from forward to backward as `prefetch` says.
    """
    backward = prefetch if prefetch_backward is None else prefetch_backward
    depths: dict[Phase, int] = {"forward": prefetch, "backward": backward}
    writer = ScheduleWriter(marks, groups, depths, prefetch_bytes, inflight_reduce, gathered, owed)
    start = writer.resume(taken)
    if taken:
        phase = marks[start].phase
        writer.give_back(writer.ahead(start - 1, 1 + depths[phase]), phase)
    for place in range(start, len(marks)):
        writer.add(place, marks[place], is_last)
    steps = tuple(writer.steps[len(taken) :])
    return Schedule(steps, frozenset(writer.gathered), writer.owed)


class OnDemand:
    """Steps for marks that come one by one, while nothing is known of those that follow.

    Nothing is gathered ahead. Used for what was never seen before.

    Args:
        groups: The parameter groups of all units.
        inflight_reduce: Units with a reduce in flight while the next one computes.
        gathered: Names of groups that are gathered already.
        is_last: True for the last micro-batch of a step.
        owed: Gradients that earlier micro-batches of the step have left.
        taken: Steps of this micro-batch that were taken already.
    """

    def __init__(
        self,
        groups: Iterable[ScheduledGroup],
        *,
        inflight_reduce: int,
        gathered: frozenset[str],
        is_last: bool,
        owed: Owed = NOTHING_OWED,
        taken: Sequence[Step] = (),
    ) -> None:
        self._is_last = is_last
        depths: dict[Phase, int] = {"forward": 0, "backward": 0}
        self._writer = ScheduleWriter((), groups, depths, None, inflight_reduce, gathered, owed)
        self._writer.resume(taken)
        self._gives_back = bool(taken)

    @property
    def steps(self) -> Sequence[Step]:
        """All steps up to now."""
        return self._writer.steps

    @property
    def marks(self) -> list[Mark]:
        """All marks up to now."""
        return list(marks_of(self.steps))

    @property
    def gathered(self) -> frozenset[str]:
        """Names of groups that are gathered now."""
        return frozenset(self._writer.gathered)

    @property
    def owed(self) -> Owed:
        """Gradients that are left to a later micro-batch of the step."""
        return self._writer.owed

    def steps_for(self, mark: Mark) -> list[Step]:
        """The steps before and after `mark`, which is one of them."""
        start = len(self._writer.steps)
        if self._gives_back:
            self._gives_back = False
            self._writer.give_back([mark.unit], mark.phase)
        self._writer.add(0, mark, self._is_last)
        return self._writer.steps[start:]
