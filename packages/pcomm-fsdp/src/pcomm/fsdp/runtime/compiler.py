"""From what units do to steps: with foresight for a known trace, or on demand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pcomm.fsdp.runtime.schedule import (
    NOTHING_OWED,
    Buffer,
    Mark,
    Owed,
    Phase,
    Schedule,
    Step,
    marks_of,
)
from pcomm.fsdp.settings.reshard_policy import Keep

__all__ = ["OnDemand", "compile_schedule"]


def compile_schedule(
    marks: Sequence[Mark],
    buffers: Iterable[Buffer],
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

    Before a unit is used, its own buffers and those of the next `prefetch` units are on their way.
    After the forward of a unit its buffers are released, unless they would be gathered again at
    once. In backward the next gather is issued before the reduce of the unit that has just ended,
    so that it does not queue behind it even on one communicator. A unit that backward comes to
    several times, as after two forwards, is reduced the last time.

    Without prefetch in backward, a gather is issued when the unit before it has ended, before the
    reduce of that one: what is on its way while a unit computes is then a reduce alone.

    Args:
        marks: What units do, in order; the last one is `end`.
        buffers: Of all units.
        prefetch: Units gathered ahead.
        prefetch_bytes: Limit of what is gathered ahead beyond the first unit; None for none.
        inflight_reduce: Units whose reduces may be on their way while the next one computes.
        gathered: Names of buffers that are gathered already.
        is_last: Whether this is the last micro-batch of its step.
        owed: What earlier micro-batches of the step have left.
        taken: Steps of this micro-batch that were taken already, around its first marks; the
            schedule goes on behind them, and gives back what was gathered ahead for nothing.
        prefetch_backward: The same as `prefetch` in backward, where it differs. As many units stay
            from forward to backward as `prefetch` says.
    """
    backward = prefetch if prefetch_backward is None else prefetch_backward
    depths: dict[Phase, int] = {"forward": prefetch, "backward": backward}
    compiler = _Compiler(marks, buffers, depths, prefetch_bytes, inflight_reduce, gathered, owed)
    start = compiler.resume(taken)
    if taken:
        phase = marks[start].phase
        compiler.give_back(compiler.ahead(start - 1, 1 + depths[phase]), phase)
    for place in range(start, len(marks)):
        compiler.add(place, marks[place], is_last)
    steps = tuple(compiler.steps[len(taken) :])
    return Schedule(steps, frozenset(compiler.gathered), compiler.owed)


class OnDemand:
    """Steps for marks that come one by one, while nothing is known of those that follow.

    Nothing is gathered ahead. Used for what was never seen before.

    Args:
        buffers: Of all units.
        inflight_reduce: As in `compile_schedule`.
        gathered: Names of buffers that are gathered already.
        is_last: Whether this is the last micro-batch of its step.
        owed: What earlier micro-batches of the step have left.
        taken: Steps of this micro-batch that were taken already.
    """

    def __init__(
        self,
        buffers: Iterable[Buffer],
        *,
        inflight_reduce: int,
        gathered: frozenset[str],
        is_last: bool,
        owed: Owed = NOTHING_OWED,
        taken: Sequence[Step] = (),
    ) -> None:
        self._is_last = is_last
        depths: dict[Phase, int] = {"forward": 0, "backward": 0}
        self._compiler = _Compiler((), buffers, depths, None, inflight_reduce, gathered, owed)
        self._compiler.resume(taken)
        self._gives_back = bool(taken)

    @property
    def steps(self) -> Sequence[Step]:
        """All steps up to now."""
        return self._compiler.steps

    @property
    def marks(self) -> list[Mark]:
        """All marks up to now."""
        return list(marks_of(self.steps))

    @property
    def gathered(self) -> frozenset[str]:
        """Names of buffers that are gathered now."""
        return frozenset(self._compiler.gathered)

    @property
    def owed(self) -> Owed:
        """What is left to a later micro-batch of the step."""
        return self._compiler.owed

    def steps_for(self, mark: Mark) -> list[Step]:
        """What to do before and after `mark`, which is one of the steps."""
        start = len(self._compiler.steps)
        if self._gives_back:
            self._gives_back = False
            self._compiler.give_back([mark.unit], mark.phase)
        self._compiler.add(0, mark, self._is_last)
        return self._compiler.steps[start:]


