"""Traces of the micro-batches so far, and a guess which one the next repeats.

All ranks have the same traces in the same order, so they guess alike without communication.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pcomm.fsdp.runtime.schedule import Mark

__all__ = ["MOST_TRACES", "Trace", "Traces"]

MOST_TRACES = 16
"""Number of different traces that are kept for each way to begin a micro-batch."""


@dataclass(frozen=True, eq=False)
class Trace:
    """The marks of one micro-batch from its beginning to its end.

    Args:
        marks: Beginnings and ends of units, in order; the last one is `end`.
    """

    marks: tuple[Mark, ...]

    @property
    def trains(self) -> bool:
        """True for a forward and its backward."""
        return self.marks[0].phase == "forward" and self.marks[-1].phase == "backward"


class Traces:
    """Traces by what is known when a micro-batch begins: its context.

    A context is, for example, a forward with gradients enabled that one of the model's entry points
    began. Within one, the guess is what followed the last time after the same two traces.
    """

    def __init__(self) -> None:
        # The last one that was used is the last one in its list.
        self._known: dict[str, list[Trace]] = {}
        self._history: dict[str, tuple[Trace, ...]] = {}
        self._after: dict[tuple[str, tuple[Trace, ...]], Trace] = {}

    def guess(self, context: str) -> Trace | None:
        """The trace that most likely comes next; None if there was none."""
        known = self._known.get(context)
        if not known:
            return None
        history = self._history[context]
        for length in (2, 1):
            found = self._after.get((context, history[-length:]))
            if found is not None:
                return found
        return known[-1]

    def learn(self, context: str, marks: Sequence[Mark]) -> Trace:
        """Remember that a micro-batch did this. Returns the trace, the same one for equal marks."""
        known = self._known.setdefault(context, [])
        marks = tuple(marks)
        trace = next((one for one in known if one.marks is marks or one.marks == marks), None)
        if trace is None:
            trace = Trace(marks)
            known.append(trace)
            if len(known) > MOST_TRACES:
                self._forget(context, known.pop(0))
        elif trace is not known[-1]:
            known.remove(trace)
            known.append(trace)
        history = self._history.get(context, ())
        for length in range(1, len(history) + 1):
            self._after[context, history[-length:]] = trace
        self._history[context] = (*history, trace)[-2:]
        return trace

    def resume(self, context: str, before: Sequence[Mark], mark: Mark) -> Sequence[Mark] | None:
        """The marks of a whole micro-batch that begins with `before` and goes on with `mark`.

        They are those of a known one, if it begins like that; else those of one that does the
        same from `mark` on, without the backward of units that took no part in forward.

        Args:
            context: Context of the micro-batch.
            before: Marks of the micro-batch so far.
            mark: The next mark, another one than was expected.
        """
        known = self._known.get(context, [])[::-1]
        length, before = len(before), tuple(before)
        for trace in known:
            if trace.marks[length : length + 1] == (mark,) and trace.marks[:length] == before:
                return trace.marks
        count = before.count(mark)
        for trace in known:
            places = [place for place, other in enumerate(trace.marks) if other == mark]
            if len(places) > count:
                return _joined(before, trace.marks[places[count] :])
        return None

    def last_training(self) -> Trace | None:
        """The last one that was a forward and its backward."""
        found = [trace for known in self._known.values() for trace in known if trace.trains]
        recent = [trace for history in self._history.values() for trace in history[::-1]]
        return next((trace for trace in recent if trace in found), found[-1] if found else None)

    def units(self) -> set[str]:
        """The units that took part in any trace that is kept."""
        return {
            mark.unit for known in self._known.values() for trace in known for mark in trace.marks
        }

    def _forget(self, context: str, trace: Trace) -> None:
        for key in [k for k, after in self._after.items() if after is trace or trace in k[1]]:
            del self._after[key]
        self._history[context] = tuple(t for t in self._history[context] if t is not trace)


def _joined(before: tuple[Mark, ...], after: tuple[Mark, ...]) -> tuple[Mark, ...]:
    used = Counter(mark.unit for mark in (*before, *after) if mark.phase == "forward")
    if after[0].phase == "forward":
        after = tuple(m for m in after if m.phase == "forward" or used[m.unit])
    return before + after
