"""One generation of a job: its plan, its groups, opened and left together, and what it took."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch

from pcomm.core import Group, Groups, GroupSpec, Topology, open_groups
from pcomm.core.control import Control
from pcomm.core.errors import LayoutError, PeerTimeoutError, TopologyError
from pcomm.core.face import version_of
from pcomm.core.groups.spec import CommOptions
from pcomm.ntp.planning.degrees import Policy
from pcomm.ntp.planning.failures import Failures
from pcomm.ntp.planning.plan import NtpPlan, plan
from pcomm.ntp.planning.units import Units
from pcomm.ntp.redistribute import Moved
from pcomm.ntp.session.failure_detection import Watch, translate_comm_errors, translating_errors
from pcomm.ntp.session.quorum import Timeouts
from pcomm.ntp.session.training_state import Restore, TrainState, topology_along_dp
from pcomm.ntp.sync.grad_groups import Strategy, grad_groups

__all__ = ["Build", "Clock", "Job", "Opened", "Transition", "open_generation", "run_abandonable"]


Build = Callable[[NtpPlan, Groups, int], TrainState]


Spec = str | tuple[str, str] | GroupSpec


@dataclass(frozen=True)
class Job:
    """Settings of a session, and the plans that follow from them for the ranks that are left.

    Args:
        topology: Axes and sizes of the whole job, without failures.
        units: Units of parameters, by name or pattern.
        build: Function that makes model and optimizer of a rank for a plan and its groups.
        policy: Rounding of degrees, and the limit on memory.
        failures: Ranks that are gone from the start.
        groups: Groups that the model needs beside `tp`; a function of the plan, or a list.
        strategy: Strategy by which gradients are summed.
        backend: `"gloo"` or `"nccl"`.
        restore: Function that loads a checkpoint; None where there is none.
        has_end: True if the program has a function for the end of the job.
        facts: Facts that must be the same on all ranks, such as a digest of the configuration.
        timeouts: Time limits.
        device: Device of tensors between ranks.
        copies: Number of owners of each unit's optimizer state; None where every rank that holds a
            unit has it.
        has_hosts: True if each rank tells its host; else each replica counts as one.
    """

    topology: Topology
    units: Mapping[str, Units]
    build: Build
    policy: Policy
    failures: Failures
    groups: Sequence[Spec] | Callable[[NtpPlan], Sequence[Spec]]
    strategy: Strategy
    backend: str
    restore: Restore | None
    has_end: bool
    facts: Mapping[str, str]
    timeouts: Timeouts
    device: torch.device
    copies: int | None = None
    has_hosts: bool = False

    @property
    def first_ranks(self) -> tuple[int, ...]:
        """Ranks with which the job starts."""
        gone = self.topology.failed | self.failures.ranks(self.topology)
        return tuple(rank for rank in self.topology.ranks if rank not in gone)

    def plan(self, ranks: tuple[int, ...], speeds: Mapping[int, float]) -> NtpPlan:
        """The plan for the ranks that are there."""
        whole = Topology(self.topology.axes, self.topology.order, offset=self.topology.offset)
        return self._plan(whole, ranks, speeds)

    def has_plan(self, ranks: tuple[int, ...]) -> bool:
        """Whether these ranks can train without any other."""
        try:
            self.plan(ranks, {})
        except (LayoutError, TopologyError):
            return False
        return True

    def last_plan(self, ranks: tuple[int, ...], speeds: Mapping[int, float]) -> NtpPlan:
        """The plan of ranks that cannot go on, but may hold all units, for the end of the job.

        It has as many tensor-parallel groups as the job has replicas, each one with `cp` of 1.

        Raises:
            UnsupportedError: There are pipeline stages or slow ranks, or `tp` is not the fastest
                axis.
        """
        made = self._plan(topology_along_dp(self.topology, speeds), ranks, speeds)
        degrees = made.degrees
        best = sorted(range(len(degrees)), key=lambda one: degrees[one], reverse=True)
        kept = best[: self.topology.axes["dp"]]
        return replace(
            made, degrees=tuple(own if i in kept else (0,) for i, own in enumerate(degrees))
        )

    def _plan(
        self, whole: Topology, ranks: tuple[int, ...], speeds: Mapping[int, float]
    ) -> NtpPlan:
        gone = Failures.from_global_ranks(sorted(set(whole.ranks).difference(ranks)))
        given = {"speeds": dict(speeds)} if speeds else {}
        policy = replace(self.policy, drops_replicas=True)
        return plan(whole, gone, self.units, policy, **given)

    def groups_of(self, made: NtpPlan) -> tuple[Spec, ...]:
        """The groups of the caller for a plan."""
        return tuple(self.groups(made) if callable(self.groups) else self.groups)

    def all_facts(self) -> dict[str, str]:
        """Facts that a process shares with those of its job, by name."""
        units = {name: str(own) for name, own in self.units.items()}
        digest = hashlib.blake2b(json.dumps(units, sort_keys=True).encode(), digest_size=8)
        return {
            "pcomm-core": version_of("pcomm-core"),
            "pcomm-ntp": version_of("pcomm-ntp"),
            "torch": torch.__version__,
            "topology": self.topology.describe(),
            "units": digest.hexdigest(),
            "policy": str(self.policy),
            "strategy": self.strategy,
            "copies": "all" if self.copies is None else str(self.copies),
            "hosts": "those that ranks tell" if self.has_hosts else "replicas",
            **{name: str(fact) for name, fact in self.facts.items()},
        }


@dataclass(frozen=True)
class Transition:
    """How a generation came about, as one of its ranks saw it.

    Args:
        generation: Number of the generation.
        reason: Reason for leaving the one before.
        ranks: Ranks of the generation.
        gone: Ranks that are gone since the last one that was complete, each with the reason.
        meet_s: Seconds until it was decided who goes on.
        open_s: Seconds until the groups were open.
        build_s: Seconds until the model was built.
        move_s: Seconds until the state had arrived on all ranks.
        moved: Bytes that this rank sent and received; None if no state moved.
    """

    generation: int
    reason: str
    ranks: tuple[int, ...]
    gone: Mapping[int, str]
    meet_s: float
    open_s: float
    build_s: float
    move_s: float
    moved: Moved | None

    @property
    def total_s(self) -> float:
        """Seconds from the first notice of this rank to the state on all ranks."""
        return self.meet_s + self.open_s + self.build_s + self.move_s


class Clock:
    """Seconds between one look and the next."""

    def __init__(self) -> None:
        self._last_s = time.monotonic()

    def lap(self) -> float:
        """Seconds since the last lap, or since this clock was made."""
        before, self._last_s = self._last_s, time.monotonic()
        return self._last_s - before


_EVERYONE = "session.all"
"""Name of the group of all ranks of a generation, idle ones included."""


@dataclass(frozen=True)
class Opened:
    """Groups of a generation whose operations a failure interrupts.

    Args:
        groups: Groups of the ranks that the plan uses; `of_all_ranks` itself on an idle rank, and
            where no rank is idle.
        of_all_ranks: Groups among which is that of all ranks.
    """

    groups: Groups
    of_all_ranks: Groups

    @property
    def everyone(self) -> Group:
        """The group of all ranks of the generation, idle ones included."""
        return self.of_all_ranks[_EVERYONE]

    def abandon(self) -> None:
        """Leave all groups as they are. Local."""
        if self.groups is not self.of_all_ranks:
            self.groups.abandon()
        self.of_all_ranks.abandon()

    def close(self) -> None:
        """Close all groups. Collective."""
        if self.groups is not self.of_all_ranks:
            self.groups.close()
        self.of_all_ranks.close()


def open_generation(job: Job, made: NtpPlan, control: Control, watch: Watch) -> Opened:
    """Open the groups of a generation, unless a rank fails meanwhile. Collective over its ranks.

    Args:
        job: Settings of the session.
        made: Plan of the generation.
        control: Control of its ranks.
        watch: Watch of this rank, which tells why the ranks leave the generation.

    Raises:
        PeerError: The ranks leave the generation.
        PeerTimeoutError: Not all ranks are connected in time.
        SuspectedFailure: A connection broke.
    """
    # To agree, and to connect; gloo itself may try for as long as an operation may take.
    limit_s = 2 * job.timeouts.agree_s
    end_s = time.monotonic() + limit_s

    def check() -> None:
        watch.check()
        if time.monotonic() > end_s:
            raise PeerTimeoutError(
                "Session: connecting the ranks of a generation",
                found=f"no connection between all of ranks {list(control.ranks)} after "
                f"{limit_s:g} s",
                why="Each rank connects to each other one.",
                fix="Nothing: the ranks try their connections, and leave one out that others "
                "do not reach.",
            )

    return run_abandonable(
        lambda: _open(job, made, control, watch.failure),
        check,
        Opened.abandon,
        f"pcomm session: connects generation {control.generation}",
    )


def _open(job: Job, made: NtpPlan, control: Control, failure: Callable[[], str | None]) -> Opened:
    """The groups of all ranks and, where some are idle, those of the ranks that are used."""
    if job.device.type == "cuda":
        # Each thread has a current device of its own, on which NCCL connects.
        torch.cuda.set_device(job.device)
    used = [rank for rank in control.ranks if rank not in made.idle_ranks]
    timeout_s = job.timeouts.operation_s
    specs = ("tp", *job.groups_of(made), *grad_groups(made, job.strategy))
    own = [_timed(spec, timeout_s) for spec in specs]
    all_ranks = _timed(GroupSpec.of_ranks(control.ranks, _EVERYONE), timeout_s)
    first = [all_ranks, *own] if len(used) == len(control.ranks) else [all_ranks]
    of_all_ranks = _opened(made.topology, first, control, failure, job.backend)
    if len(used) == len(control.ranks) or control.rank not in used:
        return Opened(of_all_ranks, of_all_ranks)
    try:
        topology = made.topology.with_failed(made.idle_ranks)
        groups = _opened(topology, own, control.among(used), failure, job.backend)
        return Opened(groups, of_all_ranks)
    except BaseException:
        of_all_ranks.abandon()
        raise


def _opened(
    topology: Topology,
    specs: Sequence[GroupSpec],
    control: Control,
    failure: Callable[[], str | None],
    backend: str,
) -> Groups:
    groups, is_aborted = open_groups(topology, specs, backend=backend, control=control), False
    if backend == "nccl":
        groups.abort_on(failure)
        is_aborted = True
    return groups.with_collectives(
        lambda group: translating_errors(group.collectives, failure, is_aborted=is_aborted)
    )


def _timed(spec: Spec, timeout_s: float) -> GroupSpec:
    """The specification of a group, with a limit on its operations."""
    if isinstance(spec, str):
        spec = GroupSpec(spec)
    elif isinstance(spec, tuple):
        spec = GroupSpec(*spec)
    options = spec.options or CommOptions()
    if options.timeout_s is not None:
        return spec
    return replace(spec, options=replace(options, timeout_s=timeout_s))


_PAUSE_S = 0.002


T = TypeVar("T")


def run_abandonable(
    call: Callable[[], T], check: Callable[[], None], undo: Callable[[T], None], name: str
) -> T:
    """The result of `call`, unless `check` raises before.

    Connecting to a process that dies at that moment ends with the time-out of the communicator
    alone, and nothing interrupts it. So it is done on a daemon thread.

    Args:
        call: Function that may block. Its errors are raised here.
        check: Function called every few milliseconds; what it raises leaves the call behind.
        undo: Function called with the result if that comes after all; on the other thread.
        name: Name of the thread.

    Raises:
        SuspectedFailure: `call` raised an error of torch's.
    """
    task = _Task(call, undo)
    threading.Thread(target=task.run, name=name, daemon=True).start()
    while not task.ended.wait(_PAUSE_S):
        try:
            check()
        except BaseException:
            task.leave()
            raise
    return translate_comm_errors("Session: connecting the ranks of a generation", task.result)


class _Task(Generic[T]):
    """A call, its outcome, and whether anything still waits for that."""

    def __init__(self, call: Callable[[], T], undo: Callable[[T], None]) -> None:
        self._call, self._undo = call, undo
        self._lock = threading.Lock()
        self._found: list[T] = []
        self._error: BaseException | None = None
        self._is_left = False
        self.ended = threading.Event()

    def run(self) -> None:
        try:
            found = self._call()
        except BaseException as error:
            self._error = error
        else:
            with self._lock:
                self._found.append(found)
                is_left = self._is_left
            if is_left:
                self._undo(self._found.pop())
        self.ended.set()

    def leave(self) -> None:
        with self._lock:
            self._is_left = True
            found = self._found[:]
            self._found.clear()
        for one in found:
            self._undo(one)

    def result(self) -> T:
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._found.pop()
