"""Ranks agree on something before they enter a collective, or all learn why they do not.

Everything here goes through torch's key-value store, which works before any communicator
exists and where a wait has a time limit. A mistake on one rank therefore becomes an error on
every rank instead of a hang.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from pcomm.core.errors import DivergenceError, PcommError, PeerError, PeerTimeoutError

__all__ = ["agree_on_lines", "fail_together"]


def agree_on_lines(
    store: dist.Store, topic: str, lines: Sequence[str], rank: int, size: int, *, timeout_s: float
) -> None:
    """Make sure that all ranks hold the same lines of text. Collective.

    Args:
        store: A store that all ranks share.
        topic: What the lines are about; part of the keys and of errors.
        lines: What this rank holds, one fact a line.
        rank: This rank, from 0.
        size: Number of ranks.
        timeout_s: Seconds to wait for the others.

    Raises:
        DivergenceError: On every rank, naming a rank that differs and the first line that does.
        PeerTimeoutError: Ranks did not arrive; names them.
    """
    prefix = _next_round(store, topic, rank)
    text = "\n".join(lines)
    if rank == 0:
        store.set(f"{prefix}/lines", text)
    _wait_for(store, f"{prefix}/lines", prefix, topic, size, timeout_s)
    reference = store.get(f"{prefix}/lines").decode()
    if text != reference and store.add(f"{prefix}/differing", 1) == 1:
        store.set(f"{prefix}/difference", _first_difference(rank, reference, text))
    _finish(store, prefix, size)
    _wait_for(store, f"{prefix}/all", prefix, topic, size, timeout_s)
    if store.add(f"{prefix}/differing", 0):
        store.wait([f"{prefix}/difference"], timedelta(seconds=timeout_s))
        raise DivergenceError(
            topic,
            found=store.get(f"{prefix}/difference").decode(),
            why="All ranks must ask for the same, in the same order, or they wait for each other.",
            fix="Compute it from the same configuration on every rank.",
        )


def fail_together(
    store: dist.Store | None,
    topic: str,
    error: PcommError | None,
    rank: int,
    size: int,
    *,
    timeout_s: float,
) -> None:
    """Raise on every rank if any rank has an error, and return on every rank if none has.

    Collective: each rank calls it with what its own check found. A rank with an error raises
    that; the others raise a `PeerError` that repeats the first one.

    Raises:
        PcommError: This rank's own `error`.
        PeerError: Another rank's.
        PeerTimeoutError: Ranks did not arrive; names them.
    """
    if store is not None and size > 1:
        prefix = _next_round(store, topic, rank)
        if error is not None and store.add(f"{prefix}/failed", 1) == 1:
            store.set(f"{prefix}/error", f"rank {rank}: {type(error).__name__}: {error}")
        _finish(store, prefix, size)
        _wait_for(store, f"{prefix}/all", prefix, topic, size, timeout_s)
        if error is None and store.add(f"{prefix}/failed", 0):
            store.wait([f"{prefix}/error"], timedelta(seconds=timeout_s))
            raise PeerError(
                topic,
                found=f"an error on {store.get(f'{prefix}/error').decode()}",
                why=f"Rank {rank} is fine, but cannot go on without its peers.",
                fix="Repair what that rank reports; nothing has been started or written here.",
            )
    if error is not None:
        raise error


def _next_round(store: dist.Store, topic: str, rank: int) -> str:
    """Keys for this call, where this rank signs in.

    Every rank counts its own calls in the store, so no state is kept in the process.
    """
    prefix = f"pcomm/{topic}/{store.add(f'pcomm/{topic}/calls/{rank}', 1)}"
    store.set(f"{prefix}/arrived/{rank}", "")
    return prefix


def _finish(store: dist.Store, prefix: str, size: int) -> None:
    if store.add(f"{prefix}/finished", 1) == size:
        store.set(f"{prefix}/all", "")


def _wait_for(
    store: dist.Store, key: str, prefix: str, topic: str, size: int, timeout_s: float
) -> None:
    try:
        store.wait([key], timedelta(seconds=timeout_s))
    except (RuntimeError, dist.DistStoreError) as problem:
        missing = [r for r in range(size) if not store.check([f"{prefix}/arrived/{r}"])]
        raise PeerTimeoutError(
            topic,
            found=f"ranks {missing[:16]} of {size} did not arrive within {timeout_s:g} s",
            why="Every rank takes part before any communicator is created.",
            fix="Look for an earlier error on those ranks; raise PCOMM_TIMEOUT_S if they are slow.",
        ) from problem


def _first_difference(rank: int, reference: str, text: str) -> str:
    pairs = itertools.zip_longest(reference.split("\n"), text.split("\n"), fillvalue="(nothing)")
    for number, (theirs, mine) in enumerate(pairs, 1):
        if theirs != mine:
            return f"line {number}: rank 0 has {theirs!r}, rank {rank} has {mine!r}"
    raise AssertionError("texts that differ have a line that differs")
