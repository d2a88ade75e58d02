"""Choices for one workspace: made once for each question, then found in a dictionary."""

from __future__ import annotations

import logging

from pcomm.core.errors import UnsupportedError
from pcomm.nvls.policy.choose import Choice, choose
from pcomm.nvls.policy.explain import described, explain
from pcomm.nvls.policy.facts import Facts, Question
from pcomm.nvls.policy.obstacles import obstacle
from pcomm.nvls.policy.operations import ALGORITHMS
from pcomm.nvls.policy.table import Table

__all__ = ["Chooser"]

# Messages of all sizes, as variable counts may have, do not fill the memory.
_MOST_CHOICES = 4096


class Chooser:
    """Chooses for the calls on one workspace, and logs each reason once.

    The logger is `pcomm.nvls`. A reason is logged as a warning if speed is lost that another
    machine, workspace or shape would have, and for information otherwise.

    Args:
        facts: Facts about the group and its workspace; ranks compare `facts.agreed_lines(table)`
            when the workspace is opened.
        table: Thresholds and launches; by default the table of the package.
        warns: True to log what is lost as a warning: on one rank, since all choose alike.
    """

    def __init__(self, facts: Facts, table: Table | None = None, *, warns: bool = True) -> None:
        self.facts, self.table = facts, Table.load() if table is None else table
        self._choices: dict[Question, Choice] = {}
        self._logged: set[str] = set()
        self._warns = warns
        self._log = logging.getLogger("pcomm.nvls")

    def choose(self, question: Question, *, strict: bool = False) -> Choice:
        """The choice for a call. Local; less than a microsecond from the second time on.

        Args:
            question: Call that an algorithm is chosen for.
            strict: True if `dist` is an error, unless the question names it.

        Raises:
            ConfigError: An unknown operation or algorithm, or a negative size.
            UnsupportedError: The algorithm that the question names cannot run, or `strict` and the
                choice is `dist`. On every rank, since all choose alike; never with one rank.
        """
        choice = self._choices.get(question)
        if choice is None:
            choice = self._decide(question)
        if choice.algorithm == "dist":
            self._check(question, choice, strict)
        return choice

    def explain(self, question: Question) -> str:
        """Text that says which algorithm runs for a call, why, and why not each faster one."""
        return explain(self.facts, question, self.table)

    def _decide(self, question: Question) -> Choice:
        choice = choose(self.facts, question, self.table)
        if len(self._choices) >= _MOST_CHOICES:
            self._choices.clear()
        self._choices[question] = choice
        for reason in choice.reasons:
            if reason not in self._logged:
                self._logged.add(reason)
                is_warning = self._warns and reason in choice.losses
                level = logging.WARNING if is_warning else logging.INFO
                first = f"{question.operation} takes {choice.algorithm}"
                self._log.log(level, "not %s (first seen where %s)", reason, first)
        return choice

    def _check(self, question: Question, choice: Choice, strict: bool) -> None:
        if self.facts.world_size == 1:
            return
        named = question.algorithm not in ("auto", "dist")
        if not named and not (strict and question.algorithm == "auto"):
            return
        wanted = f"algo={question.algorithm!r}"
        reasons = choice.reasons or (f"dist: {choice.because}",)
        if not named:
            # A size of the table may hide that no other table would help, such as a small slot.
            found = ((name, obstacle(self.facts, question, name)) for name in ALGORITHMS)
            more = (f"{name}: {reason.text}" for name, reason in found if reason is not None)
            wanted, reasons = "strict=True", tuple(dict.fromkeys([*reasons, *more]))
        raise UnsupportedError(
            f"{described(self.facts, question)}, {wanted}",
            found="; ".join(reasons),
            why="All ranks would take torch.distributed, and the call forbids that.",
            fix="Resolve these reasons, or ask for algo='auto' without strict.",
        )
