"""What was measured: rows of a CSV, and goals beside what was reached, as Markdown."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from pcomm.core.testing.timing import Row
from pcomm.integration.bench.rows import Found, Goal

__all__ = ["goals_of", "report_of", "rows_of", "tables_of"]

# How each part is measured, for readers of its figures.
_HOW = {
    "streams": "`generate` of transformers has torch's attention (`sdpa`), prompts of equal length "
    "and no look for an end, in inference mode. It is measured with keys and values that grow and "
    "with a static cache, and goals stand beside the faster one. It is not compiled: that takes "
    "minutes for each number of streams. Ours is `LLM` as it opens by default, which also makes "
    "text of the tokens. `linears alone` are the products of its own packed weights with as many "
    "rows, `linears by F.linear` those that torch's layers would make. Where transformers has no "
    "figure, prompts are of mixed lengths.",
    "tiny": "One stream, one thread, fp32. `forward` is a call of the model with its cache, which "
    "chooses no token; a step of the engine chooses it and makes text. `whole text` includes a "
    "short prompt.",
    "context": "One stream, one thread, fp32; all models and lengths take turns. transformers runs "
    "its torch path, as on any machine without the CUDA kernels.",
    "prefix": "New prompts and prompts whose first nine tenths were seen before take turns; one "
    "thread, fp32.",
    "prompt": "The kernels alone are the products of each chunk, and torch's attention with the "
    "arguments that the engine gives it, in turns with the prompt itself.",
    "server": "`pcomm serve` in a process of its own, one thread of torch. The client is another "
    "process without torch: one thread waits for all sockets, keeps bytes and times, and parses "
    "them when all streams have ended. Without HTTP the same engine runs with as many threads, "
    "text included, while the server waits.",
}


def rows_of(measured: Sequence[Found]) -> list[Row]:
    """The rows of all parts."""
    return [row for found in measured for row in found.rows]


def goals_of(measured: Sequence[Found]) -> list[Goal]:
    """The goals of all parts."""
    return [goal for found in measured for goal in found.goals]


def report_of(measured: Sequence[Found]) -> str:
    """Goals and what was reached, and how each part was measured, as Markdown."""
    lines = ["| measured | goal | reached | met |", "|---|---|---|---|"]
    for goal in goals_of(measured):
        bound = f"at {'most' if goal.is_most else 'least'} {goal.limit:.4g}"
        met = "yes" if goal.is_met else "no"
        lines.append(f"| {goal.what} | {bound} | {goal.reached:.3g} | {met} |")
    parts = dict.fromkeys(found.part for found in measured)
    return "\n".join([*lines, "", *(f"- *{part}*: {_HOW[part]}" for part in parts)])


def tables_of(measured: Sequence[Found]) -> str:
    """All rows by part, as Markdown."""
    lines: list[str] = []
    for part, several in itertools.groupby(measured, key=lambda found: found.part):
        rows = [row for found in several for row in found.rows]
        lines += ["", f"**{part}**", "", *_row_lines(rows)]
    return "\n".join(lines)


def _row_lines(rows: Sequence[Row]) -> Iterator[str]:
    yield from ["| case | value | unit | ratio |", "|---|---|---|---|"]
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f} x {row.ratio_to.split(' @ ')[0]}"
        yield f"| {row.case} | {row.value:.4g} | {row.unit} | {ratio} |"
