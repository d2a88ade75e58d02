"""The operations that the ranks of a group issue, compared through the store.

Each rank keeps the operations of a round of `every` as lines of text. At the end of a round, and
when it closes, it puts a rolling hash of them in torch's store and waits there for the others'. A
rank whose operation does not end puts its lines there too, and looks at those of the others until
it knows why. Lines in the store never change, so a rank that is blamed by them has issued them.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from pcomm.core.control.control import Control
from pcomm.core.errors import DivergenceError, PcommError, PeerTimeoutError
from pcomm.core.trace.divergence import Divergence, first_divergence

__all__ = ["Ledger"]

_END = "(nothing more: it has closed)"
_POLL_S = 0.02


class Ledger:
    """The operations of one group on this rank, and the comparison with the other ranks.

    Making one is collective: the ranks agree on where the lines are kept.

    Args:
        control: Control of the ranks of the group.
        name: Name of the group, for errors.
        every: Number of operations in a round.
        patience_s: Seconds after which an operation that has not ended is looked into.
        timeout_s: Seconds from then on until a rank that was not heard of is an error.
    """

    def __init__(
        self, control: Control, name: str, *, every: int, patience_s: float, timeout_s: float
    ) -> None:
        assert control.store is not None
        self._control, self._store, self._every = control, control.store, every
        self._patience_s, self._timeout_s = patience_s, timeout_s
        self._name, self._ranks, self._rank = name, control.ranks, control.rank
        self._prefix = control.agree(f"ledger of {name}", timeout_s=timeout_s)
        # Not of this group alone: an absent rank may be in an operation of another group.
        self._places = f"pcomm/{control.generation}/ledger at"
        self._round = 0
        self._lines: list[str] = []
        self._hash = hashlib.blake2b(digest_size=16)
        self.has_failed = False
        """Whether it has raised; it compares nothing after that."""
        self._is_closed = False

    def enter(self, line: str) -> None:
        """Note an operation that is about to be issued; compare if a round is full with it.

        Raises:
            DivergenceError: The ranks do not issue the same.
            PeerTimeoutError: A rank did not come to the comparison.
        """
        self._note(line)
        if len(self._lines) == self._every:
            self._compare()
            self._round += 1
            self._lines = []

    def wait(self, ended: threading.Event) -> None:
        """Wait until the operation entered last has ended; see `enter` for errors."""
        if not ended.wait(self._patience_s):
            self._investigate(lambda: ended.wait(_POLL_S))

    def explain(self, problem: Exception) -> None:
        """Say why the operation entered last has failed, if what the ranks wrote down tells it.

        A rank that has found a divergence closes its groups, which breaks the operations that its
        peers are in.

        Raises:
            DivergenceError: The ranks do not issue the same.
            PeerTimeoutError: A rank has not issued that operation.
        """
        if self._store.check([self._verdict_key]):
            self._fail(self._store.get(self._verdict_key).decode(), problem)
        self._store.set(self._key("lines", self._rank), "\n".join(self._lines))
        known = self._known()
        if difference := first_divergence(known):
            self._decide("divergence", self._describe(difference), problem)
        elif any(len(known.get(rank, ())) < len(self._lines) for rank in self._ranks):
            self._decide("late", self._absent(known), problem)

    def close(self) -> None:
        """Compare what is left; nothing after an error, and nothing a second time. Collective."""
        if self.has_failed or self._is_closed:
            return
        self._is_closed = True
        self._note(_END)
        self._compare()
        self._leave()

    def _note(self, line: str) -> None:
        self._lines.append(line)
        self._hash.update(line.encode() + b"\n")

    def _compare(self) -> None:
        self._store.set(self._key("lines", self._rank), "\n".join(self._lines))
        self._store.set(self._key("hash", self._rank), self._hash.hexdigest())
        hashes = [self._key("hash", rank) for rank in self._ranks]
        with suppress(RuntimeError):
            self._store.wait(hashes, timedelta(seconds=self._patience_s))
        self._investigate(lambda: self._store.check(hashes))
        if len({self._store.get(key) for key in hashes}) > 1:
            self._investigate(lambda: False)
        # Every rank that is here has read the round before.
        if self._round:
            for kind in ("lines", "hash"):
                self._store.delete_key(self._key(kind, self._rank, self._round - 1))

    def _leave(self) -> None:
        """Delete the keys of the last round, on the last rank that leaves."""
        left = f"{self._prefix}/left"
        if self._store.add(left, 1) == len(self._ranks):
            for rank in self._ranks:
                for kind in ("lines", "hash"):
                    self._store.delete_key(self._key(kind, rank))
            self._store.delete_key(left)

    def _investigate(self, is_over: Callable[[], bool]) -> None:
        """Look at what the other ranks say until `is_over`, or until there is a verdict."""
        if is_over():
            return
        here = f"{self._places}/{self._rank}"
        number = self._round * self._every + len(self._lines)
        last = self._lines[-1] if self._lines else "the last of a round that all ranks agree on"
        self._store.set(here, f"{self._name} operation {number}: {last}")
        self._store.set(self._key("lines", self._rank), "\n".join(self._lines))
        begin_s = time.monotonic()
        blamed_s: float | None = None
        while not is_over():
            self._control.check_fence()
            if self._store.check([self._verdict_key]):
                self._fail(self._store.get(self._verdict_key).decode())
            now_s = time.monotonic()
            known = self._known()
            difference = first_divergence(known)
            if difference is not None:
                blamed_s = now_s if blamed_s is None else blamed_s
                # With the lines of all ranks the majority is known; that is not waited for forever.
                is_clear = all(len(lines) > difference.index for lines in known.values())
                is_clear = is_clear and len(known) == len(self._ranks)
                if is_clear or now_s - blamed_s > self._patience_s:
                    self._decide("divergence", self._describe(difference))
            elif now_s - begin_s > self._timeout_s:
                self._decide("late", self._absent(known))
            time.sleep(_POLL_S)
        self._store.set(here, "")

    def _known(self) -> dict[int, list[str]]:
        known = {}
        for rank in self._ranks:
            key = self._key("lines", rank)
            if self._store.check([key]):
                text = self._store.get(key).decode()
                known[rank] = text.split("\n") if text else []
        return known

    def _decide(self, kind: str, found: str, cause: Exception | None = None) -> None:
        """Raise what the first rank to decide has found, the same on all ranks."""
        verdict = json.dumps([kind, found])
        self._fail(self._store.compare_set(self._verdict_key, "", verdict).decode(), cause)

    def _fail(self, verdict: str, cause: Exception | None = None) -> None:
        self.has_failed = True
        kind, found = json.loads(verdict)
        error: PcommError
        if kind == "divergence":
            error = DivergenceError(
                f"ledger of {self._name}",
                found=found,
                why="All ranks of a group issue the same operations in the same order, or wait "
                "for each other.",
                fix="Look at that rank for a condition that depends on its rank or its data.",
            )
        else:
            error = PeerTimeoutError(
                f"ledger of {self._name}",
                found=found,
                why="An operation ends when all ranks have issued it.",
                fix="Look for an earlier error there; raise timeout_s if that rank is slow.",
            )
        raise error from cause

    def _describe(self, difference: Divergence) -> str:
        number = self._round * self._every + difference.index + 1
        return (
            f"operation {number} on rank {difference.rank} is {difference.line}, "
            f"on rank {difference.other_rank} {difference.other_line}"
        )

    def _absent(self, known: dict[int, list[str]]) -> str:
        there = max(len(lines) for lines in known.values())
        behind = [rank for rank in self._ranks if len(known.get(rank, ())) < there]
        told = []
        for rank in behind[:4]:
            key = f"{self._places}/{rank}"
            place = self._store.get(key).decode() if self._store.check([key]) else ""
            told.append(f"rank {rank} {f'stands at {place}' if place else 'was not heard of'}")
        number = self._round * self._every + there
        missing = f"ranks {behind[:16]} did not issue operation {number}"
        if not behind:
            missing = f"operation {number} was issued by all ranks and does not end"
        return f"{missing} within {self._timeout_s:g} s" + "".join(f"; {text}" for text in told)

    @property
    def _verdict_key(self) -> str:
        return f"{self._prefix}/verdict"

    def _key(self, kind: str, rank: int, round_: int | None = None) -> str:
        return f"{self._prefix}/{self._round if round_ is None else round_}/{kind}/{rank}"
