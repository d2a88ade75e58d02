"""Training in a session, with faults at named points.

A fault is what a test asks for: a signal that a rank sends to itself at one point of one step. No
fault depends on time.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from ntp_support import small_training
from ntp_support.broken_hosts import HostPlaces
from ntp_support.seen_training import Seen, SeenStep, state_of
from ntp_support.small_training import SmallModel, training_units
from pcomm.core import Groups, Topology
from pcomm.core.errors import ClosedError
from pcomm.core.layout import Layout
from pcomm.core.process import RankPlace
from pcomm.core.testing.assertions import Living
from pcomm.ntp.planning.plan import NtpPlan
from pcomm.ntp.session import Attempt, Session, Timeouts, TrainState
from pcomm.ntp.session.failure_detection import SuspectedFailure
from pcomm.ntp.sync.owned_params import OwnedParams

__all__ = [
    "ANY",
    "PRELOAD",
    "RECOVERY_POINTS",
    "STEP_POINTS",
    "Fault",
    "Training",
    "train_in_session",
    "train_on_hosts",
    "train_two",
    "train_with_store",
]

PRELOAD = ("torch._dynamo", __name__)
"""Modules for `ResilientRanks` to import once, for all ranks: the first optimizer needs seconds."""

STEP_POINTS = ("forward", "backward", "reduction", "ready", "optimizer", "checkpoint")
"""Points of a step at which a fault may strike; see `Fault`."""

RECOVERY_POINTS = ("connect", "build")
"""Points of the beginning of a generation."""

ANY = -1
"""Incarnation of a `Fault` of whichever process has the rank."""


@dataclass(frozen=True)
class Fault:
    """A signal that a rank sends to itself.

    Args:
        rank: Global rank.
        point: One of `STEP_POINTS` or `RECOVERY_POINTS`: `reduction` is while sums are in flight,
            `ready` between the agreement and the optimizer, `optimizer` when one parameter is
            updated, `checkpoint` after a step is applied, `connect` and `build` while a generation
            begins, before and after its groups are open. An error at `ready` is that of a rank that
            does not hear that all are ready. `gather`, with copies, is while owners send weights.
        step: Number of the step; for `connect` and `build` that of the generation.
        number: Signal; 0 for an error of a connection, with all ranks alive.
        incarnation: Number of processes that had the rank before; `ANY` for the first process that
            comes to the point as that rank, a spare for example, which the store counts as
            `struck`. `build` and `connect` then strike once as many faults as `step` have struck.
    """

    rank: int
    point: str
    step: int
    number: int = signal.SIGKILL
    incarnation: int = 0


def train_in_session(place: RankPlace, *args: Any) -> Seen:
    """Train as `Training(place, *args)` says; a task of `ResilientRanks`."""
    training = Training(place, *args)
    # A spare whose place no rank has left saw nothing.
    with suppress(ClosedError):
        deque(training.attempts(), maxlen=0)
    return training.seen


def train_two(
    place: RankPlace, port: int, topology: Topology, until: int, fault: Fault
) -> list[Seen]:
    """Train in two sessions at once, whose attempts take turns; a task of `ResilientRanks`.

    Args:
        place: Place of this rank, also in the second session.
        port: Port on this host of the store of the second session.
        topology: Axes and sizes of either job.
        until: Number of steps.
        fault: Fault in the first session.
    """
    first = Training(place, topology, until, [fault]).attempts()
    second = Training(replace(place, port=port), topology, until).attempts()
    seen = [Seen(), Seen()]
    for pair in zip_longest(first, second):
        seen = [now or before for now, before in zip(pair, seen, strict=True)]
    return seen


def train_with_store(place: RankPlace, port: int, *args: Any) -> Seen:
    """Train with another store on this host than that of the launcher."""
    return train_in_session(replace(place, port=port), *args)


def train_on_hosts(place: RankPlace, hosts: HostPlaces, *args: Any) -> Seen:
    """Train in the network namespace of the rank's host, with a store in another one."""
    if hosts.is_named:
        os.environ["GLOO_SOCKET_IFNAME"] = hosts.network.interfaces[0]
    else:
        _take_the_name("localhost")
    with hosts.network.inside(place.rank // hosts.ranks_each):
        return train_in_session(replace(place, host=hosts.store, port=hosts.port), *args)


def _take_the_name(name: str) -> None:
    """Have this process alone be on a host of that name."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWUTS) or libc.sethostname(name.encode(), len(name)):
        raise OSError(ctypes.get_errno(), "the name of a host")
    assert socket.gethostname() == name


_CLONE_NEWUTS = 0x04000000


@dataclass
class Training:
    """One rank's training of the small model.

    Args:
        place: Place of this rank.
        topology: Axes and sizes of the job; a rank that it does not have is a spare.
        until: Number of steps.
        faults: Signals that ranks send to themselves.
        options: Further arguments of `Session`.
        each_step: Function called at the beginning of each attempt.
        counts: True to count what lives in the process, for `Seen.living`.
    """

    place: RankPlace
    topology: Topology
    until: int
    faults: Sequence[Fault] = ()
    options: Mapping[str, Any] | None = None
    each_step: Callable[[Session, RankPlace], None] | None = None
    counts: bool = False

    def __post_init__(self) -> None:
        self._left, self._step, self._builds = list(self.faults), 0, 0
        self.seen = Seen()

    def attempts(self) -> Iterator[Seen]:
        """Train; what was seen so far after each attempt, and at the end. Collective."""
        seen = self.seen
        timeouts = Timeouts(dead_after_s=3600.0, leave_s=3600.0, agree_s=3600.0)
        options = {"timeouts": timeouts, "groups": self._groups, **(self.options or {})}
        options["is_spare"] = self.place.rank not in self.topology.ranks
        with Session(
            self.place, self.topology, training_units(), self._build, **options
        ) as session:
            for attempt in session.attempts(until=self.until):
                self._step = session.step
                self._note(session)
                if self.each_step is not None:
                    self.each_step(session, self.place)
                with attempt as step:
                    seen.steps.append(self._one_step(session, step))
                    self._strike("checkpoint", step.number)
                yield seen
            self._note(session)
            seen.generations = [one.ranks for one in session.transitions]
            seen.reasons = [one.reason for one in session.transitions]
            seen.moved = [one.moved for one in session.transitions if one.moved is not None]
            if not session.is_idle:
                held = sum(one.numel() for one in session.model.parameters())
                owned = owned_of(session)
                seen.owned = held if owned is None else owned.num_elements, held
            for one in session.transitions:
                seen.gone |= one.gone
        yield seen

    def _strike(self, point: str, step: int) -> None:
        own = self.place.rank, self.place.incarnation
        for fault in [one for one in self._left if one.incarnation == ANY and one.point == point]:
            if self._is_first(fault, step):
                os.kill(os.getpid(), fault.number)
        for fault in [one for one in self._left if (one.point, one.step) == (point, step)]:
            if (fault.rank, fault.incarnation) == own:
                # Before it strikes: a process that was stopped goes on behind this line.
                self._left.remove(fault)
                if fault.number == 0:
                    raise SuspectedFailure(point, found="nothing", why="A fault.", fix="Go on.")
                os.kill(os.getpid(), fault.number)

    def _is_first(self, fault: Fault, step: int) -> bool:
        """Whether a fault of any process of a rank strikes here; the store has it strike once."""
        if fault.rank != self.seen.rank or (fault.point in STEP_POINTS and fault.step != step):
            return False
        store = self.place.store()
        if fault.point in RECOVERY_POINTS and store.add("struck", 0) != fault.step:
            return False
        if store.add(f"struck/{fault}", 1) > 1:
            return False
        store.add("struck", 1)
        return True

    def _build(self, plan: NtpPlan, groups: Groups, rank: int) -> TrainState:
        self._builds, self.seen.rank = self._builds + 1, rank
        self._strike("build", self._builds - 1)
        own = plan.place(rank)

        def layout(name: str) -> Layout:
            found = plan.units_of(name)
            assert found is not None
            return plan.layout(found[0], own.replica)

        model = SmallModel(layout, groups["tp"].collectives)
        # In the middle of forward and of backward: between collectives of the layers.
        model.norm.register_forward_hook(lambda *_: self._strike("forward", self._step))
        model.norm.weight.register_hook(lambda _: self._strike("backward", self._step))
        return TrainState(model, _Optimizer(model, lambda point: self._strike(point, self._step)))

    def _groups(self, plan: NtpPlan) -> tuple[()]:
        self._strike("connect", self._builds)
        return ()

    def _one_step(self, session: Session, step: Attempt) -> SeenStep:
        place = session.plan.place(session.rank)
        tokens = small_training._TOKENS
        shares = session.plan.token_shares(tokens)
        first, count = sum(shares[: place.replica]), shares[place.replica]
        ids_T, targets_T = (x[first : first + count] for x in small_training._batch(step.number))
        losses = []
        for turn, part in enumerate((slice(0, 2), slice(2, None))):
            loss = session.model(ids_T[part], targets_T[part])
            # Ranks along cp have the same tokens.
            weight = len(ids_T[part]) / tokens / self.topology.axes.get("cp", 1)
            step.backward(loss, weight=weight, is_last=turn == 1)
            losses.append(loss.item() * len(ids_T[part]))
        self._strike("reduction", step.number)
        norm = step.commit(max_norm=small_training._MAX_NORM)
        return SeenStep(step.number, place.replica, first, count, sum(losses) / count, norm.item())

    def _messages(self, messages: Callable[[Any], Iterator[Any]], *args: Any) -> Iterator[Any]:
        """What owners send after a step, with a point where the first message is in flight."""
        for one in messages(*args):
            yield one
            self._strike("gather", self._step)

    def _note(self, session: Session) -> None:
        """Note the state before a step, and at each fifth what lives in the process."""
        if session.is_idle:
            return
        owned = owned_of(session)
        if owned is not None and "_messages" not in vars(owned):
            owned._messages = partial(self._messages, owned._messages)  # type: ignore[method-assign]
        seen = self.seen
        seen.states[session.step] = (
            session.plan.to_json(),
            state_of(session.model, session.optimizer, owned_of(session)),
        )
        if self.counts and session.step % 5 == 0:
            kept = sum(len(own) for _, state in seen.states.values() for own in state.values())
            seen.living.append(_living(kept))


def owned_of(session: Session) -> OwnedParams | None:
    """What a rank owns of the optimizer's state; None if it has all of it."""
    return session._recovery.require_built().owned


class _Optimizer(torch.optim.AdamW):
    """AdamW with points before a step and within it."""

    is_elementwise = True

    def __init__(self, model: nn.Module, strike: Callable[[str], None]) -> None:
        super().__init__(model.parameters(), lr=0.05, weight_decay=0.1)
        self._strike = strike

    def step(self, closure: Any = None) -> Any:
        """Apply a step, in two halves where a fault may strike between them."""
        self._strike("ready")
        whole = self.param_groups[0]["params"]
        self.param_groups[0]["params"] = whole[:2]
        super().step(closure)
        self._strike("optimizer")
        self.param_groups[0]["params"] = whole[2:]
        result = super().step(closure)
        self.param_groups[0]["params"] = whole
        return result


def _living(kept: int) -> tuple[int, int, int, int]:
    """Threads, open files, process groups, and tensors but for those that the caller keeps."""
    gc.collect()
    threads, files = (len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd"))
    tensors = sum(issubclass(type(one), Tensor) for one in gc.get_objects()) - kept
    return threads, files, len(Living.now().process_groups), tensors
