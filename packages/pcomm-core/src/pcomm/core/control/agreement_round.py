"""One round of agreement over the store, and a step that all ranks do or none.

A round is a call that all ranks of a control make. Rounds about one topic are numbered in the
store, not by each rank, so ranks with different histories are at the same number. A round ends
with one outcome for all: it is complete, or a rank timed out and named those that were missing.
Only after that its number is over. A rank that was missing is then at the next number, where it
joins the others when they call again.

For each topic the store holds

- `now`: the number of the round under way;
- `at/RANK`: the number of the last round of a rank, with a mark once it is through;
- `said/RANK`: the text of a rank in its last vote;
- `NUMBER/...`: the messages of a round, and its outcome; deleted when a later one completes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar, cast

import torch.distributed as dist

from pcomm.core.errors import FencedError, PeerTimeoutError

__all__ = ["AgreementRound", "Missed", "all_or_none"]


_FIRST = 1
_THROUGH = " through"
_MESSAGES = ("lines", "error", "difference", "through", "outcome")
# The pause between two polls doubles up to a limit, which grows with the number of ranks: all of
# them together must not keep the store busy with polls.
_PAUSE_S, _LONGEST_PAUSE_S, _PAUSE_FOR_EACH_RANK_S = 0.0002, 0.02, 4e-5


class AgreementRound:
    """This rank's part in the round about a topic that is under way now.

    Args:
        store: Store that all ranks share.
        prefix: Prefix of the keys of this topic; the same for all ranks that take part, and
            theirs alone.
        topic: Subject of the round, for errors.
        rank: Rank of this process, one of `ranks`.
        ranks: Ranks that take part, ascending.
        timeout_s: Seconds to wait for the others.
        check_fence: Function that raises where this rank may not take part any more; called while
            waiting.
    """

    def __init__(
        self,
        store: dist.Store,
        prefix: str,
        topic: str,
        rank: int,
        ranks: Sequence[int],
        *,
        timeout_s: float,
        check_fence: Callable[[], None],
    ) -> None:
        self._store, self._prefix, self._topic = store, prefix, topic
        self._rank, self._ranks, self._timeout_s = rank, ranks, timeout_s
        self._check_fence, self._gathers = check_fence, False
        check_fence()
        self._end_s = time.monotonic() + timeout_s
        self._number = self._under_way()
        self._arrive()

    @property
    def name(self) -> str:
        """A name that is the same on all ranks of this round, and of no other one."""
        return f"{self._prefix}/{self._number}"

    # -- messages --------------------------------------------------------------------

    def say(self, name: str, text: str) -> None:
        """Write `text` under a name that only this rank writes."""
        self._store.set(self._key(name), text)

    def say_first(self, name: str, text: str) -> None:
        """Write `text` unless a rank has written under that name in this round."""
        self._store.compare_set(self._key(name), "", text)

    def hear(self, name: str) -> str:
        """Wait for the text that a rank writes under a name, and return it.

        Raises:
            Missed: The round timed out before this rank came.
            PeerTimeoutError: A rank did not come; names all that did not.
        """
        pause_s = _PAUSE_S
        longest_s = _LONGEST_PAUSE_S + _PAUSE_FOR_EACH_RANK_S * len(self._ranks)
        while not self._store.check([self._key(name)]):
            try:
                self._check_fence()
            except FencedError:
                # A rank that has heard it may have begun the next generation in between.
                if self._store.check([self._key(name)]):
                    break
                raise
            if self._is_decided():
                self._raise_if_late()
            if time.monotonic() > self._end_s:
                self._give_up()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)
        return self._store.get(self._key(name)).decode()

    def say_to_all(self, text: str) -> None:
        """Write `text` for `texts`, in a key that the next round writes again."""
        self._store.set(self._said(self._rank), text)
        self._gathers = True

    def texts(self) -> list[str]:
        """What each rank gave to `say_to_all`, in the order of the ranks; after `finish`."""
        texts: list[str] = json.loads(self._store.get(self._key("outcome")))["texts"]
        return texts

    # -- how it ends ---------------------------------------------------------------------

    def finish(self) -> dict[str, str]:
        """Wait until every rank is through; returns the problems by kind. Raises like `hear`."""
        mine = f"at/{self._rank}"
        through = f"{self._number}{_THROUGH}"
        # Counted once, also for a process that was interrupted here and calls again.
        if self._store.get(f"{self._prefix}/{mine}").decode() != through:
            self._store.set(f"{self._prefix}/{mine}", through)
            if self._store.add(self._key("through"), 1) == len(self._ranks):
                self._complete()
        self.hear("outcome")
        self._raise_if_late()
        problems: dict[str, str] = json.loads(self._store.get(self._key("outcome")))["problems"]
        return problems

    def _complete(self) -> None:
        said = {kind: self._key(kind) for kind in ("error", "difference")}
        problems = {
            kind: self._store.get(key).decode()
            for kind, key in said.items()
            if self._store.check([key])
        }
        # Before the outcome, since each rank writes its text anew in the next round.
        texts = [self._store.get(self._said(r)).decode() for r in self._ranks if self._gathers]
        outcome = json.dumps({"problems": problems, "texts": texts})
        if self._store.compare_set(self._key("outcome"), "", outcome).decode() == outcome:
            # All ranks are here, so none of them reads an earlier round any more.
            earlier = self._number - 1
            while self._store.check([self._key("outcome", earlier)]):
                for name in _MESSAGES:
                    self._store.delete_key(self._key(name, earlier))
                earlier -= 1

    def _give_up(self) -> None:
        there = {str(self._number), f"{self._number}{_THROUGH}"}
        missing = [r for r in self._ranks if self._place(r) not in there]
        found = f"ranks {missing[:16]} of {len(self._ranks)} did not arrive within "
        found += f"{self._timeout_s:g} s"
        before = self._key("outcome", self._number - 1)
        if self._store.check([before]):
            told = json.loads(self._store.get(before)).get("found", "")
            found += f"; of the call before, {told.partition(';')[0]}" if told else ""
        # Written once, by the rank that times out or the last one to finish: no rank goes on alone.
        outcome = json.dumps({"missing": missing, "found": found})
        self._store.compare_set(self._key("outcome"), "", outcome)
        self._raise_if_late()

    def _raise_if_late(self) -> None:
        outcome = json.loads(self._store.get(self._key("outcome")))
        if "missing" not in outcome:
            return
        if self._rank in outcome["missing"]:
            raise Missed
        raise PeerTimeoutError(
            self._topic,
            found=outcome["found"],
            why="Every rank takes part before anything is created, and they all stop together.",
            fix="Look for an earlier error on those ranks; raise PCOMM_TIMEOUT_S if they are slow.",
        )

    # -- numbers -------------------------------------------------------------------------

    def _under_way(self) -> int:
        now = f"{self._prefix}/now"
        number = int(self._store.compare_set(now, "", str(_FIRST)))
        while self._store.check([self._key("outcome", number)]):
            # The next number begins, unless a rank has had it begin already.
            number = int(self._store.compare_set(now, str(number), str(number + 1)))
        return number

    def _arrive(self) -> None:
        if self._place(self._rank) != f"{self._number}{_THROUGH}":
            self._store.set(f"{self._prefix}/at/{self._rank}", str(self._number))

    def _place(self, rank: int) -> str:
        key = f"{self._prefix}/at/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _is_decided(self) -> bool:
        return self._store.check([self._key("outcome")])

    def _said(self, rank: int) -> str:
        return f"{self._prefix}/said/{rank}"

    def _key(self, name: str, number: int | None = None) -> str:
        return f"{self._prefix}/{self._number if number is None else number}/{name}"


class Missed(Exception):
    """The round timed out between the read of its number and this rank's arrival."""


