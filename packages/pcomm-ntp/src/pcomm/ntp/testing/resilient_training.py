"""Training in a session, with faults at named points; what each rank saw, for comparisons.

A fault is what a test asks for: a signal that a rank sends to itself at one point of one step. No
fault depends on time.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pcomm.core import Groups, Topology
from pcomm.core.collectives import IdentityCollectives
from pcomm.core.layout import Layout
from pcomm.core.process import RankPlace
from pcomm.core.tensor_parallel import ParamLayout
from pcomm.core.testing.living import Living
from pcomm.ntp.planning.plan import Plan
from pcomm.ntp.session import Built, Patience, Session
from pcomm.ntp.session.commit import Requests
from pcomm.ntp.session.suspicion import SuspectedFailure
from pcomm.ntp.testing import small_training
from pcomm.ntp.testing.small_training import SmallModel, training_units

__all__ = [
    "PRELOAD",
    "Fault",
    "Seen",
    "SeenStep",
    "check_seen",
    "dense_run",
    "from_the_start",
    "hold_for_failure",
    "hold_for_joins",
    "host_store",
    "raise_at",
    "slow_down_at",
    "stop_with_a_newcomer",
    "train_in_session",
    "train_two",
    "train_with_store",
]

PRELOAD = ("torch._dynamo", __name__)
"""Modules for `ResilientRanks` to import once, for all ranks: the first optimizer needs seconds."""

POINTS = ("forward", "backward", "reduction", "ready", "optimizer", "checkpoint", "build", "told")


@dataclass(frozen=True)
class Fault:
    """A signal that a rank sends to itself.

    Args:
        rank: Global rank.
        point: One of `POINTS`: `reduction` is while sums are in flight, `ready` between the
            agreement and the optimizer, `optimizer` when one parameter is updated, `checkpoint`
            after a step is applied, `build` while a generation begins, `told` when all ranks are
            known to be ready, for errors.
        step: Number of the step; for `build` that of the generation.
        number: Signal; 0 for an error of a connection, with all ranks alive.
        incarnation: Number of processes that had the rank before.
    """

    rank: int
    point: str
    step: int
    number: int = signal.SIGKILL
    incarnation: int = 0


@dataclass(frozen=True)
class SeenStep:
    """What a rank saw of one committed step.

    Args:
        step: Number of the step.
        replica: Coordinate of the rank on `dp`.
        first: First token of the replica.
        count: Number of tokens of the replica.
        loss: Mean nats of these tokens.
        norm: Norm of all gradients.
    """

    step: int
    replica: int
    first: int
    count: int
    loss: float
    norm: float


@dataclass
class Seen:
    """What a rank saw of a whole run.

    Args:
        steps: The steps that it committed, in order.
        states: By number of applied steps, the plan, as JSON, and by name the parameter and
            its moments.
        generations: Ranks of each generation that it was in.
        reasons: Reason for each of these generations.
        gone: Ranks that it saw go, with the reason that was told.
        living: At the beginning of each attempt at each fifth step, numbers of the threads of this
            process, of its open files, of process groups and of living tensors.
    """

    steps: list[SeenStep] = field(default_factory=list)
    states: dict[int, tuple[str, dict[str, tuple[Tensor, ...]]]] = field(default_factory=dict)
    generations: list[tuple[int, ...]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    gone: dict[int, str] = field(default_factory=dict)
    living: list[tuple[int, int, int, int]] = field(default_factory=list)


def train_in_session(
    place: RankPlace,
    topology: Topology,
    until: int,
    faults: Sequence[Fault] = (),
    options: dict[str, Any] | None = None,
    each_step: Callable[[Session, RankPlace], None] | None = None,
    counts: bool = False,
) -> Seen:
    """Train the small model to step `until`; a task of `ResilientRanks`.

    Args:
        place: Place of this rank.
        topology: Axes and sizes of the job.
        until: Number of steps.
        faults: Signals that ranks send to themselves.
        options: Further arguments of `Session`.
        each_step: Function called at the beginning of each attempt.
        counts: True to count what lives in the process, for `Seen.living`.
    """
    *_, seen = _attempts(place, topology, until, faults, options, each_step, counts)
    return seen


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
    first = _attempts(place, topology, until, [fault])
    second = _attempts(replace(place, port=port), topology, until)
    seen = [Seen(), Seen()]
    for pair in zip_longest(first, second):
        seen = [now or before for now, before in zip(pair, seen, strict=True)]
    return seen


def _attempts(
    place: RankPlace,
    topology: Topology,
    until: int,
    faults: Sequence[Fault] = (),
    options: dict[str, Any] | None = None,
    each_step: Callable[[Session, RankPlace], None] | None = None,
    counts: bool = False,
) -> Iterator[Seen]:
    """Train as `train_in_session` does; what was seen so far after each attempt, and at the end."""
    seen = Seen()
    current, left = [0, 0], list(faults)

    def strike(point: str, step: int) -> None:
        for fault in [one for one in left if (one.point, one.step) == (point, step)]:
            if (fault.rank, fault.incarnation) == (place.rank, place.incarnation):
                # Before it strikes: a process that was stopped goes on behind this line.
                left.remove(fault)
                if fault.number == 0:
                    raise SuspectedFailure(point, found="nothing", why="A fault.", fix="Go on.")
                os.kill(os.getpid(), fault.number)

    def build(plan: Plan, groups: Groups, rank: int) -> Built:
        current[1] += 1
        strike("build", current[1] - 1)
        own = plan.place(rank)

        def layout(name: str) -> Layout:
            found = plan.units_of(name)
            assert found is not None
            return plan.layout(found[0], own.replica)

        model = SmallModel(layout, groups["tp"].collectives)
        # In the middle of forward and of backward: between collectives of the layers.
        model.norm.register_forward_hook(lambda *_: strike("forward", current[0]))
        model.norm.weight.register_hook(lambda _: strike("backward", current[0]))
        return Built(model, _Optimizer(model, lambda point: strike(point, current[0])))

    patience = Patience(dead_after_s=3600.0, leave_s=3600.0, agree_s=3600.0)
    chosen: dict[str, Any] = {"patience": patience, **(options or {})}
    with _Session(place, topology, training_units(), build, **chosen) as session:
        session.strike = lambda: strike("told", current[0])
        for attempt in session.attempts(until=until):
            current[0] = session.step
            _note(seen, session)
            if counts and session.step % 5 == 0:
                kept = sum(len(own) for _, state in seen.states.values() for own in state.values())
                seen.living.append(_living(kept))
            if each_step is not None:
                each_step(session, place)
            with attempt as step:
                seen_step = _one_step(session, step, strike)
                seen.steps.append(seen_step)
                strike("checkpoint", step.number)
            yield seen
        _note(seen, session)
        seen.generations = [one.ranks for one in session.transitions]
        seen.reasons = [one.reason for one in session.transitions]
        for one in session.transitions:
            seen.gone |= one.gone
    yield seen


def hold_for_joins(session: Session, place: RankPlace, *, counts: Mapping[int, int]) -> None:
    """Wait at the beginning of some steps until so many processes have asked to join, by step."""
    if session.step in counts:
        store, count = place.store(), counts[session.step]
        while store.add("pcomm/session/joins", 0) < count and session.failure is None:
            time.sleep(0.005)


def hold_for_failure(session: Session, place: RankPlace, *, step: int) -> None:
    """Wait at the beginning of a step until the ranks leave; count those that wait as `held`."""
    if session.step == step:
        place.store().add("held", 1)
        while session.failure is None:
            time.sleep(0.005)


def from_the_start(plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Restore what a checkpoint of step 0 has: the values that the model was built with."""
    del plan, model, optimizer
    return 0


