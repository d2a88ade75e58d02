"""Recoveries as rows."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import fields

from pcomm.core.testing.timing import Row
from pcomm.ntp.bench.kills import Kill
from pcomm.ntp.bench.recovery_parts import Parts
from pcomm.ntp.bench.small_model import ROWS

__all__ = ["kill_rows"]

_WORDS = {
    "detect_s": "detect",
    "agree_s": "agree",
    "open_s": "open groups",
    "build_s": "build",
    "reshard_s": "reshard",
    "step_s": "step",
}


def kill_rows(found: Sequence[Kill], place: str) -> list[Row]:
    """Seconds from the kill to the next committed step, their parts, and what was lost.

    Args:
        found: Kills, at least one.
        place: Words for the job and what tells of deaths.
    """

    def row(case: str, value: float, unit: str, number: int) -> Row:
        return Row("ntp recovery", f"{case} @ {place}", value, unit, "", None, number)

    seconds = [kill.recovery.seconds for kill in found]
    number = len(found)
    rows = [
        row("median", round(statistics.median(seconds), 3), "s to the next committed step", number),
        row("longest", round(max(seconds), 3), "s to the next committed step", number),
    ]
    parts = [kill.parts for kill in found if kill.parts is not None]
    if parts:
        for field in fields(Parts):
            all_of = [1e3 * getattr(one, field.name) for one in parts]
            case = _WORDS[field.name]
            value = round(statistics.median(all_of), 1)
            rows.append(row(case, value, "ms of the slowest rank, median", len(parts)))
    lost = ROWS * sum(kill.missing for kill in found)
    rows.append(row("lost or trained on twice", float(lost), "samples of all kills", number))
    taken = float(sum(kill.excluded for kill in found))
    rows.append(row("alive and taken for dead", taken, "ranks in all recoveries", number))
    return rows