T = TypeVar("T")
R = TypeVar("R")


def all_or_none(
    do: Callable[[], T],
    agree: Callable[[T | None, Exception | None], R],
    undo: Callable[[Exception | None], Iterable[Exception]],
) -> tuple[T, R]:
    """Do something on every rank, or undo it on every rank. Collective, as `agree` is.

    A step that fails on one rank fails on all: the ranks agree after it, and where that raises,
    also because a rank did not arrive, each rank undoes its own part before the error leaves.
    Several steps are several calls; each one undoes what those before it have done, too.

    Args:
        do: Part of this rank; local, or collective where its failure cannot leave others waiting.
        agree: Agreement of the ranks, called with what `do` returned and with its error; raises on
            every rank if any rank has an error. One of the two arguments is None.
        undo: Undoes the part of this rank, called with the error of `do` or None; it may be half
            done. Returns errors, which become notes of the one that is raised.

    Returns:
        What `do` returned, and what `agree` returned.
    """
    result: T | None = None
    failure: Exception | None = None
    try:
        try:
            result = do()
        except Exception as problem:
            failure = problem
        return cast(T, result), agree(result, failure)
    except BaseException as problem:
        for error in undo(failure):
            problem.add_note(str(error))
        raise
    finally:
        # The error refers to this frame; without this only a collection of cycles frees both.
        failure = None
