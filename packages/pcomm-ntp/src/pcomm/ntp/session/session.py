"""`Session`: training that goes on when ranks die, at the tensor-parallel degree that is left."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pcomm.core import Groups, Topology
from pcomm.core.errors import ClosedError, ConfigError, FencedError, UnsupportedError
from pcomm.core.groups.abandoning import outlive_failures
from pcomm.core.process import RankPlace
from pcomm.core.process.world import ANYWHERE, reachable_interface
from pcomm.ntp.planning.degrees import Policy
from pcomm.ntp.planning.failures import Failures
from pcomm.ntp.planning.hosts import check_copies
from pcomm.ntp.planning.plan import NtpPlan
from pcomm.ntp.planning.units import Units
from pcomm.ntp.redistribute import StateLostError
from pcomm.ntp.session.generation import Build, Job, Spec, Transition
from pcomm.ntp.session.membership import Membership
from pcomm.ntp.session.quorum import Timeouts
from pcomm.ntp.session.records import StoreLostError, store_errors
from pcomm.ntp.session.recovery import Recovery
from pcomm.ntp.session.step import Attempt, StepEnd
from pcomm.ntp.session.training_state import Restore
from pcomm.ntp.sync.grad_groups import Strategy
from pcomm.ntp.sync.grad_sync import GradSync

__all__ = ["Session"]


# A store at these serves ranks of one host alone.
_THIS_HOST = ("127.0.0.1", "::1", "localhost")


class Session:
    """Training steps that all ranks that are left apply exactly once, whichever ranks die.

        with Session(place, topology, units, build) as session:
            for attempt in session.attempts(until=1000):
                with attempt as step:
                    inputs, targets, weight = batch_of(session.step, session.plan, session.rank)
                    loss = loss_of(session.model(inputs), targets)
                    step.backward(loss, weight=weight)
                    step.commit(max_norm=1.0)

    When a rank dies, the others leave the operations that they are in, meet in the store, plan for
    the ranks that are left, open new groups, build the model anew, move the state, and attempt the
    same step again. The `with` block takes the error. Everything in it that depends on the ranks
    (plan, groups, model, batch) is asked of the session again in each attempt.

    A process that takes the place of a rank that was gone makes the same `Session`: it waits until
    the others take it in, at the end of a step. Making a session is collective.

    Nothing that a rank wrote that the others have left behind reaches them; it gets a
    `FencedError`, at the latest before its next step.

    Random generators are not part of the state: an attempt that failed has drawn from them, on some
    ranks more than on others, and a process that joins has not. Seed in each attempt what it draws,
    from `step.number`.

    Args:
        place: Place of this process, such as `ResilientRanks` gives; or a function that makes a new
            connection to the store at each call, with `rank`; calls of a `RankPlace` end where the
            store's host does not answer, those of a function as it makes them. Where a `RankPlace`
            names another host, and this host's name is loopback, connections between ranks go by
            the interface on the route there, unless `GLOO_SOCKET_IFNAME` is set.
        topology: Axes and sizes of the whole job; `tp` and `dp` are among them.
        units: Units of parameters by name or pattern, as `plan` takes them.
        build: Function of a plan, its groups and this rank that returns
            `TrainState(model, optimizer)`; called in each generation, on ranks that have units.
            `groups["tp"]` is the tensor-parallel group. It does not communicate. Initial values
            must not depend on the plan or rank, such as by the random state of the whole weight:
            replicas are compared.
        rank: Global rank of this process; that of `place` by default.
        is_spare: True for a process whose rank the topology does not have. Making the session then
            waits, without a model, until a rank has died, takes its place in the same change of
            ranks, and goes on as that rank; see `rank` of the session. It raises `ClosedError`
            if the job ends before.
        policy: Rounding of degrees, and the limit on memory.
        failures: Ranks that are gone from the start, and may join.
        groups: Further groups of the model, or a function that makes them from a plan.
        strategy: Strategy by which gradients are summed; see `GradSync`.
        copies: Number of ranks that have the optimizer's state of each unit, and compute its step:
            on different hosts, where there are as many; the others that hold it get the weights.
            `optimizer` then has parameters of its own, in the groups that it was built with: the
            parts that this rank owns. Set learning rates from `step.number` before `commit`: what
            comes behind it may be left out where a rank dies while weights travel. None for the
            state on each rank.
        host: Name of the machine that this process is lost with, for `copies`; the ranks tell each
            other theirs. On all ranks or on none: then each coordinate on `dp` counts as one.
        restore: Function of a plan, model and optimizer that loads a checkpoint and returns its
            step; called on ranks with units when the job starts, and when a state is lost.
        at_end: Function of the session that `close` calls on each rank with units, such as to save
            the last checkpoint. It may communicate: if a rank dies meanwhile, it is called again on
            all ranks that are left, in the next generation. It is also called before the
            `TopologyError` of ranks that cannot go on but hold all units: in a last generation,
            whose plan has a tensor-parallel group as each replica, and 1 for `cp`.
        facts: Facts that must be the same on all ranks, such as a digest of the configuration.
            Versions, topology and units are compared in any case.
        heartbeat_s: Seconds between two heartbeats of a rank.
        dead_after_s: Seconds without a heartbeat after which a rank is excluded, unless it comes
            before the others have decided. A process that the launcher tells to have ended is
            excluded at once.
        timeouts: All time limits, in place of the two before.
        backend: `"gloo"`, or `"nccl"`, which has not run on hardware yet: communicators are aborted
            when a rank dies, and variables of torch's watchdogs are set (`outlive_failures`).
        device: Device of this rank's tensors between ranks; with NCCL a CUDA device.

    Attributes:
        rank: Global rank of this process; of a spare, that whose place it has.

    Raises:
        ConfigError: The others refuse this process, for other software or facts; the topology has
            the rank of a spare; or NCCL without a CUDA device, or with variables by which torch
            would end this process.
        DivergenceError: Ranks differ in facts or plan, in the kind or settings of the optimizer, or
            in numbers of their state.
        UnsupportedError: A backend that is not there, or an optimizer that does not work on parts
            of a tensor.
        PeerError: A process that joins cannot connect to the others.
        TopologyError: All ranks of a tensor-parallel group are gone, and no replica is whole;
            where steps were applied, raised by `close`, after `at_end`, if other ranks hold all
            units.
        FencedError: The others went on without this rank.
        StoreLostError: The process that hosts the store has ended, or its host does not answer.
    """

    def __init__(
        self,
        place: RankPlace | Callable[[], dist.Store],
        topology: Topology,
        units: Mapping[str, Units],
        build: Build,
        *,
        rank: int | None = None,
        is_spare: bool = False,
        policy: Policy | None = None,
        failures: Failures | None = None,
        groups: Sequence[Spec] | Callable[[NtpPlan], Sequence[Spec]] = (),
        strategy: Strategy = "interval",
        copies: int | None = None,
        host: str | None = None,
        restore: Restore | None = None,
        at_end: Callable[[Session], None] | None = None,
        facts: Mapping[str, str] | None = None,
        heartbeat_s: float = 0.5,
        dead_after_s: float = 10.0,
        timeouts: Timeouts | None = None,
        backend: str = "gloo",
        device: torch.device | str = "cpu",
    ) -> None:
        if copies is not None and strategy != "interval":
            raise ConfigError(
                f"Session: copies={copies}, strategy={strategy!r}",
                found="a strategy by which ranks that hold the same units have no group",
                why="Owners send weights to the other ranks that hold them.",
                fix='Use strategy="interval", or copies=None.',
            )
        if copies is not None:
            check_copies(copies)
        own_device = _device_of(backend, torch.device(device))
        limits = timeouts or Timeouts(heartbeat_s=heartbeat_s, dead_after_s=dead_after_s)
        others: tuple[str, ...] = ()
        if isinstance(place, RankPlace):
            if place.host not in _THIS_HOST:
                others = place.host, ANYWHERE
            connect: Callable[[], dist.Store] = partial(place.store, timeout_s=limits.agree_s)
            self.rank = place.rank if rank is None else rank
            incarnation = place.incarnation
        else:
            incarnation = 0
            connect = place
            if rank is None:
                raise ConfigError(
                    "Session: rank",
                    found="a function that connects to the store, and no rank",
                    why="The function does not tell which rank this process is.",
                    fix="Give rank=, or a RankPlace.",
                )
            self.rank = rank
        if is_spare and self.rank in topology.ranks:
            raise ConfigError(
                f"Session: rank {self.rank} as a spare",
                found=f"a topology of {topology.world_size} ranks, of which it is one",
                why="A spare has no place of its own, and takes that of any rank.",
                fix=f"Number spares from {topology.offset + topology.world_size} on, or leave "
                "is_spare away.",
            )
        self._job = Job(
            topology=topology,
            units=dict(units),
            build=build,
            policy=policy or Policy(),
            failures=failures or Failures(),
            groups=groups if callable(groups) else tuple(groups),
            strategy=strategy,
            copies=copies,
            has_hosts=host is not None,
            backend=backend,
            restore=restore,
            has_end=at_end is not None,
            facts=dict(facts or {}),
            timeouts=limits,
            device=own_device,
        )
        with store_errors(), contextlib.ExitStack() as network:
            # Until the session ends: each generation connects.
            network.enter_context(reachable_interface(*others))
            self._membership = Membership(
                connect,
                self.rank,
                self._job.first_ranks,
                {one: topology.coordinates(one).get("dp", 0) for one in topology.ranks},
                self._job.all_facts(),
                limits,
                incarnation,
                host=host,
                is_spare=is_spare,
                are_enough=None if restore is None else self._job.has_plan,
            )
            self._network = network.pop_all()
        self._recovery = Recovery(self._job, self._membership)
        self._step_end = StepEnd(self._recovery, self._membership, self._job.device)
        self._at_end = at_end
        self._is_closed = False
        try:
            self._recovery.start()
        except BaseException as error:
            self._leave(error)
            raise
        self.rank = self._membership.rank

    # -- what there is now -------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Number of steps that are applied, which is the number of the next one."""
        return self._recovery.applied

    @property
    def generation(self) -> int:
        """Number of changes of membership so far."""
        return self._membership.number

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks that are there now, idle ones included, ascending."""
        return self._membership.ranks

    @property
    def plan(self) -> NtpPlan:
        """The plan of this generation."""
        return self._recovery.require_state().plan

    @property
    def groups(self) -> Groups:
        """The groups of this generation; operations end with a `PeerError` when a rank fails."""
        return self._recovery.require_opened().groups

    @property
    def model(self) -> nn.Module:
        """The model of this generation."""
        return self._recovery.require_built().model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of this generation."""
        return self._recovery.require_built().optimizer

    @property
    def sync(self) -> GradSync:
        """The sums of gradients of this generation."""
        return self._recovery.require_sync()

    @property
    def is_idle(self) -> bool:
        """Whether this rank has no units now; `attempts` then waits for the others by itself."""
        return self._recovery.require_state().built is None

    @property
    def transitions(self) -> tuple[Transition, ...]:
        """How each generation of this rank came about, and what that took; the newest last."""
        return tuple(self._recovery.transitions)

    @property
    def failure(self) -> str | None:
        """Why the ranks leave this generation, or None; for waits of the caller's own."""
        return self._membership.watch.failure()

    # -- steps -------------------------------------------------------------------------------

    def attempts(self, *, until: int) -> Iterator[Attempt]:
        """Attempts at all steps up to `until`, each to be entered by `with`. Collective.

        After a failure the next attempt is at the same step, unless that was applied. To end
        earlier, call `request_stop`: where a rank dies, others do not come to a `break` of theirs.

        Args:
            until: Number of steps after which there are none; the same on all ranks.

        Raises:
            ConfigError: An attempt was not entered, or not committed; or another rank has ended
                before its step.
            DivergenceError: Ranks gave another `until` or `max_norm`; or replicas of different
                degrees have drifted apart, as with an optimizer that is not elementwise.
            StateLostError: Ranks died that alone held some units, and there is no `restore`.
            FencedError: The others went on without this rank.
        """
        self._step_end.until = until
        while self.step < until and not self._recovery.stops:
            if self._is_closed:
                raise ClosedError(
                    "Session.attempts",
                    found="a session that was closed",
                    why="Its groups are gone.",
                    fix="Make another session.",
                )
            if (reason := self.failure) is not None:
                self._step_end.begin_generation(reason)
                continue
            self._recovery.begin()
            if self.is_idle:
                with Attempt(self._step_end):
                    self._step_end.apply_together()
            else:
                attempt = Attempt(self._step_end)
                yield attempt
                if not attempt.was_entered:
                    raise ConfigError(
                        "Session.attempts",
                        found="an attempt that was not entered",
                        why="The with block takes the errors of ranks that die.",
                        fix="Write `with attempt as step:` around each step.",
                    )

    def set_speed(self, rank: int, speed: float) -> None:
        """Give a rank units in proportion to a relative speed, from the next step on. Local.

        Any rank may call it, also for another one. The change takes place at the end of this
        rank's next step, when all ranks begin another generation; the last speed given counts.

        Args:
            rank: Global rank.
            speed: Speed relative to the fastest ranks; 1 for a rank that is not slow.

        Raises:
            ConfigError: A rank that the job does not have, or a speed that is not above 0 and at
                most 1.
        """
        if rank not in self._job.topology.ranks or not 0 < speed <= 1:
            raise ConfigError(
                f"Session.set_speed: rank {rank}, speed {speed}",
                found="a rank that the job does not have, or a speed that is not above 0 and at "
                "most 1",
                why="Units are dealt out in proportion to speeds, relative to the fastest rank.",
                fix="Give a global rank, and the time of the fastest rank over that of this one.",
            )
        with store_errors():
            self._membership.records.set_speed(rank, speed)
        self._step_end.asks_generation = True

    def gather_state(self) -> Iterator[tuple[str, Tensor]]:
        """The state of this rank's units, whole, such as for a checkpoint; see `shard_views`.

        Collective over the ranks with units, each of which goes through all of it, and keeps what
        it needs: with `copies` a tensor of the optimizer's state, of which others own parts, is
        gathered when its turn comes. Else local.

        Yields:
            Name and tensor, as `state_tensors` names them; parameters and buffers of the model, and
            what its optimizer has, are those themselves.

        Raises:
            PeerError: Another rank failed; the `with` block of an attempt takes it.
        """
        return self._recovery.require_built().gather(self._recovery.open_group)

    def request_stop(self) -> None:
        """Have all ranks end after the next step, such as before a time limit. Local."""
        with store_errors():
            self._membership.records.ask_to_stop()
        self._step_end.asks_generation = True

    def check_fence(self) -> None:
        """Raise `FencedError` if the others went on without this rank. Local.

        To be called before anything is written that outlives the process, such as a checkpoint.
        """
        with store_errors():
            self._membership.check_fence()

    # -- its end -----------------------------------------------------------------------------

    def close(self) -> None:
        """Wait until all ranks have come here, and end. Collective; again does nothing.

        A rank that waits here still helps the others when one dies.

        Raises:
            StateLostError: Steps are lost with ranks that died; the job goes on from its last
                checkpoint when it is started again.
            PeerTimeoutError: Ranks did not come in time.
            TopologyError: The ranks that are left cannot go on; `at_end` was called.
        """
        if self._is_closed:
            return
        try:
            self._end_together()
        except BaseException as error:
            self._leave(error)
            raise
        self._is_closed = True
        try:
            self._recovery.close()
        finally:
            self._membership.close()
            self._network.close()
        if self._recovery.ending is not None:
            raise self._recovery.ending

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.close()
        else:
            self._leave(error)

    # -- how it is done ----------------------------------------------------------------------

    def _end_together(self) -> None:
        """Wait until all ranks have come to the end of the job; help them when one dies."""
        recovery, applied = self._recovery, self._recovery.applied
        with store_errors():
            while not self._membership.is_over:
                reason = self._failure_at_end()
                if reason is None and self._membership.finish(recovery.applied):
                    return
                recovery.next_generation(reason or self.failure or "other ranks have met")
                if recovery.applied < applied:
                    raise StateLostError(
                        "Session.close",
                        found=f"step {recovery.applied}, to which the state was restored",
                        why=f"{applied} steps were applied, the last of them are lost with ranks "
                        "that died, and a program that closes its session attempts none again.",
                        fix="Start the job again from its last checkpoint.",
                    )

    def _failure_at_end(self) -> str | None:
        """Call `at_end`; the reason to form a quorum if another rank failed meanwhile."""
        try:
            if self._at_end is not None and not self.is_idle:
                self._at_end(self)
        except Exception as error:
            reason = self._recovery.recoverable_reason(error)
            if reason is None:
                raise
            return reason
        return None

    def _leave(self, error: BaseException) -> None:
        """End this rank alone, and tell the others unless they know."""
        if self._is_closed:
            return
        self._is_closed = True
        if not isinstance(error, FencedError | StoreLostError):
            try:
                self._membership.leave(error)
            except dist.DistError as lost:
                error.add_note(f"the store was not told: {lost}")
        try:
            self._recovery.abandon()
        finally:
            self._membership.close()
            self._network.close()


def _device_of(backend: str, device: torch.device) -> torch.device:
    """The device of tensors between ranks, once the backend may be used on it. Local."""
    if backend == "gloo":
        return device
    if backend != "nccl" or not dist.is_nccl_available() or not torch.cuda.is_available():
        raise UnsupportedError(
            f"Session: backend={backend!r}",
            found="a backend that Session does not know"
            if backend != "nccl"
            else "a torch without NCCL, or no GPU",
            why="A rank that dies leaves operations open, which each backend ends in its own way.",
            fix='Use backend="gloo", or on GPUs "nccl".',
        )
    if device.type != "cuda":
        raise ConfigError(
            f"Session: backend='nccl', device={str(device)!r}",
            found="a device that NCCL does not know",
            why="Gradients and state move between ranks on this device.",
            fix='Give device="cuda", or the device of this rank.',
        )
    outlive_failures()
    warnings.warn(
        "Session has never run on NCCL: the end of operations that a dead rank leaves open is "
        "written against torch's sources. Please report what you see.",
        stacklevel=3,
    )
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
