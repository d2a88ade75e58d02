"""The numbers that `pcomm train` leaves, compared between runs that should agree."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

__all__ = ["allowed_by_rounding", "assert_same_numbers", "numbers", "settings"]

_KEYS = ("loss", "balance_loss", "bits_per_byte")
# A unit in the last place of a loss in fp32, where two orders of a sum agree by chance.
_UNIT = 1e-6


def settings(values: Mapping[str, str], *overrides: str) -> list[str]:
    """Words of the command line: `--set key=value` for each, the overrides last."""
    assigned = [f"{key}={value}" for key, value in values.items()]
    return [word for text in (*assigned, *overrides) for word in ("--set", text)]


def numbers(run: Path) -> list[tuple[str, int, float]]:
    """Losses and bits per byte of a run's folder, as `(which, step, value)` in their order."""
    parsed = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(key, row["step"], row[key]) for row in parsed for key in _KEYS if key in row]


def allowed_by_rounding(one: Path, other: Path) -> float:
    """How far losses of fp32 may be apart: 8 times as far as in two runs on one process.

    Args:
        one: Folder of a run.
        other: Folder of the same run, with its sums in another order.
    """
    worst = _worst(one, other)
    assert worst < 1e-4, f"two orders of the same sums are {worst:.1e} apart"
    return 8 * max(worst, _UNIT)


def assert_same_numbers(mine: Path, theirs: Path, allowed: float) -> None:
    """Fail unless two runs have the same rows, and numbers at most `allowed` apart."""
    found, expected = ([row[:2] for row in numbers(run)] for run in (mine, theirs))
    assert found == expected, f"{found} instead of {expected}"
    assert found, f"{mine} has no numbers"
    worst = _worst(mine, theirs)
    assert worst <= allowed, f"off by {worst:.2e}, allowed are {allowed:.2e}"


def _worst(one: Path, other: Path) -> float:
    pairs = zip(numbers(one), numbers(other), strict=True)
    return max(abs(a[2] - b[2]) for a, b in pairs)