def host_store(port: Connection) -> None:
    """Host a store until the process ends; sends its port."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.send(store.port)
    port.recv()


def train_with_store(place: RankPlace, port: int, *args: Any) -> Seen:
    """Train with another store on this host than that of the launcher."""
    return train_in_session(replace(place, port=port), *args)


class _Session(Session):
    """A session with a point behind the agreement that all ranks are ready."""

    strike: Callable[[], None] | None = None

    def _ready(self, own: Requests) -> Requests:
        told = super()._ready(own)
        if self.strike is not None:
            self.strike()
        return told


class _Optimizer(torch.optim.AdamW):
    """AdamW with points before a step and within it."""

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


def _one_step(session: Session, step: Any, strike: Callable[[str, int], None]) -> SeenStep:
    place = session.plan.place(session.rank)
    tokens = small_training._TOKENS
    shares = session.plan.token_shares(tokens)
    first, count = sum(shares[: place.replica]), shares[place.replica]
    ids_T, targets_T = (x[first : first + count] for x in small_training._batch(step.number))
    losses = []
    for turn, part in enumerate((slice(0, 2), slice(2, None))):
        loss = session.model(ids_T[part], targets_T[part])
        weight = len(ids_T[part]) / tokens
        step.backward(loss, weight=weight, is_last=turn == 1)
        losses.append(loss.item() * len(ids_T[part]))
    strike("reduction", step.number)
    norm = step.commit(max_norm=small_training._MAX_NORM)
    return SeenStep(step.number, place.replica, first, count, sum(losses) / count, norm.item())


def _living(kept: int) -> tuple[int, int, int, int]:
    """Threads, open files, process groups, and tensors but for those that the caller keeps."""
    gc.collect()
    threads, files = (len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd"))
    tensors = sum(issubclass(type(one), Tensor) for one in gc.get_objects()) - kept
    return threads, files, len(Living.now().process_groups), tensors


def _note(seen: Seen, session: Session) -> None:
    if session.is_idle:
        return
    kept = _state(session.model, session.optimizer)
    seen.states[session.step] = session.plan.to_json(), kept


def check_seen(seen: dict[int, Seen], until: int, *, atol: float = 1e-12) -> None:
    """Compare what surviving ranks saw with the training of the whole model by one process.

    Losses, norms, parameters and moments of each step; and no token is lost or repeated.

    Args:
        seen: Results of the ranks that are left, by rank.
        until: Number of steps.
        atol: Largest difference.
    """
    dense, losses, norms = dense_run(until)
    for rank, own in seen.items():
        assert [one.step for one in own.steps] == sorted({one.step for one in own.steps}), rank
        assert until in own.states, f"rank {rank} ended at {max(own.states)}"
        for applied, (text, tensors) in own.states.items():
            _check_state(Plan.from_json(text), rank, tensors, dense[applied], atol)
    for number in range(until):
        saw = [one for own in seen.values() for one in own.steps if one.step == number]
        by_replica = {one.replica: one for one in saw}
        for one in saw:
            assert abs(one.norm - norms[number]) <= atol
            # All ranks of a replica, and of all generations, had the same tokens.
            assert (one.first, one.count, one.loss) == (
                by_replica[one.replica].first,
                by_replica[one.replica].count,
                by_replica[one.replica].loss,
            )
        parts = sorted((one.first, one.count) for one in by_replica.values())
        if parts and sum(count for _, count in parts) == small_training._TOKENS:
            total = sum(one.loss * one.count for one in by_replica.values())
            assert abs(total / small_training._TOKENS - losses[number]) <= atol
        ends = [0, *(first + count for first, count in parts)]
        assert all(first >= end for (first, _), end in zip(parts, ends, strict=False))


def dense_run(until: int) -> tuple[list[dict[str, tuple[Tensor, ...]]], list[float], list[float]]:
    """Parameters and moments after 0 to `until` steps of one process; losses and norms of steps."""
    units = training_units()

    def layout(name: str) -> Layout:
        return units["fc1.*" if name.startswith("fc1") else name].layout(1)

    model = SmallModel(layout, IdentityCollectives())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    states, losses, norms = [_state(model, optimizer)], [], []
    for step in range(until):
        loss = model(*small_training._batch(step))
        loss.backward()
        losses.append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), small_training._MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        states.append(_state(model, optimizer))
    return states, losses, norms


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, tuple[Tensor, ...]]:
    """Each parameter and, where there are any, its moments; copies."""
    kept: dict[str, tuple[Tensor, ...]] = {}
    for name, parameter in model.named_parameters():
        own = optimizer.state.get(parameter, {})
        moments = [own[key] for key in ("exp_avg", "exp_avg_sq") if key in own]
        kept[name] = tuple(one.detach().clone() for one in (parameter, *moments))
    return kept


def _check_state(
    plan: Plan,
    rank: int,
    tensors: dict[str, tuple[Tensor, ...]],
    dense: dict[str, tuple[Tensor, ...]],
    atol: float,
) -> None:
    place = plan.place(rank)
    assert tensors.keys() == dense.keys()
    for name, own in tensors.items():
        units = plan.units_of(name)
        param_layout = ParamLayout()
        if units is not None:
            layout = plan.layout(units[0], place.replica)
            param_layout = ParamLayout(layout, 1 if name == "fc2.weight" else 0)
        for one, whole in zip(own, dense[name], strict=True):
            expected = small_training._own(whole, param_layout, place.index)
            torch.testing.assert_close(one, expected, rtol=0, atol=atol)


def raise_at(session: Session, place: RankPlace, *, step: int, rank: int) -> None:
    """Raise an error of the program's own on one rank."""
    if (session.step, place.rank) == (step, rank):
        raise ValueError("no such file")


def slow_down_at(session: Session, place: RankPlace, *, step: int, rank: int, speed: float) -> None:
    """Give a rank another speed, once."""
    if (session.step, place.rank) == (step, rank) and session.generation == 0:
        session.set_speed(rank, speed)


def stop_with_a_newcomer(session: Session, place: RankPlace) -> None:
    """Ask to stop in the step at whose end a process is taken in."""
    if (session.step, session.generation) == (1, 1):
        hold_for_joins(session, place, counts={1: 1})
        if place.rank == 0:
            session.request_stop()
