"""What ranks tell each other: agreements, failures, waits that see them, steps not foreseen."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NoReturn

from torch import Tensor
from torch.distributed import Store

from pcomm.core import environment
from pcomm.core.collectives.protocol import Pending
from pcomm.core.control.agreement import FailureFlag, agree_in_group
from pcomm.core.control.without_control import control_of_group
from pcomm.core.errors import DivergenceError, PcommError, PeerError, PeerTimeoutError
from pcomm.core.groups.group import Group

__all__ = ["FailureAwareWait", "Peers", "ScheduleAgreement"]


class Peers:
    """Every group of a model once, so that a mistake on one rank is an error on all of them.

    Args:
        groups: Groups of all roles and scopes; of those over the same ranks the first one counts.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        distinct: dict[tuple[int, ...], Group] = {}
        for group in groups:
            distinct.setdefault(group.ranks, group)
        # Largest first: the first agreement tells most ranks, and all ranks agree on the order.
        self.groups = sorted(
            (group for group in distinct.values() if group.size > 1),
            key=lambda group: (-group.size, group.name),
        )
        self._flags: list[FailureFlag] = []

    def tell_failure(self, message: str, *, round_number: int) -> None:
        """Tell every rank that waits in this round that this one has failed. Local."""
        for flag in self._flags:
            flag.sound(message, round_number=round_number)

    def failure(self, *, round_number: int) -> str | None:
        """Message of a rank that has failed in this round; None if none has. Local."""
        for flag in self._flags:
            message = flag.heard(round_number=round_number)
            if message is not None:
                return message
        return None

    def agree(
        self,
        topic: str,
        lines: Sequence[str] | Callable[[Group], Sequence[str]],
        *,
        error: Exception | None = None,
    ) -> None:
        """Raise on all ranks if any has an error or other lines. Collective over all groups.

        An error passes through every group that this rank belongs to, twice, so it reaches ranks
        that share no group with the one that has it.

        Args:
            topic: Name of the agreement, for errors.
            lines: Text that all ranks of a group must have in common, or a function of the group
                that returns it.
            error: The error that this rank has found; None if there is none.
        """
        if not self.groups and error is not None:
            raise error
        rounds = 2 if len(self.groups) > 1 else 1
        for number in range(rounds):
            for group in self.groups:
                mine = lines(group) if callable(lines) else lines
                try:
                    agree_in_group(group, topic, mine if number == 0 else [], error=error)
                except PcommError as problem:
                    error = error or problem
        if error is not None:
            raise error
        if not self._flags:
            # Ranks that agree hold the same groups, so they can make the flags together.
            self._flags = [FailureFlag(group, "fsdp") for group in self.groups]


POLL_PERIOD_S = 0.2
"""Seconds between two looks for a failed peer while a rank waits, for a collective as for an
agreement over the store. A look costs about 0.1 ms."""


class FailureAwareWait:
    """Completes collectives, and raises if a peer fails that one of them needs.

    Attributes:
        peer_failure: Function that returns the message of a rank that has failed; None while there
            is none.
    """

    def __init__(self) -> None:
        self.failure_or_departure: Callable[[], str | None] = lambda: None

    def __call__(self, pending: Pending, what: str) -> Tensor:
        """Block until a collective has ended, polling for a peer failure, and return its result.

        Where the host cannot see the end, as on a GPU, there is no polling: the stream waits.

        Args:
            pending: The collective.
            what: Description of the collective for an error, such as `"gather of blocks.0"`.

        Raises:
            PeerError: A peer failed or died, or did not join within the group's time limit.
        """
        is_done = threading.Event()
        if pending.on_done(is_done.set):
            while not is_done.wait(POLL_PERIOD_S):
                message = self.failure_or_departure()
                # The rank that failed may have joined this collective before.
                if message is not None and not is_done.wait(POLL_PERIOD_S):
                    raise _failed(what, f"an error on {message}")
        try:
            return pending.wait()
        except RuntimeError as problem:
            # A rank that failed may have closed its connections since, and has said why before.
            message = self.failure_or_departure()
            found = str(problem).split("\n")[0] if message is None else f"an error on {message}"
            raise _failed(what, found) from problem


