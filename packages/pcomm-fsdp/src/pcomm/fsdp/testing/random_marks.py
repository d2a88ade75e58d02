"""Marks of random models, for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from pcomm.fsdp.plan.units import ROOT
from pcomm.fsdp.runtime.schedule import Mark

__all__ = ["random_marks"]


@st.composite
def random_marks(draw: st.DrawFn) -> list[Mark]:
    """Units in any order, nested and repeated, some of them without a backward."""
    names = [f"u{i}" for i in range(draw(st.integers(1, 6)))]
    marks = [Mark("use", ROOT, "forward")]
    for name in draw(st.lists(st.sampled_from(names), max_size=10)):
        inner = draw(st.sampled_from([*names, ""]))
        marks.append(Mark("use", name, "forward"))
        if inner and inner != name:
            marks += [Mark("use", inner, "forward"), Mark("done", inner, "forward")]
        marks.append(Mark("done", name, "forward"))
    marks += [Mark("done", ROOT, "forward"), Mark("use", ROOT, "backward")]
    used = sorted({mark.unit for mark in marks} - {ROOT})
    back = draw(st.permutations(used))[: draw(st.integers(0, len(used)))]
    waiting: list[str] = []
    for name in back:
        marks.append(Mark("use", name, "backward"))
        waiting.append(name)
        while len(waiting) > 0 and draw(st.booleans()):
            marks.append(Mark("done", waiting.pop(), "backward"))
    marks += [Mark("done", name, "backward") for name in reversed(waiting)]
    return [*marks, Mark("done", ROOT, "backward"), Mark("end", ROOT, "backward")]
