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

from pcomm.core.errors import DivergenceError, PeerError, PeerTimeoutError

__all__ = ["agree_on_lines", "fail_together"]

_COMPLETE = "complete"


def agree_on_lines(
    store: dist.Store,
    topic: str,
    lines: Sequence[str],
    rank: int,
    ranks: Sequence[int],
    *,
    timeout_s: float,
) -> str:
    """Make sure that all ranks hold the same lines of text. Collective.

    Args:
        store: A store that all ranks share.
        topic: What the lines are about; part of the keys and of errors.
        lines: What this rank holds, one fact a line.
        rank: This rank, one of `ranks`.
        ranks: Who takes part, ascending, the same on every rank.
        timeout_s: Seconds to wait for the others.

    Returns:
        A name for what was agreed on: the same on all ranks, and new with each call.

    Raises:
        DivergenceError: On every rank, naming a rank that differs and the first line that does.
        PeerTimeoutError: Ranks did not arrive; names them. Either every rank that calls gets it,
            a late one included, or none.
    """
    meeting = _Meeting(store, topic, rank, ranks, timeout_s)
    text = "\n".join(lines)
    if rank == ranks[0]:
        store.set(meeting.key("lines"), text)
    meeting.wait_for("lines")
    reference = store.get(meeting.key("lines")).decode()
    if text != reference and store.add(meeting.key("differing"), 1) == 1:
        difference = _first_difference(ranks[0], reference, rank, text)
        store.set(meeting.key("difference"), difference)
    meeting.finish()
    if store.add(meeting.key("differing"), 0):
        meeting.wait_for("difference")
        raise DivergenceError(
            topic,
            found=store.get(meeting.key("difference")).decode(),
            why="All ranks must ask for the same, in the same order, or they wait for each other.",
            fix="Compute it from the same configuration on every rank.",
        )
    return meeting.prefix


def fail_together(
    store: dist.Store | None,
    topic: str,
    error: Exception | None,
    rank: int,
    ranks: Sequence[int],
    *,
    timeout_s: float,
) -> None:
    """Raise on every rank if any rank has an error, and return on every rank if none has.

    Collective: each rank calls it with what its own check found. A rank with an error raises
    that; the others raise a `PeerError` that repeats the first one.

    Args:
        store: A store that all ranks share; None when alone.
        topic: What was checked; part of the keys and of errors.
        error: What this rank found, or None.
        rank: This rank, one of `ranks`.
        ranks: Who takes part, ascending, the same on every rank.
        timeout_s: Seconds to wait for the others.

    Raises:
        Exception: This rank's own `error`.
        PeerError: Another rank's.
        PeerTimeoutError: Ranks did not arrive; names them.
    """
    if store is not None and len(ranks) > 1:
        meeting = _Meeting(store, topic, rank, ranks, timeout_s)
        if error is not None and store.add(meeting.key("failed"), 1) == 1:
            store.set(meeting.key("error"), f"rank {rank}: {type(error).__name__}: {error}")
        try:
            meeting.finish()
        except PeerTimeoutError as late:
            # What went wrong here is the better explanation of the two.
            raise error or late from None
        if error is None and store.add(meeting.key("failed"), 0):
            meeting.wait_for("error")
            raise PeerError(
                topic,
                found=f"an error on {store.get(meeting.key('error')).decode()}",
                why=f"Rank {rank} is fine, but cannot go on without its peers.",
                fix="Repair what that rank reports; nothing has been started or written here.",
            )
    if error is not None:
        raise error


class _Meeting:
    """One call that all `ranks` make: where its keys are, and how it ends.

    Every rank counts its own calls in the store, so no state is kept in the process. The first
    rank is part of the keys because groups of ranks that have none in common share the store.
    """

    def __init__(
        self, store: dist.Store, topic: str, rank: int, ranks: Sequence[int], timeout_s: float
    ) -> None:
        self._store, self._topic, self._ranks, self._timeout_s = store, topic, ranks, timeout_s
        calls = f"pcomm/{topic}/{ranks[0]}"
        self.prefix = f"{calls}/{store.add(f'{calls}/calls/{rank}', 1)}"
        store.set(self.key(f"arrived/{rank}"), "")

    def key(self, name: str) -> str:
        """Where `name` is kept for this call."""
        return f"{self.prefix}/{name}"

    def finish(self) -> None:
        """Wait until every rank has called it."""
        if self._store.add(self.key("finished"), 1) == len(self._ranks):
            self._store.compare_set(self.key("outcome"), "", _COMPLETE)
        self.wait_for("outcome")
        outcome = self._store.get(self.key("outcome")).decode()
        if outcome != _COMPLETE:
            raise self._late(outcome)

    def wait_for(self, name: str) -> None:
        """Wait until a rank has written `name`, or give up on behalf of all."""
        try:
            self._store.wait([self.key(name)], timedelta(seconds=self._timeout_s))
        except RuntimeError as problem:
            missing = [r for r in self._ranks if not self._store.check([self.key(f"arrived/{r}")])]
            found = f"ranks {missing[:16]} of {len(self._ranks)} did not arrive within "
            # Written by whoever is first, the rank that gives up or the last one to finish, so
            # that nobody goes on alone.
            outcome = self._store.compare_set(
                self.key("outcome"), "", f"{found}{self._timeout_s:g} s"
            ).decode()
            if outcome != _COMPLETE:
                raise self._late(outcome) from problem

    def _late(self, outcome: str) -> PeerTimeoutError:
        return PeerTimeoutError(
            self._topic,
            found=outcome,
            why="Every rank takes part before anything is created, and they all stop together.",
            fix="Look for an earlier error on those ranks; raise PCOMM_TIMEOUT_S if they are slow.",
        )


def _first_difference(reference_rank: int, reference: str, rank: int, text: str) -> str:
    pairs = itertools.zip_longest(reference.split("\n"), text.split("\n"), fillvalue="(nothing)")
    for number, (theirs, mine) in enumerate(pairs, 1):
        if theirs != mine:
            reference_has = f"rank {reference_rank} has {theirs!r}"
            return f"line {number}: {reference_has}, rank {rank} has {mine!r}"
    raise AssertionError("texts that differ have a line that differs")
