"""The page that lists which models of transformers run with which package.

The outcomes are in `works_with.json` beside the models of the tests, whose long form writes them.
`reference_pages.py` writes the page.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from repository import ROOT

__all__ = ["outcomes", "works_with_page"]

OUTCOMES = ROOT / "packages" / "pcomm-core" / "tests" / "core_support" / "works_with.json"

HEAD = """\
# Models of transformers

Which architectures run with which package, unchanged: models with random weights of some thousand
parameters, by transformers {transformers} and torch {torch} on CPU, {date}. *Equal* are those whose
result is that of the model alone; *refused* are those for which the call raises before it computes.
Tests compare some of each list in every run, and `python3 -m nox -s soak -- -k works_with` all;
`RECORD_WORKS_WITH=1 python3 -m nox -s soak -- -m "" -k works_with` writes the lists.

"""


def outcomes() -> dict[str, Any]:
    """The committed outcomes: `versions`, and for each of the `features` the end of each family."""
    found: dict[str, Any] = json.loads(OUTCOMES.read_text())
    return found


def works_with_page() -> str:
    """The page, from the committed outcomes."""
    found = outcomes()
    sections = (_section(**one) for one in found["features"])
    return HEAD.format(**found["versions"]) + "\n".join(sections)


def _section(name: str, call: str, means: str, outcomes: Mapping[str, str]) -> str:
    equal = [family for family, outcome in outcomes.items() if outcome == "equal"]
    lines = [f"## {name}", "", f"`{call}`. {means}.", ""]
    lines += [f"**Equal ({len(equal)})**: {', '.join(sorted(equal))}.", ""]
    return "\n".join([*lines, *_others(outcomes)])


def _others(outcomes: Mapping[str, str]) -> Iterator[str]:
    """The families that are not equal, those with one reason in one line."""
    by_reason: dict[str, list[str]] = {}
    for family, outcome in sorted(outcomes.items()):
        if outcome != "equal":
            by_reason.setdefault(outcome, []).append(family)
    for outcome, families in sorted(by_reason.items(), key=lambda item: (-len(item[1]), item[0])):
        kind, _, reason = outcome.partition(": ")
        # How many were not tried says enough of those.
        listed = ", ".join(families) if kind != "not tried" else str(len(families))
        yield f"- **{kind.capitalize()}**, {reason}: {listed}."
    yield ""