def _failed(what: str, found: str) -> PeerError:
    """A collective will not end."""
    return PeerError(
        f"fsdp: {what}",
        found=found,
        why="A collective ends only if every rank of its group joins it.",
        fix="Repair what that rank reports; if it reports nothing, look for its first error.",
    )


_KEYS = ("first", "count", "difference", "end")


class ScheduleAgreement:
    """Agreements through torch's store before anything is done that was not foreseen.

    A rank that departs says at which event, and waits until all others have departed there too. A
    rank that does not depart learns of it while it waits for a collective that the first one never
    joins, since it polls for departures then. So all of them go on, or all of them have an error.

    Making one is collective: the ranks of each group agree on where they meet.

    Args:
        groups: Groups of the ranks that have to agree, in the same order on all ranks.
        raise_if_failed: Raises if another rank has failed; called while this one waits.
    """

    def __init__(self, groups: Sequence[Group], raise_if_failed: Callable[[], object]) -> None:
        self._groups = [_GroupAgreement(group) for group in groups if group.size > 1]
        self._raise_if_failed = raise_if_failed
        self._number, self._round = 0, 0

    def agree(self, place: int, text: str) -> None:
        """Go on once all ranks are at the same place with the same text. Collective.

        Args:
            place: Number of events before.
            text: The event that this rank is about to do, or the events that it has done.

        Raises:
            DivergenceError: A rank says something else, or does not depart.
            PeerError: A rank has failed.
            PeerTimeoutError: A rank did not come.
        """
        name = f"{self._round}/{self._number}"
        for group in self._groups:
            group.agree(name, place, text, self._raise_if_failed)
        self._number += 1

    def check(self, place: int) -> None:
        """Raise if a rank has departed from what this one has done since. Local.

        Args:
            place: Number of events that this rank has done, or is doing, as was foreseen.

        Raises:
            DivergenceError: One has; it gets the same error.
        """
        for group in self._groups:
            group.check(f"{self._round}/{self._number}", place)

    def begin_again(self, round_number: int) -> None:
        """Forget what ranks said before they recovered from an error. Local, on all ranks."""
        self._round, self._number = round_number, 0

    def close(self) -> None:
        """Let go of the store. Local."""
        self._groups.clear()


class _GroupAgreement:
    """The agreements of one group. Keys of one are deleted when the next one is complete.

    `Control.agree` would not do: all ranks enter that, and here a rank that still follows its
    schedule does not come, but has to see from where it waits that others have left theirs.
    """

    def __init__(self, group: Group) -> None:
        control = control_of_group(group)
        self._rank, self._size = control.rank, group.size
        assert control.store is not None
        self._store: Store = control.store
        self._prefix = control.agree(f"fsdp departures: group {group.key}")
        self._last = ""

    def agree(
        self, name: str, place: int, text: str, raise_if_failed: Callable[[], object]
    ) -> None:
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
                raise PeerTimeoutError(
                    f"fsdp: {text.splitlines()[0]}",
                    found=f"not all ranks came to the same place within {limit_s:g} s",
                    why="This was not foreseen in the schedule, so all ranks have to do it or "
                    "none.",
                    fix="Look for an earlier error on the other ranks; raise PCOMM_TIMEOUT_S if "
                    "they are slow.",
                )
        if self._store.check([f"{key}/difference"]):
            self._raise_difference(key)
        self._last = key

    def check(self, name: str, place: int) -> None:
        key = f"{self._prefix}/{name}"
        if not self._store.check([f"{key}/first"]):
            return
        first, there, text = self._store.get(f"{key}/first").decode().split("\n", 2)
        if int(there) <= place:
            mine = f"{place}\nwhat the schedule has"
            self._differ(key, int(first), f"{there}\n{text}", mine)
            self._raise_difference(key)

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

    def _raise_difference(self, key: str) -> NoReturn:
        raise DivergenceError(
            "fsdp: what units do",
            found=self._store.get(f"{key}/difference").decode(),
            why="Gathers and reduces are issued in the order in which units run, which has to be "
            "that of all ranks.",
            fix="Use units in the same order on all ranks: draw what varies, such as layers that "
            "are dropped, from the same random numbers; or make one unit of it.",
        )


def _is_there(store: Store, key: str) -> bool:
    """True if a key is there, or comes within the polling period."""
    try:
        store.wait([key], timedelta(seconds=POLL_PERIOD_S))
    except RuntimeError:
        return bool(store.check([key]))
    return True
