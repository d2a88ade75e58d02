"""Writes the steps of a schedule: what to communicate around each mark, by a few rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pcomm.fsdp.runtime.schedule import Mark, Owed, Phase, ScheduledGroup, Step
from pcomm.fsdp.settings.reshard_policy import Keep

__all__ = ["ScheduleWriter"]


class ScheduleWriter:
    """Goes over marks once and writes steps around them, from what is gathered and in flight.

    Args:
        marks: The marks to look ahead in; empty where they are not known.
        groups: The parameter groups of all units.
        depths: Units gathered ahead, in forward and in backward.
        prefetch_bytes: Limit of bytes gathered ahead beyond the first unit; None for no limit.
        inflight_reduce: Units with a reduce in flight while the next one computes.
        gathered: Names of groups that are gathered already.
        owed: Gradients that earlier micro-batches of the step have left.

    Attributes:
        steps: The steps so far.
        gathered: Names of groups that are gathered after them.
    """

    def __init__(
        self,
        marks: Sequence[Mark],
        groups: Iterable[ScheduledGroup],
        depths: Mapping[Phase, int],
        prefetch_bytes: int | None,
        inflight_reduce: int,
        gathered: frozenset[str],
        owed: Owed,
    ) -> None:
        self.steps: list[Step] = []
        self.gathered = set(gathered)
        self._marks = marks
        self._owed_reduces, self._owed_sums = set(owed.reduces), set(owed.sums)
        self._last_backward = {
            mark.unit: place
            for place, mark in enumerate(marks)
            if (mark.kind, mark.phase) == ("use", "backward")
        }
        self._depths, self._limit = depths, prefetch_bytes
        self._inflight = inflight_reduce
        self._groups = {group.name: group for group in groups}
        self._of_unit: dict[str, list[ScheduledGroup]] = {}
        for group in self._groups.values():
            self._of_unit.setdefault(group.unit, []).append(group)
        self._waiting: set[str] = set()
        self._open: list[str] = []
        self._reducing: list[ScheduledGroup] = []
        self._all_reducing: list[ScheduledGroup] = []

    @property
    def owed(self) -> Owed:
        """Gradients that are left to a later micro-batch of the step."""
        return Owed(frozenset(self._owed_reduces), frozenset(self._owed_sums))

    def resume(self, taken: Sequence[Step]) -> int:
        """Go on behind steps that were taken. Returns the number of marks among them."""
        for step in taken:
            if step.kind == "use":
                self._open.append(step.name)
            elif step.kind == "done":
                self._close(step.name)
                if step.phase == "backward":
                    self._owe(step.name)
            elif step.kind == "gather":
                self.gathered.add(step.name)
                self._waiting.add(step.name)
            elif step.kind == "wait_gather":
                self._waiting.remove(step.name)
            elif step.kind == "release":
                self.gathered.remove(step.name)
            elif step.kind == "reduce":
                self._owed_reduces.discard(step.name)
                self._reducing.append(self._groups[step.name])
            elif step.kind == "wait_reduce":
                self._reducing.remove(self._groups[step.name])
                self._owe_sum(self._groups[step.name])
            elif step.kind == "all_reduce":
                self._owed_sums.discard(step.name)
                self._all_reducing.append(self._groups[step.name])
            elif step.kind == "wait_all_reduce":
                self._all_reducing.remove(self._groups[step.name])
        self.steps.extend(taken)
        return sum(step.is_anchor for step in taken)

    def give_back(self, units: Sequence[str], phase: Phase) -> None:
        """Release groups that were gathered ahead and are not used soon."""
        for group in self._groups.values():
            is_used = group.unit in units or group.unit in self._open
            if group.keep == "use" and not is_used:
                self._release(group, phase)

    def add(self, place: int, mark: Mark, is_last: bool) -> None:
        """Write one mark and the steps around it.

        Args:
            place: Index of the mark in `marks`.
            mark: The mark.
            is_last: True for the last micro-batch of a step.
        """
        if mark.kind == "use":
            self._use(place, mark)
        elif mark.kind == "done":
            self._done(place, mark, is_last)
        else:
            self._end(mark, is_last)

    def _use(self, place: int, mark: Mark) -> None:
        self._gather(mark.unit, mark.phase)
        self._open.append(mark.unit)
        for unit in self.ahead(place, self._depths[mark.phase]):
            self._gather(unit, mark.phase)
        for group in self._of_unit.get(mark.unit, ()):
            if group.name in self._waiting:
                self._waiting.remove(group.name)
                self.steps.append(Step("wait_gather", group.name, mark.phase))
        self.steps.append(Step("use", mark.unit, mark.phase))

    def _done(self, place: int, mark: Mark, is_last: bool) -> None:
        self.steps.append(Step("done", mark.unit, mark.phase))
        self._close(mark.unit)
        ahead = self.ahead(place, 1 + self._depths[mark.phase])
        if mark.unit not in ahead and mark.unit not in self._open:
            for group in self._of_unit.get(mark.unit, ()):
                if _is_over(group.keep, mark.phase, is_last):
                    self._release(group, mark.phase)
        if mark.phase == "backward":
            self._owe(mark.unit)
            reduced = [group for group in self._of_unit.get(mark.unit, ()) if group.reduces]
            if self._last_backward.get(mark.unit, place) > place:
                reduced = []
            # Where an older reduce has to end before the next unit computes, what is needed after
            # that unit is gathered behind it: as early as it can be of use, and in memory that the
            # older one has given back.
            units = {group.unit for group in [*self._reducing, *reduced]}
            has_to_wait = len(units) > self._inflight
            for unit in ahead[:1] if has_to_wait else ahead:
                self._gather(unit, mark.phase)
            self._reduce(reduced)

    def _end(self, mark: Mark, is_last: bool) -> None:
        self.steps.append(Step("end", mark.unit, mark.phase))
        if mark.phase == "backward":
            # Of units that took part in an earlier micro-batch of the step, and not in this one.
            owed = [group for name, group in self._groups.items() if name in self._owed_reduces]
            self._reduce([group for group in owed if group.reduces])
            while self._reducing:
                self._wait_reduce(self._reducing.pop(0))
            for name, group in self._groups.items():
                if name in self._owed_sums and group.all_reduces:
                    self._all_reduce(group)
            while self._all_reducing:
                self._wait_all_reduce(self._all_reducing[0])
        for own in self._of_unit.values():
            for group in own:
                # A forward without backward keeps what the next step would gather again.
                if group.keep in ("use", "backward") or _is_over(group.keep, mark.phase, is_last):
                    self._release(group, mark.phase)
                elif group.name in self._waiting:
                    # Gathered ahead for a use that did not come, and kept: the next use takes it
                    # for gathered.
                    self._waiting.remove(group.name)
                    self.steps.append(Step("wait_gather", group.name, mark.phase))
                if is_last:
                    # The optimizer makes it stale; its memory stays where it is.
                    self.gathered.discard(group.name)

    def ahead(self, place: int, count: int) -> list[str]:
        """The next units that are used after a mark and are not in use there, nearest first."""
        units: list[str] = []
        total = 0
        for mark in self._marks[place + 1 :]:
            if len(units) == count:
                break
            if mark.kind != "use" or mark.unit in units or mark.unit in self._open:
                continue
            total += sum(group.num_bytes for group in self._of_unit.get(mark.unit, ()))
            if units and self._limit is not None and total > self._limit:
                break
            units.append(mark.unit)
        return units

    def _gather(self, unit: str, phase: Phase) -> None:
        for group in self._of_unit.get(unit, ()):
            if group.name not in self.gathered:
                self.gathered.add(group.name)
                self._waiting.add(group.name)
                self.steps.append(Step("gather", group.name, phase))

    def _release(self, group: ScheduledGroup, phase: Phase) -> None:
        if group.name not in self.gathered:
            return
        if group.name in self._waiting:
            # Gathered ahead for a use that did not come.
            self._waiting.remove(group.name)
            self.steps.append(Step("wait_gather", group.name, phase))
        self.gathered.remove(group.name)
        self.steps.append(Step("release", group.name, phase))

    def _reduce(self, groups: Sequence[ScheduledGroup]) -> None:
        # Issued before older ones are waited for, so that the queue never runs dry.
        for group in groups:
            if group in self._reducing:
                self._reducing.remove(group)
                self._wait_reduce(group)
            self._reducing.append(group)
            self._owed_reduces.discard(group.name)
            self.steps.append(Step("reduce", group.name, "backward"))
        while len({reducing.unit for reducing in self._reducing}) > self._inflight:
            self._wait_reduce(self._reducing.pop(0))

    def _wait_reduce(self, group: ScheduledGroup) -> None:
        if group in self._all_reducing:
            # What is added to the sum now would be lost or doubled.
            self._wait_all_reduce(group)
        self.steps.append(Step("wait_reduce", group.name, "backward"))
        self._owe_sum(group)
        if group.all_reduces:
            self._all_reduce(group)

    def _all_reduce(self, group: ScheduledGroup) -> None:
        self._owed_sums.discard(group.name)
        self._all_reducing.append(group)
        self.steps.append(Step("all_reduce", group.name, "backward"))

    def _wait_all_reduce(self, group: ScheduledGroup) -> None:
        self._all_reducing.remove(group)
        self.steps.append(Step("wait_all_reduce", group.name, "backward"))

    def _owe(self, unit: str) -> None:
        self._owed_reduces.update(b.name for b in self._of_unit.get(unit, ()) if b.trains)

    def _owe_sum(self, group: ScheduledGroup) -> None:
        if group.has_replicas:
            self._owed_sums.add(group.name)

    def _close(self, unit: str) -> None:
        # A trace that was put together of two may end what it has not begun.
        if unit in self._open:
            self._open.remove(unit)


def _is_over(keep: Keep, phase: Phase, is_last: bool) -> bool:
    """True if a group may be released when its unit has ended."""
    if phase == "forward":
        return keep == "use"
    return keep in ("use", "backward") or (keep == "step" and is_last)
