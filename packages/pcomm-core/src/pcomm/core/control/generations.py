"""Which ranks make up each generation of a job, written once and read by all.

A generation is a set of ranks between two changes of membership. Number 0 is what the job began
with. For every later one the store keeps the set under the number, written by a compare-and-set,
so that of several proposals all ranks read the same one. Nothing is ever overwritten: a process
that slept through a change finds the record of the next number and knows that it is too late.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from pcomm.core.control.rank_sets import parsed, spelled
from pcomm.core.errors import DivergenceError, FencedError

__all__ = ["decide", "decided", "fence", "key_of", "register"]


def key_of(number: int) -> str:
    """Key of the ranks of a generation."""
    return f"pcomm/generation/{number}"


def decide(store: dist.Store, number: int, ranks: Sequence[int]) -> tuple[int, ...]:
    """The ranks of a generation: `ranks`, or those that another process wrote first."""
    return parsed(store.compare_set(key_of(number), "", spelled(ranks)).decode())


def decided(store: dist.Store, number: int) -> tuple[int, ...] | None:
    """The ranks of a generation, or None if it has not begun."""
    return parsed(store.get(key_of(number)).decode()) if store.check([key_of(number)]) else None


def fence(store: dist.Store, number: int, rank: int) -> None:
    """Raise `FencedError` if a generation after `number` has begun."""
    ranks = decided(store, number + 1)
    if ranks is not None:
        raise _fenced(number, rank, number + 1, ranks)


def register(store: dist.Store, number: int, ranks: Sequence[int], rank: int) -> None:
    """Make sure that generation `number` is of `ranks`; the first process to come writes that.

    Numbers below that were left out get a record too, because a process of an older generation
    looks there.

    Raises:
        FencedError: The generation is not of this rank, or is over.
        DivergenceError: It is of other ranks.
    """
    there = decide(store, number, ranks)
    if rank not in there:
        raise _fenced(number, rank, number, there)
    if there != tuple(ranks):
        raise DivergenceError(
            f"control: generation {number} of ranks {spelled(ranks)}",
            found=f"generation {number} is of ranks {spelled(there)}",
            why="A generation is one set of ranks, the same for every process.",
            fix="Take the next number, or the ranks of this one.",
        )
    for older in range(number - 1, 0, -1):
        if decide(store, older, ranks) != there:
            break
    fence(store, number, rank)


def _fenced(mine: int, rank: int, number: int, ranks: Sequence[int]) -> FencedError:
    is_in = rank in ranks
    return FencedError(
        f"control: rank {rank} in generation {mine}",
        found=f"generation {number} has begun, of ranks {spelled(ranks)}"
        + ("" if is_in else f", without rank {rank}"),
        why="Nothing of an older generation is read any more, so nothing it says may reach others.",
        fix="Go on with the control that next() returns."
        if is_in
        else "End this process; a new one comes back with Control.join, once the others begin "
        "a generation with it.",
    )
