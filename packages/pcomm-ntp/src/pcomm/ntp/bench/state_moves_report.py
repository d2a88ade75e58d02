"""Moves of a state as rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pcomm.core.testing.timing import Row, Timing
from pcomm.ntp.bench.state_moves import MoveTimes

__all__ = ["move_rows"]

_OURS, _BARE = "reshard", "one all-to-all of the bytes"


def move_rows(found: Mapping[str, Sequence[MoveTimes]], state_mib: int) -> list[Row]:
    """Time, bytes, and bytes over the fewest of each change.

    Args:
        found: Times of each change by rank.
        state_mib: MiB of the state of a replica.
    """
    rows = []
    for change, ranks in found.items():
        place = f"{change}, {state_mib} MiB a replica"
        taking = [one for one in ranks if one.moved is not None]
        ours = _slowest(_OURS, taking, lambda one: one.ours_s)
        bare = _slowest(_BARE, taking, lambda one: one.bare_s)
        number, beside = len(ours.rounds_us), f"{_BARE} @ {place}"
        values: list[tuple[str, float, str, str, float | None, int]] = [
            (_BARE, bare.median_us / 1e3, "ms", "", None, number),
            (_OURS, ours.median_us / 1e3, "ms", beside, round(ours.ratio_to(bare), 3), number),
        ]
        got = sum(one.moved.bytes_received for one in taking if one.moved is not None)
        least = sum(one.moved.bytes_least for one in taking if one.moved is not None)
        values.append((_OURS, got / 2**20, "MiB received by all ranks", "", None, 1))
        values.append((_OURS, got / least, "bytes over the fewest", "", None, 1))
        wrong = sum(not one.is_right for one in taking)
        values.append((_OURS, float(wrong), "ranks with a wrong value", "", None, 1))
        rows += [
            Row("ntp reshard", f"{case} @ {place}", round(value, 3), unit, to, ratio, count)
            for case, value, unit, to, ratio, count in values
        ]
    return rows


def _slowest(
    case: str, ranks: Sequence[MoveTimes], seconds: Callable[[MoveTimes], Sequence[float]]
) -> Timing:
    rounds = zip(*(seconds(one) for one in ranks), strict=True)
    return Timing(case, tuple(max(one) * 1e6 for one in rounds))