class _Compiler:
    """Goes over marks once and keeps what is gathered and what is on its way."""

    def __init__(
        self,
        marks: Sequence[Mark],
        buffers: Iterable[Buffer],
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
        self._buffers = {buffer.name: buffer for buffer in buffers}
        self._of_unit: dict[str, list[Buffer]] = {}
        for buffer in self._buffers.values():
            self._of_unit.setdefault(buffer.unit, []).append(buffer)
        self._waiting: set[str] = set()
        self._open: list[str] = []
        self._reducing: list[Buffer] = []
        self._replicating: list[Buffer] = []

    @property
    def owed(self) -> Owed:
        return Owed(frozenset(self._owed_reduces), frozenset(self._owed_sums))

    def resume(self, taken: Sequence[Step]) -> int:
        """Get to where these steps lead. Returns how many marks are among them."""
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
            elif step.kind == "wait":
                self._waiting.remove(step.name)
            elif step.kind == "release":
                self.gathered.remove(step.name)
            elif step.kind == "reduce":
                self._owed_reduces.discard(step.name)
                self._reducing.append(self._buffers[step.name])
            elif step.kind == "finish":
                self._reducing.remove(self._buffers[step.name])
                self._owe_sum(self._buffers[step.name])
            elif step.kind == "replicate":
                self._owed_sums.discard(step.name)
                self._replicating.append(self._buffers[step.name])
            elif step.kind == "settle":
                self._replicating.remove(self._buffers[step.name])
        self.steps.extend(taken)
        return sum(step.is_anchor for step in taken)

    def give_back(self, units: Sequence[str], phase: Phase) -> None:
        """Release what was gathered ahead and is not used soon."""
        for buffer in self._buffers.values():
            is_used = buffer.unit in units or buffer.unit in self._open
            if buffer.keep == "use" and not is_used:
                self._release(buffer, phase)

    def add(self, place: int, mark: Mark, is_last: bool) -> None:
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
        for buffer in self._of_unit.get(mark.unit, ()):
            if buffer.name in self._waiting:
                self._waiting.remove(buffer.name)
                self.steps.append(Step("wait", buffer.name, mark.phase))
        self.steps.append(Step("use", mark.unit, mark.phase))

    def _done(self, place: int, mark: Mark, is_last: bool) -> None:
        self.steps.append(Step("done", mark.unit, mark.phase))
        self._close(mark.unit)
        ahead = self.ahead(place, 1 + self._depths[mark.phase])
        if mark.unit not in ahead and mark.unit not in self._open:
            for buffer in self._of_unit.get(mark.unit, ()):
                if _is_over(buffer.keep, mark.phase, is_last):
                    self._release(buffer, mark.phase)
        if mark.phase == "backward":
            self._owe(mark.unit)
            reduced = [buffer for buffer in self._of_unit.get(mark.unit, ()) if buffer.reduces]
            if self._last_backward.get(mark.unit, place) > place:
                reduced = []
            # Where an older reduce has to end before the next unit computes, what is needed after
            # that unit is gathered behind it: as early as it can be of use, and in memory that the
            # older one has given back.
            units = {buffer.unit for buffer in [*self._reducing, *reduced]}
            has_to_wait = len(units) > self._inflight
            for unit in ahead[:1] if has_to_wait else ahead:
                self._gather(unit, mark.phase)
            self._reduce(reduced)

    def _end(self, mark: Mark, is_last: bool) -> None:
        self.steps.append(Step("end", mark.unit, mark.phase))
        if mark.phase == "backward":
            # Of units that took part in an earlier micro-batch of the step, and not in this one.
            owed = [buffer for name, buffer in self._buffers.items() if name in self._owed_reduces]
            self._reduce([buffer for buffer in owed if buffer.reduces])
            while self._reducing:
                self._finish(self._reducing.pop(0))
            for name, buffer in self._buffers.items():
                if name in self._owed_sums and buffer.replicates:
                    self._replicate(buffer)
            while self._replicating:
                self._settle(self._replicating[0])
        for own in self._of_unit.values():
            for buffer in own:
                # A forward without backward keeps what the next step would gather again.
                if buffer.keep in ("use", "backward") or _is_over(buffer.keep, mark.phase, is_last):
                    self._release(buffer, mark.phase)
                elif buffer.name in self._waiting:
                    # Gathered ahead for a use that did not come, and kept: whoever uses it next
                    # takes it for gathered.
                    self._waiting.remove(buffer.name)
                    self.steps.append(Step("wait", buffer.name, mark.phase))
                if is_last:
                    # The optimizer makes it stale; its memory stays where it is.
                    self.gathered.discard(buffer.name)

    def ahead(self, place: int, count: int) -> list[str]:
        """The next units that are used after a mark and are not in use there, nearest first."""
        units: list[str] = []
        total = 0
        for mark in self._marks[place + 1 :]:
            if len(units) == count:
                break
            if mark.kind != "use" or mark.unit in units or mark.unit in self._open:
                continue
            total += sum(buffer.num_bytes for buffer in self._of_unit.get(mark.unit, ()))
            if units and self._limit is not None and total > self._limit:
                break
            units.append(mark.unit)
        return units

    def _gather(self, unit: str, phase: Phase) -> None:
        for buffer in self._of_unit.get(unit, ()):
            if buffer.name not in self.gathered:
                self.gathered.add(buffer.name)
                self._waiting.add(buffer.name)
                self.steps.append(Step("gather", buffer.name, phase))

    def _release(self, buffer: Buffer, phase: Phase) -> None:
        if buffer.name not in self.gathered:
            return
        if buffer.name in self._waiting:
            # Gathered ahead for a use that did not come.
            self._waiting.remove(buffer.name)
            self.steps.append(Step("wait", buffer.name, phase))
        self.gathered.remove(buffer.name)
        self.steps.append(Step("release", buffer.name, phase))

    def _reduce(self, buffers: Sequence[Buffer]) -> None:
        # Issued before older ones are waited for, so that the queue never runs dry.
        for buffer in buffers:
            if buffer in self._reducing:
                self._reducing.remove(buffer)
                self._finish(buffer)
            self._reducing.append(buffer)
            self._owed_reduces.discard(buffer.name)
            self.steps.append(Step("reduce", buffer.name, "backward"))
        while len({reducing.unit for reducing in self._reducing}) > self._inflight:
            self._finish(self._reducing.pop(0))

    def _finish(self, buffer: Buffer) -> None:
        if buffer in self._replicating:
            # What is added to the sum now would be lost or doubled.
            self._settle(buffer)
        self.steps.append(Step("finish", buffer.name, "backward"))
        self._owe_sum(buffer)
        if buffer.replicates:
            self._replicate(buffer)

    def _replicate(self, buffer: Buffer) -> None:
        self._owed_sums.discard(buffer.name)
        self._replicating.append(buffer)
        self.steps.append(Step("replicate", buffer.name, "backward"))

    def _settle(self, buffer: Buffer) -> None:
        self._replicating.remove(buffer)
        self.steps.append(Step("settle", buffer.name, "backward"))

    def _owe(self, unit: str) -> None:
        self._owed_reduces.update(b.name for b in self._of_unit.get(unit, ()) if b.trains)

    def _owe_sum(self, buffer: Buffer) -> None:
        if buffer.has_replicas:
            self._owed_sums.add(buffer.name)

    def _close(self, unit: str) -> None:
        # A trace that was put together of two may end what it has not begun.
        if unit in self._open:
            self._open.remove(unit)


def _is_over(keep: Keep, phase: Phase, is_last: bool) -> bool:
    """Whether a buffer may go when its unit has ended."""
    if phase == "forward":
        return keep == "use"
    return keep in ("use", "backward") or (keep == "step" and is_last)
