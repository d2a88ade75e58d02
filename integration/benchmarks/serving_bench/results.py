"""What was measured: rows of a CSV, goals beside what was reached, and tables."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version

import torch

from core_bench.rows import Row, row
from core_bench.runner import Results, Timing
from core_bench.tables import lines_of


@dataclass(frozen=True)
class Goal:
    """A number that was to be reached, and the one that was.

    Args:
        what: The quantity and its unit.
        limit: The number to reach.
        reached: The number that was measured.
        is_most: True if less is better, false if more is.
    """

    what: str
    limit: float
    reached: float
    is_most: bool

    @property
    def is_met(self) -> bool:
        """Whether it was reached."""
        return self.reached <= self.limit if self.is_most else self.reached >= self.limit


class PartResults:
    """Rows and goals of one part.

    Args:
        part: Name of the part.

    Attributes:
        part: Name of the part.
        rows: Rows so far.
        goals: Goals so far.
    """

    def __init__(self, part: str) -> None:
        self.part = part
        self.rows: list[Row] = []
        self.goals: list[Goal] = []

    def value(
        self,
        case: str,
        value: float,
        unit: str,
        rounds: int,
        *,
        ratio_to: str = "",
        ratio: float | None = None,
    ) -> None:
        """Add a row.

        Args:
            case: Name of what was measured, and behind ` @ ` where.
            value: The number.
            unit: Its unit; no other row of the case has it.
            rounds: Number of rounds behind it.
            ratio_to: Another case of the same unit; empty for none.
            ratio: This value over that one, as the median of the ratios within a round.
        """
        beside = None if ratio is None else (ratio_to, ratio)
        found = row(f"serving {self.part}", case, value, unit, rounds, beside=beside)
        versions = f"{torch.__version__}, transformers {version('transformers')}"
        self.rows.append(replace(found, value=round(value, 4), torch=versions))

    def time(
        self, case: str, timing: Timing, unit: str, *, beside: tuple[str, Timing] | None = None
    ) -> None:
        """Add a row of milliseconds.

        Args:
            case: Case as for `value`.
            timing: Times of all rounds.
            unit: Words that begin with `ms`.
            beside: Another case with its times, for the ratio.
        """
        self.value(
            case,
            timing.median_us / 1e3,
            unit,
            len(timing.rounds_us),
            ratio_to=beside[0] if beside else "",
            ratio=timing.ratio_to(beside[1]) if beside else None,
        )

    def tokens(
        self, case: str, step: Timing, num_tokens: int, *, beside: tuple[str, Timing] | None = None
    ) -> None:
        """Add a row of tokens/s.

        Args:
            case: Case as for `value`.
            step: Times of a step in all rounds.
            num_tokens: Number of tokens that a step writes.
            beside: Another case with the times of its step, which writes as many.
        """
        self.value(
            case,
            num_tokens / (step.median_us / 1e6),
            "tokens/s",
            len(step.rounds_us),
            ratio_to=beside[0] if beside else "",
            ratio=beside[1].ratio_to(step) if beside else None,
        )

    def at_most(self, what: str, limit: float, reached: float) -> None:
        """Add a goal of which less is better."""
        self.goals.append(Goal(what, limit, reached, True))

    def at_least(self, what: str, limit: float, reached: float) -> None:
        """Add a goal of which more is better."""
        self.goals.append(Goal(what, limit, reached, False))


# How each part is measured, for readers of its figures.
_HOW = {
    "streams": "`generate` of transformers has torch's attention (`sdpa`), prompts of equal length "
    "and no look for an end, in inference mode. It is measured with keys and values that grow and "
    "with a static cache. `continuous batching` is `generate_batch` of transformers, with a "
    "manager that stays, blocks for exactly these texts and nothing filled up. Goals stand beside "
    "the fastest of the three. None is compiled: that takes minutes for each number of streams. "
    "Ours is `LLM` as it opens by default, which also makes text of the tokens. `linears alone` "
    "are the products of its own packed weights with as many rows, `linears by F.linear` those "
    "that torch's layers would make. Where `generate` has no figure, prompts are of mixed lengths.",
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


def rows_of(measured: Sequence[PartResults]) -> list[Row]:
    """The rows of all parts."""
    return [row for found in measured for row in found.rows]


def goals_of(measured: Sequence[PartResults]) -> list[Goal]:
    """The goals of all parts."""
    return [goal for found in measured for goal in found.goals]


def report_of(measured: Sequence[PartResults]) -> str:
    """Goals and what was reached, and how each part was measured, as Markdown."""
    lines = ["| measured | goal | reached | met |", "|---|---|---|---|"]
    for goal in goals_of(measured):
        bound = f"at {'most' if goal.is_most else 'least'} {goal.limit:.4g}"
        met = "yes" if goal.is_met else "no"
        lines.append(f"| {goal.what} | {bound} | {goal.reached:.3g} | {met} |")
    parts = dict.fromkeys(found.part for found in measured)
    return "\n".join([*lines, "", *(f"- *{part}*: {_HOW[part]}" for part in parts)])


def results_of(measured: Sequence[PartResults]) -> Results:
    lines = [""]
    for part, several in itertools.groupby(measured, key=lambda found: found.part):
        lines += [f"{part}:", *lines_of([one for found in several for one in found.rows]), ""]
    text = "\n".join(lines) + "\n" + report_of(measured)
    return Results(rows_of(measured), text)
