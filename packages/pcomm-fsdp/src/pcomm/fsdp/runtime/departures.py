"""Steps that no schedule foresaw: all ranks take them, or none does."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed import Store

from pcomm.core.control.default import control_of_group
from pcomm.core.errors import PeerError
from pcomm.core.groups.group import Group
from pcomm.core.process import environment
from pcomm.fsdp.guards import running_model_errors
from pcomm.fsdp.runtime.wait import POLL_PERIOD_S

__all__ = ["Departures"]

_KEYS = ("first", "count", "difference", "end")


class Departures:
    """Agreements through torch's store before anything is done that was not foreseen.

    A rank that departs says at which mark, and waits until all others have departed there too. A
    rank that does not depart learns of it while it waits for a collective that the first one never
    joins, since it polls for departures then. So all of them go on, or all of them have an error.

    Making one is collective: the ranks of each group agree on where they meet.

    Args:
        groups: Groups of the ranks that have to agree, in the same order on all ranks.
        raise_if_failed: Raises if another rank has failed; called while this one waits.
    """

    def __init__(self, groups: Sequence[Group], raise_if_failed: Callable[[], object]) -> None:
        self._meetings = [_Meeting(group) for group in groups if group.size > 1]
        self._raise_if_failed = raise_if_failed
        self._number, self._round = 0, 0

    def agree(self, place: int, text: str) -> None:
        """Go on once all ranks are at the same place with the same text. Collective.

        Args:
            place: Number of marks before.
            text: The mark that this rank is about to do, or the marks that it has done.

        Raises:
            DivergenceError: A rank says something else, or does not depart.
            PeerError: A rank has failed.
            PeerTimeoutError: A rank did not come.
        """
        name = f"{self._round}/{self._number}"
        for meeting in self._meetings:
            meeting.hold(name, place, text, self._raise_if_failed)
        self._number += 1

    def check(self, place: int) -> None:
        """Raise if a rank has departed from what this one has done since. Local.

        Args:
            place: Number of marks that this rank has done, or is doing, as was foreseen.

        Raises:
            DivergenceError: One has; it gets the same error.
        """
        for meeting in self._meetings:
            meeting.check(f"{self._round}/{self._number}", place)

    def begin_again(self, round_number: int) -> None:
        """Forget what ranks said before they recovered from an error. Local, on all ranks."""
        self._round, self._number = round_number, 0

    def close(self) -> None:
        """Let go of the store. Local."""
        self._meetings.clear()


class _Meeting:
    """The agreements of one group. A meeting's keys are deleted when the next one is complete."""

    def __init__(self, group: Group) -> None:
        control = control_of_group(group)
        self._rank, self._size = control.rank, group.size
        assert control.store is not None
        self._store: Store = control.store
        self._prefix = control.agree(f"fsdp departures: group {group.key}")
        self._last = ""

    def hold(self, name: str, place: int, text: str, raise_if_failed: Callable[[], object]) -> None:
        key, mine = f"{self._prefix}/{name}", f"{place}\n{text}"
        said = self._store.compare_set(f"{key}/first", "", f"{self._rank}\n{mine}").decode()
        first, theirs = said.split("\n", 1)
        if theirs != mine:
            self._differ(key, int(first), theirs, mine)
        elif self._store.add(f"{key}/count", 1) == self._size:
            if self._last:
                for one in _KEYS:
                    self._store.delete_key(f"{self._last}/{one}")
            self._store.set(f"{key}/end", "")
        limit_s = environment.timeout_s()
        end_s = time.monotonic() + limit_s
        while not _is_there(self._store, f"{key}/end"):
            try:
                raise_if_failed()
            except PeerError:
                # It may have failed after it was here, and others may have failed just there.
                if not self._store.check([f"{key}/end"]):
                    raise
            if time.monotonic() > end_s:
                raise running_model_errors.late_rank(text.splitlines()[0], limit_s)
        if self._store.check([f"{key}/difference"]):
            raise running_model_errors.different_schedules(
                self._store.get(f"{key}/difference").decode()
            )
        self._last = key

    def check(self, name: str, place: int) -> None:
        key = f"{self._prefix}/{name}"
        if not self._store.check([f"{key}/first"]):
            return
        first, there, text = self._store.get(f"{key}/first").decode().split("\n", 2)
        if int(there) <= place:
            mine = f"{place}\nwhat the schedule has"
            self._differ(key, int(first), f"{there}\n{text}", mine)
            raise running_model_errors.different_schedules(
                self._store.get(f"{key}/difference").decode()
            )

    def _differ(self, key: str, first: int, theirs: str, mine: str) -> None:
        """Tell all ranks how the first one and this one differ."""
        pairs = sorted([(first, theirs), (self._rank, mine)])
        lines = [(rank, text.split("\n")[1:]) for rank, text in pairs]
        length = max(len(text) for _, text in lines)
        padded = [[*text, *["nothing"] * (length - len(text))] for _, text in lines]
        at = next((i for i, (a, b) in enumerate(zip(*padded, strict=True)) if a != b), 0)
        words = "; ".join(
            f"rank {rank} has {text[at]}" for (rank, _), text in zip(lines, padded, strict=True)
        )
        self._store.compare_set(f"{key}/difference", "", words)
        self._store.set(f"{key}/end", "")


def _is_there(store: Store, key: str) -> bool:
    """True if a key is there, or comes within the polling period."""
    try:
        store.wait([key], timedelta(seconds=POLL_PERIOD_S))
    except RuntimeError:
        return bool(store.check([key]))
    return True
