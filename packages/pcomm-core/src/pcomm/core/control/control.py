"""The control plane as an object: ranks that agree through a store, in one generation.

Nothing here needs a communicator or a default process group: a store that all ranks share is
enough, and a wait has a time limit. A mistake on one rank becomes an error on every rank instead
of a hang, and ranks that the others have left behind are told so.
"""

from __future__ import annotations

import copy
import itertools
import json
import time
from collections.abc import Sequence

import torch.distributed as dist

from pcomm.core.control import generations
from pcomm.core.control.agreement_round import AgreementRound, Missed
from pcomm.core.control.rank_sets import spelled, word_for
from pcomm.core.control.votes import Vote
from pcomm.core.errors import (
    DivergenceError,
    FencedError,
    PeerError,
    PeerTimeoutError,
    TopologyError,
)
from pcomm.core.process import environment

__all__ = ["Control"]

# Between two polls of a process that waits to be taken in; changes of membership are rare.
_PAUSE_S = 0.02


class Control:
    """A set of ranks that agree through a store, in one generation.

    Functions that need agreement take one: `open_groups`, `agree_in_group`, `FailureFlag`,
    `ledgered`. Making one is local. Keys in the store carry the generation, the whole set of ranks
    and the topic, and the rounds about a topic are counted in the store. So ranks agree whatever
    each of them did before, and other sets of ranks, other generations and other topics never
    interfere. In one process, calls about one topic follow each other; different threads may agree
    about different topics at once.

    A generation belongs to the store. Where parts of a job change their members independently,
    each part gets a `torch.distributed.PrefixStore` of its own.

    Attributes:
        store: Store that all ranks share; None for a single rank.
        ranks: Ranks that agree, ascending.
        rank: Rank of this process.
        generation: Number of changes of membership so far. Calls with an older one than the
            newest raise `FencedError`.
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
            generations.register(store, generation, self.ranks, rank)

    @classmethod
    def join(cls, store: dist.Store, rank: int, *, timeout_s: float | None = None) -> Control:
        """The control of the newest generation, waiting until that is one with `rank`. Local.

        For a new process that takes the place of one that is gone. The others take it in by
        `next`.

        Raises:
            PeerTimeoutError: No such generation began within `timeout_s` seconds.
        """
        limit_s = environment.timeout_s() if timeout_s is None else timeout_s
        end_s, newest, ranks = time.monotonic() + limit_s, 0, tuple[int, ...]()
        while True:
            following = generations.decided(store, newest + 1)
            if following is not None:
                newest, ranks = newest + 1, following
            elif rank in ranks:
                return cls(store, ranks, rank, generation=newest, timeout_s=timeout_s)
            elif time.monotonic() > end_s:
                is_of = f"is of ranks {spelled(ranks)}" if ranks else "is the newest one"
                raise PeerTimeoutError(
                    f"Control.join: rank {rank}",
                    found=f"generation {newest} {is_of} after {limit_s:g} s",
                    why="The ranks of a generation are decided by members of the one before.",
                    fix="Have a member call next() with this rank.",
                )
            else:
                time.sleep(_PAUSE_S)

    # -- other ranks, other generations --------------------------------------------------

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
                f"Control.among: ranks {spelled(chosen)}",
                found=f"a control of ranks {spelled(self.ranks)}, without {spelled(outside)}",
                why="Ranks of another generation, or of none, may not take part.",
                fix="Leave them out, or begin a generation with them by next().",
            )
        part = copy.copy(self)
        part.ranks = chosen
        part._check()
        return part

    def next(self, ranks: Sequence[int]) -> Control:
        """Begin the next generation, of `ranks`, or enter it if another rank has begun it. Local.

        Of several proposals the first one counts, for all; look at `ranks` of what is returned.
        Every control of this generation, on whichever rank, is fenced from then on. Calling it
        again on the same control returns the same generation.

        A process that is replaced by a new one of the same rank leaves in one generation, and
        the new one comes in a later one, so that the two are never taken for each other.

        Args:
            ranks: Ranks of the next generation: some of this control, and others that `join`.

        Raises:
            FencedError: The next generation is without this rank, or another one has followed it.
        """
        members = tuple(sorted(set(ranks)))
        if self.store is None:
            return Control(None, members, self.rank, generation=self.generation + 1)
        number = self.generation + 1
        decided = generations.decide(self.store, number, members)
        if self.rank not in decided:
            self.check_fence()
        return Control(self.store, decided, self.rank, generation=number, timeout_s=self.timeout_s)

    # -- agreement -----------------------------------------------------------------------

    @property
    def prefix(self) -> str:
        """Prefix of the keys of these ranks in this generation; the same on all of them."""
        return f"pcomm/{self.generation}/{word_for(self.ranks)}"

    def wait_s(self, timeout_s: float | None = None) -> float:
        """Seconds to wait: `timeout_s`, that of this control, or `PCOMM_TIMEOUT_S`."""
        for choice in (timeout_s, self.timeout_s):
            if choice is not None:
                return choice
        return environment.timeout_s()

    def check_fence(self) -> None:
        """Raise `FencedError` if a newer generation has begun. Local."""
        if self.store is not None:
            generations.fence(self.store, self.generation, self.rank)

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
            f"Control: ranks {spelled(self.ranks)}",
            found=found,
            why=why,
            fix="Give the same ranks and store on each of these ranks, and call it on no other.",
        )

    def __repr__(self) -> str:
        return f"Control(rank {self.rank} of {spelled(self.ranks)}, generation {self.generation})"


def _first_difference(reference_rank: int, reference: str, rank: int, text: str) -> str:
    pairs = itertools.zip_longest(reference.split("\n"), text.split("\n"), fillvalue="(nothing)")
    for number, (theirs, mine) in enumerate(pairs, 1):
        if theirs != mine:
            reference_has = f"rank {reference_rank} has {theirs!r}"
            return f"line {number}: {reference_has}, rank {rank} has {mine!r}"
    raise AssertionError("texts that differ have a line that differs")
