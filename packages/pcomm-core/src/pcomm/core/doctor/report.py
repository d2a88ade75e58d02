"""What the doctor says: findings, and the report that holds and prints them."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, get_args

__all__ = ["Finding", "Report", "Status"]

Status = Literal["ok", "missing", "broken", "info"]

_LINE: Final = 100
_NAME: Final = 24
_INDENT: Final = len("missing  ") + _NAME + 1


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Args:
        name: Name of the item, such as `"cuda.peer_access"`.
        status: `"ok"`: there and usable. `"missing"`: not there, and features that need it choose
            another way. `"broken"`: there, but will fail or mislead. `"info"`: a fact to know.
        value: Value that was found.
        reason: Reason for a status other than `"ok"`.
        fix: Action that repairs the item; a broken item always has one.
    """

    name: str
    status: Status
    value: str
    reason: str = ""
    fix: str = ""

    def __post_init__(self) -> None:
        assert self.status != "broken" or (self.reason and self.fix), self.name


@dataclass(frozen=True)
class Report:
    """All findings of one examination, in the order of the checks.

    Args:
        findings: Every finding, in order.
    """

    findings: tuple[Finding, ...]

    @property
    def is_healthy(self) -> bool:
        """Whether nothing is broken; what is merely missing does not count."""
        return not any(finding.status == "broken" for finding in self.findings)

    def named(self, name: str) -> Finding:
        """The first finding of that name.

        Raises:
            KeyError: There is none.
        """
        for finding in self.findings:
            if finding.name == name:
                return finding
        raise KeyError(name)

    def as_dict(self) -> dict[str, object]:
        """The report as plain values, for JSON."""
        findings = [dataclasses.asdict(finding) for finding in self.findings]
        return {"is_healthy": self.is_healthy, "findings": findings}

    def as_text(self) -> str:
        """The report as a table of at most 100 columns; what is broken is named again last."""
        lines = [line for finding in self.findings for line in _lines(finding)]
        counts = [
            f"{sum(finding.status == status for finding in self.findings)} {status}"
            for status in get_args(Status)
        ]
        broken = [finding.name for finding in self.findings if finding.status == "broken"]
        lines += ["", ", ".join(counts)]
        if broken:
            lines += _wrapped("broken: " + ", ".join(broken), indent=len("broken: "))
        return "\n".join(lines)


def _lines(finding: Finding) -> Iterable[str]:
    head = f"{finding.status:<8} {finding.name:<{_NAME}} "
    yield from _wrapped(head + finding.value, indent=_INDENT)
    for label, text in (("", finding.reason), ("fix: ", finding.fix)):
        if text:
            yield from _wrapped(" " * _INDENT + label + text, indent=_INDENT)


def _wrapped(text: str, *, indent: int) -> list[str]:
    # The text starts with its own padding, so only the lines after the first are indented here.
    body = text.splitlines() or [""]
    lines: list[str] = []
    for number, line in enumerate(body):
        start = "" if number == 0 else " " * indent
        lines += textwrap.wrap(
            line,
            _LINE,
            initial_indent=start,
            subsequent_indent=" " * indent,
            drop_whitespace=True,
            replace_whitespace=False,
        )
    return [line.rstrip() for line in lines]
