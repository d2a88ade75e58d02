"""One call that all ranks of a control make: where its keys are, and how it ends.

Meetings about one topic are numbered in the store, not by each rank, so ranks with different
pasts are at the same number. A meeting ends with one outcome for all: it is complete, or a rank
gave up on it and named those that were missing. Only after that its number is over. A rank that
was missing is then at the next number, where it meets the others when they call again.

For each topic the store holds

- `now`: the number that is under way;
- `at/RANK`: the number at which a rank was last, with a mark once it is through;
- `NUMBER/...`: what was said in a meeting, and its outcome; deleted when a later one completes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from pcomm.core.errors import PeerTimeoutError

__all__ = ["Meeting", "Missed"]

_FIRST = 1
_THROUGH = " through"
_SAID = ("lines", "error", "difference", "through", "outcome")
# The pause between two looks doubles up to a limit, which grows with the number of ranks: all of
# them together must not keep the store busy with looks.
_PAUSE_S, _LONGEST_PAUSE_S, _PAUSE_FOR_EACH_RANK_S = 0.0002, 0.02, 4e-5


class Meeting:
    """This rank's part in the meeting about a topic that is under way now.

    Args:
        store: Shared by all ranks.
        prefix: Of the keys of this topic; the same for all ranks that meet, and theirs alone.
        topic: For errors.
        rank: This rank, one of `ranks`.
        ranks: Who meets, ascending.
        timeout_s: Seconds to wait for the others.
        check_fence: Raises where this rank may not take part any more; called while waiting.
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
        self._check_fence = check_fence
        check_fence()
        self._end_s = time.monotonic() + timeout_s
        self._number = self._under_way()
        self._arrive()

    @property
    def name(self) -> str:
        """The same on all ranks of this meeting, and of no other one."""
        return f"{self._prefix}/{self._number}"

    # -- what is said --------------------------------------------------------------------

    def say(self, name: str, text: str) -> None:
        """Write `text` under a name that only this rank writes."""
        self._store.set(self._key(name), text)

    def say_first(self, name: str, text: str) -> None:
        """Write `text` unless a rank has written under that name in this meeting."""
        self._store.compare_set(self._key(name), "", text)

    def hear(self, name: str) -> str:
        """What a rank says under a name, waiting for it.

        Raises:
            Missed: The meeting was given up on before this rank came.
            PeerTimeoutError: A rank did not come; names all that did not.
        """
        pause_s = _PAUSE_S
        longest_s = _LONGEST_PAUSE_S + _PAUSE_FOR_EACH_RANK_S * len(self._ranks)
        while not self._store.check([self._key(name)]):
            self._check_fence()
            if self._is_decided():
                self._raise_if_late()
            if time.monotonic() > self._end_s:
                self._give_up()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)
        return self._store.get(self._key(name)).decode()

    # -- how it ends ---------------------------------------------------------------------

    def finish(self) -> dict[str, str]:
        """Wait until every rank is through; returns what went wrong, by kind. See `hear`."""
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
        outcome = json.dumps({"problems": problems})
        if self._store.compare_set(self._key("outcome"), "", outcome).decode() == outcome:
            # All ranks are here, so none of them reads an earlier meeting any more.
            earlier = self._number - 1
            while self._store.check([self._key("outcome", earlier)]):
                for name in _SAID:
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
        # Written by whoever is first, the rank that gives up or the last one to finish, so that
        # no rank goes on alone.
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

    def _key(self, name: str, number: int | None = None) -> str:
        return f"{self._prefix}/{self._number if number is None else number}/{name}"


class Missed(Exception):
    """The meeting was given up on between the look at its number and this rank's arrival."""
