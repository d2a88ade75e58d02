"""The control plane as an object: ranks that agree through a store, in one generation.

Nothing here needs a communicator or a default process group: a store that all ranks share is
enough, and a wait has a time limit. A mistake on one rank becomes an error on every rank instead
of a hang, and ranks that the others have left behind are told so.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from pcomm.core import environment
from pcomm.core.control.agreement_round import AgreementRound, Missed
from pcomm.core.errors import (
    DivergenceError,
    FencedError,
    PeerError,
    PeerTimeoutError,
    TopologyError,
)

__all__ = [
    "Control",
    "Vote",
    "format_ranks",
    "parse_ranks",
    "ranks_key",
]


_LONGEST_WORD = 40


@dataclass(frozen=True)
class Vote:
    """What the ranks of a control said in one round of `Control.vote`; equal on all of them.

    Args:
        minimum: Smallest value, so that what one rank cannot do none does.
        values: Value of each rank, in ascending order of the ranks.
        reasons: Text of each rank, in the same order; empty where a rank gave none.
    """

    minimum: int
    values: tuple[int, ...]
    reasons: tuple[str, ...]


class Control:
    """A set of ranks that agree through a store, in one generation.

    Functions that need agreement take one: `open_groups`, `agree_in_group`, `FailureFlag`. Making
    one is local. Keys in the store carry the generation, the whole set of ranks and the topic, and
    the rounds about a topic are counted in the store. So ranks agree whatever each of them did
    before, and other sets of ranks, other generations and other topics never interfere. In one
    process, calls about one topic follow each other; different threads may agree about different
    topics at once.

    A generation belongs to the store. Where parts of a job change their members independently,
    each part gets a `torch.distributed.PrefixStore` of its own.

    Attributes:
        store: Store that all ranks share; None for a single rank.
        ranks: Ranks that agree, ascending.
        rank: Rank of this process.
        generation: Number of changes of membership so far. The first control of a later one begins
            it for all; from then on calls of an older one raise `FencedError`.
        timeout_s: Seconds to wait for the others; None for `PCOMM_TIMEOUT_S` at each call.

    Raises:
        TopologyError: `rank` is not one of `ranks`, or they share no store.
        FencedError: A newer generation has begun, or this one is not of `rank`.
        DivergenceError: Generation `generation`, above 0, is known to be of other ranks.
    """

    def __init__(
        self,
        store: dist.Store | None,
        ranks: Sequence[int],
        rank: int,
        *,
        generation: int = 0,
        timeout_s: float | None = None,
    ) -> None:
        self.store, self.rank, self.ranks = store, rank, tuple(sorted(set(ranks)))
        self.generation, self.timeout_s = generation, timeout_s
        self._check()
        if store is not None and generation:
            _register(store, generation, self.ranks, rank)

    # -- other ranks --------------------------------------------------

    def among(self, ranks: Sequence[int]) -> Control:
        """The control of some of these ranks, such as those of a group; of this generation. Local.

        Raises:
            TopologyError: This rank is not one of them, or one of them is not in this control.
        """
        chosen = tuple(sorted(set(ranks)))
        if chosen == self.ranks:
            return self
        outside = sorted(set(chosen) - set(self.ranks))
        if outside:
            raise TopologyError(
                f"Control.among: ranks {format_ranks(chosen)}",
                found=f"a control of ranks {format_ranks(self.ranks)}, without "
                + format_ranks(outside),
                why="Ranks of another generation, or of none, may not take part.",
                fix="Leave them out, or begin a generation with them.",
            )
        part = copy.copy(self)
        part.ranks = chosen
        part._check()
        return part

    # -- agreement -----------------------------------------------------------------------

    @property
    def prefix(self) -> str:
        """Prefix of the keys of these ranks in this generation; the same on all of them."""
        return f"pcomm/{self.generation}/{ranks_key(self.ranks)}"

    def wait_s(self, timeout_s: float | None = None) -> float:
        """Seconds to wait: `timeout_s`, that of this control, or `PCOMM_TIMEOUT_S`."""
        for choice in (timeout_s, self.timeout_s):
            if choice is not None:
                return choice
        return environment.timeout_s()

    def check_fence(self) -> None:
        """Raise `FencedError` if a newer generation has begun. Local."""
        if self.store is not None:
            _fence(self.store, self.generation, self.rank)

    def agree(
        self,
        topic: str,
        lines: Sequence[str] | None = None,
        *,
        error: Exception | None = None,
        timeout_s: float | None = None,
    ) -> str:
        """Make sure that no rank has an error, and that all hold the same lines. Collective.

        Either every rank raises or none does. An error is told before a difference.

        Args:
            topic: Subject of the agreement, the same on every rank, from a fixed set of words:
                each topic keeps some keys in the store.
            lines: Facts that this rank holds, one a line; None to compare nothing, which all
                ranks do alike.
            error: Error that this rank found before; its lines do not matter then.
            timeout_s: Seconds to wait for the others; by default as for the control.

        Returns:
            A name for what was agreed on: the same on all ranks, and new with each call in a store.

        Raises:
            Exception: This rank's own `error`.
            PeerError: Another rank's.
            DivergenceError: The lines differ; names a rank that differs and the first line.
            PeerTimeoutError: Ranks did not arrive; names them.
            FencedError: A newer generation has begun.
        """
        if self.store is None:
            if error is not None:
                raise error
            return f"{self.prefix}/{topic}"
        round_ = self._meet(self.store, topic, topic, lines, None, error, self.wait_s(timeout_s))
        return round_.name

    def agree_on_lines(
        self, topic: str, lines: Sequence[str], *, timeout_s: float | None = None
    ) -> str:
        """Make sure that all ranks hold the same lines of text. Collective; see `agree`."""
        return self.agree(topic, lines, timeout_s=timeout_s)

    def fail_together(
        self, topic: str, error: Exception | None, *, timeout_s: float | None = None
    ) -> None:
        """Raise on every rank if any rank has an error. Collective; see `agree`."""
        self.agree(topic, error=error, timeout_s=timeout_s)

    def vote(
        self,
        topic: str,
        value: int,
        reason: str = "",
        *,
        error: Exception | None = None,
        timeout_s: float | None = None,
    ) -> Vote:
        """Give every rank the value and the reason of all ranks. Collective.

        Every rank gets an equal result, so all of them can decide by it without a further word.
        Either every rank raises or none does. A rank alone gets its own value at once.

        Args:
            topic: Subject of the vote, the same on every rank, from a fixed set of words; a topic
                of `agree` by the same name is another one.
            value: Number that this rank votes for.
            reason: Text for the other ranks, such as the reason of the value.
            error: Error that this rank found before; its value does not matter then.
            timeout_s: Seconds to wait for the others; by default as for the control.

        Raises:
            Exception: This rank's own `error`.
            PeerError: Another rank's.
            PeerTimeoutError: Ranks did not arrive; names them.
            FencedError: A newer generation has begun.
        """
        if self.store is None or len(self.ranks) == 1:
            if error is not None:
                raise error
            return Vote(value, (value,), (reason,))
        said = json.dumps([int(value), reason])
        wait_s = self.wait_s(timeout_s)
        round_ = self._meet(self.store, f"vote/{topic}", topic, None, said, error, wait_s)
        values, reasons = zip(*map(json.loads, round_.texts()), strict=True)
        return Vote(min(values), values, reasons)

    # -- how it is done ------------------------------------------------------------------

    def _meet(
        self,
        store: dist.Store,
        key: str,
        topic: str,
        lines: Sequence[str] | None,
        said: str | None,
        error: Exception | None,
        timeout_s: float,
    ) -> AgreementRound:
        """A round that all ranks were in and that found no problem."""
        while True:
            try:
                return self._one_round(store, key, topic, lines, said, error, timeout_s)
            except Missed:
                continue
            except (PeerTimeoutError, FencedError) as problem:
                # What went wrong here is the better explanation of the two.
                raise error or problem from None

    def _one_round(
        self,
        store: dist.Store,
        key: str,
        topic: str,
        lines: Sequence[str] | None,
        said: str | None,
        error: Exception | None,
        timeout_s: float,
    ) -> AgreementRound:
        round_ = AgreementRound(
            store,
            f"{self.prefix}/{key}",
            topic,
            self.rank,
            self.ranks,
            timeout_s=timeout_s,
            check_fence=self.check_fence,
        )
        if error is not None:
            told = f"rank {self.rank}: {type(error).__name__}: {error}"
            round_.say_first("error", told)
        if lines is not None:
            self._compare(round_, "\n".join(lines))
        if said is not None:
            round_.say_to_all(said)
        problems = round_.finish()
        if error is not None:
            raise error
        if "error" in problems:
            raise PeerError(
                topic,
                found=f"an error on {problems['error']}",
                why=f"Rank {self.rank} is fine, but cannot go on without its peers.",
                fix="Repair what that rank reports; nothing has been started or written here.",
            )
        if "difference" in problems:
            raise DivergenceError(
                topic,
                found=problems["difference"],
                why="All ranks must ask for the same, in the same order, or they wait for each "
                "other.",
                fix="Compute it from the same configuration on every rank.",
            )
        return round_

    def _compare(self, round_: AgreementRound, text: str) -> None:
        reference_rank = self.ranks[0]
        if self.rank == reference_rank:
            round_.say("lines", text)
            return
        reference = round_.hear("lines")
        if text != reference:
            told = _first_difference(reference_rank, reference, self.rank, text)
            round_.say_first("difference", told)

    def _check(self) -> None:
        if self.rank not in self.ranks:
            found, why = f"this is rank {self.rank}", "Only those that agree can ask for agreement."
        elif self.store is None and len(self.ranks) > 1:
            found, why = "no store", "Ranks meet in a store that all of them share."
        else:
            return
        raise TopologyError(
            f"Control: ranks {format_ranks(self.ranks)}",
            found=found,
            why=why,
            fix="Give the same ranks and store on each of these ranks, and call it on no other.",
        )

    def __repr__(self) -> str:
        return (
            f"Control(rank {self.rank} of {format_ranks(self.ranks)}, generation {self.generation})"
        )


def _first_difference(reference_rank: int, reference: str, rank: int, text: str) -> str:
    pairs = itertools.zip_longest(reference.split("\n"), text.split("\n"), fillvalue="(nothing)")
    for number, (theirs, mine) in enumerate(pairs, 1):
        if theirs != mine:
            reference_has = f"rank {reference_rank} has {theirs!r}"
            return f"line {number}: {reference_has}, rank {rank} has {mine!r}"
    raise AssertionError("texts that differ have a line that differs")


# -- generations -------------------------------------------------------------------------
# A generation is a set of ranks between two changes of membership; number 0 is what the job began
# with. For every later one the store keeps the set under the number, written by a compare-and-set,
# so that of several proposals all ranks read the same one. Nothing is ever overwritten: a process
# that slept through a change finds the record of the next number and knows that it is too late.


def _register(store: dist.Store, number: int, ranks: Sequence[int], rank: int) -> None:
    """Make sure that generation `number` is of `ranks`; the first process to come writes that.

    Numbers below that were left out get a record too, because a process of an older generation
    looks there.

    Raises:
        FencedError: The generation is not of this rank, or is over.
        DivergenceError: It is of other ranks.
    """
    there = _decide(store, number, ranks)
    if rank not in there:
        raise _fenced(number, rank, number, there)
    if there != tuple(ranks):
        raise DivergenceError(
            f"control: generation {number} of ranks {format_ranks(ranks)}",
            found=f"generation {number} is of ranks {format_ranks(there)}",
            why="A generation is one set of ranks, the same for every process.",
            fix="Take the next number, or the ranks of this one.",
        )
    for older in range(number - 1, 0, -1):
        if _decide(store, older, ranks) != there:
            break
    _fence(store, number, rank)


def _fence(store: dist.Store, number: int, rank: int) -> None:
    """Raise `FencedError` if a generation after `number` has begun."""
    ranks = _decided(store, number + 1)
    if ranks is not None:
        raise _fenced(number, rank, number + 1, ranks)


def _decide(store: dist.Store, number: int, ranks: Sequence[int]) -> tuple[int, ...]:
    """The ranks of a generation: `ranks`, or those that another process wrote first."""
    return parse_ranks(store.compare_set(_generation_key(number), "", format_ranks(ranks)).decode())


def _decided(store: dist.Store, number: int) -> tuple[int, ...] | None:
    """The ranks of a generation, or None if it has not begun."""
    key = _generation_key(number)
    return parse_ranks(store.get(key).decode()) if store.check([key]) else None


def _generation_key(number: int) -> str:
    """Key of the ranks of a generation."""
    return f"pcomm/generation/{number}"


def _fenced(mine: int, rank: int, number: int, ranks: Sequence[int]) -> FencedError:
    is_in = rank in ranks
    return FencedError(
        f"control: rank {rank} in generation {mine}",
        found=f"generation {number} has begun, of ranks {format_ranks(ranks)}"
        + ("" if is_in else f", without rank {rank}"),
        why="Nothing of an older generation is read any more, so nothing it says may reach others.",
        fix="Go on with a control of the newest generation."
        if is_in
        else "End this process; a new one comes back once the others begin a generation with it.",
    )


# -- ranks as text -----------------------------------------------------------------------


def format_ranks(ranks: Sequence[int]) -> str:
    """Ascending ranks as runs: `0-3,6` for 0, 1, 2, 3 and 6."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def parse_ranks(text: str) -> tuple[int, ...]:
    """The ranks that `format_ranks` wrote."""
    ranks: list[int] = []
    for run in text.split(","):
        first, _, last = run.partition("-")
        ranks += range(int(first), int(last or first) + 1)
    return tuple(ranks)


def ranks_key(ranks: Sequence[int]) -> str:
    """A short word that no other set of ranks has: the runs, or a digest where they are long."""
    text = format_ranks(ranks)
    if len(text) <= _LONGEST_WORD:
        return text
    return f"{len(ranks)}:{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"
