"""How much of the communication ran beside something else, from the intervals of events.

An interval is `(start_s, stop_s)`. All functions take the events of one rank or look at one rank
at a time: clocks of different ranks are not compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pcomm.core.errors import ConfigError, near_misses
from pcomm.core.trace.event import COMPUTE, Event

__all__ = [
    "Interval",
    "exposed_communication_s",
    "intersection",
    "overlap_fraction",
    "subtraction",
    "total_s",
    "union",
]

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points of time as disjoint intervals, in order; empty ones fall out."""
    joined: list[Interval] = []
    for start, stop in sorted(intervals):
        if stop <= start:
            continue
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((start, stop))
    return joined


def intersection(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    """The points of time in both, as disjoint intervals in order."""
    left, right = union(a), union(b)
    both: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, stop = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < stop:
            both.append((start, stop))
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return both


def subtraction(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    """The points of time in `a` and not in `b`, as disjoint intervals in order."""
    whole, holes = union(a), union(b)
    edges = [-float("inf"), *(edge for hole in holes for edge in hole), float("inf")]
    return intersection(whole, zip(edges[::2], edges[1::2], strict=True))


def total_s(intervals: Iterable[Interval]) -> float:
    """Length of all together; time that is in several counts once."""
    return sum(stop - start for start, stop in union(intervals))


def overlap_fraction(events: Sequence[Event], *, a: str, b: str) -> float:
    """The share of the shorter of two queues' busy time in which both are busy.

    1 says that the shorter one is hidden behind the other, 0 that they take turns. Over several
    ranks both times are summed. 0 where one of the queues was never busy.

    Args:
        events: Events of one rank or several.
        a: Name of a queue, such as `"dp:gather"`.
        b: Name of another queue.

    Raises:
        ConfigError: No event has such a queue.
    """
    _check_known(events, a, b)
    both = shorter = 0.0
    for mine in _by_rank(events):
        in_a = _intervals(event for event in mine if event.queue == a)
        in_b = _intervals(event for event in mine if event.queue == b)
        both += total_s(intersection(in_a, in_b))
        shorter += min(total_s(in_a), total_s(in_b))
    return both / shorter if shorter else 0.0


def exposed_communication_s(events: Sequence[Event]) -> float:
    """Seconds in which a collective was in flight and the rank did not compute.

    A rank computes in its spans of `"compute"`, but not while it stands still in a blocking
    collective or in a wait. With the events of several ranks this is their mean.
    """
    per_rank = []
    for mine in _by_rank(events):
        moving = _intervals(event for event in mine if event.is_communication)
        spans = _intervals(event for event in mine if event.queue == COMPUTE)
        still = _intervals(event for event in mine if event.blocks)
        per_rank.append(total_s(subtraction(moving, subtraction(spans, still))))
    return sum(per_rank) / len(per_rank) if per_rank else 0.0


def _intervals(events: Iterable[Event]) -> list[Interval]:
    return [(event.start_s, event.stop_s) for event in events]


def _by_rank(events: Sequence[Event]) -> list[list[Event]]:
    ranks: dict[int, list[Event]] = {}
    for event in events:
        ranks.setdefault(event.rank, []).append(event)
    return list(ranks.values())


def _check_known(events: Sequence[Event], *queues: str) -> None:
    known = {event.queue for event in events}
    for queue in queues:
        if queue not in known:
            raise ConfigError(
                f"overlap_fraction: queue {queue!r}",
                found=f"{len(events)} events",
                why="A queue without an event is more often misspelt than idle.",
                fix=near_misses(queue, known),
            )
