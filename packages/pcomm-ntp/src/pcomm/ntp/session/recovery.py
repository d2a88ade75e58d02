"""How the state of a rank comes from one generation to the next."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from pcomm.core.control.agreement import agree_in_group
from pcomm.core.errors import (
    ClosedError,
    ConfigError,
    DivergenceError,
    FencedError,
    LayoutError,
    PeerError,
    PeerTimeoutError,
    TopologyError,
    UnsupportedError,
)
from pcomm.core.groups.group import Group
from pcomm.ntp.planning.owners import Owners
from pcomm.ntp.planning.plan import NtpPlan
from pcomm.ntp.redistribute import Moved, StateLostError
from pcomm.ntp.redistribute.agreement import differing_units
from pcomm.ntp.redistribute.planned_moves import OwnedState
from pcomm.ntp.session.failure_detection import SuspectedFailure
from pcomm.ntp.session.generation import Clock, Job, Opened, Transition, open_generation
from pcomm.ntp.session.membership import Membership
from pcomm.ntp.session.records import StoreLostError, headline, store_errors
from pcomm.ntp.session.resume_point import NONE, RankState, ResumePoint, resume_point
from pcomm.ntp.session.training_state import (
    BufferSnapshot,
    GenerationState,
    StateTransfer,
    TrainState,
    agreed_lines,
    check_built,
    scalars_of,
)
from pcomm.ntp.sync.grad_groups import group_names, stage_group
from pcomm.ntp.sync.grad_sync import GradSync

__all__ = ["Recovery"]


# Replicas of different degrees are compared after their first step, and after each so many.
_DRIFT_STEPS = 100


class Recovery:
    """The state of this rank, and how it goes from generation to generation.

    Args:
        job: Settings of the session.
        membership: This process as a member of the job.

    Attributes:
        held: State that counts; None before the first generation is complete.
        opened: Groups of the generation; None while there are none.
        sync: Sums of gradients; None on a rank without units.
        applied: Number of steps in the state.
        is_whole: False from a step on that owners have applied until their weights have arrived.
        is_ready: True while the gradients of the next step are summed and not applied.
        stops: True once a rank has asked to end, known to all.
        transitions: How each generation came about and what it took, the newest last.
        ending: Error with which the job ends, since the ranks that are left cannot go on; None
            while they can. They hold all units, and are to call `at_end` before.
    """

    def __init__(self, job: Job, membership: Membership) -> None:
        self._job, self._membership = job, membership
        self._transfer = StateTransfer(job.device, job.restore, membership, job.copies)
        self.held: GenerationState | None = None
        self._complete: GenerationState | None = None
        self.opened: Opened | None = None
        self.sync: GradSync | None = None
        self.applied, self.is_ready, self.stops = 0, False, False
        self.is_whole = True
        self._buffers, self._retries = BufferSnapshot(), RetryLimit()
        self._has_state = False
        self._applied_at_start = 0
        self.ending: TopologyError | None = None
        self.transitions: list[Transition] = []

    # -- steps -------------------------------------------------------------------------------

    def begin(self) -> None:
        """Keep the buffers, which a forward changes, for the case that the step is repeated."""
        self._membership.watch.step = self.applied
        if self.held is not None and self.held.built is not None:
            self._buffers.keep(self.applied, self.held.built.model)

    def check_drift(self) -> None:
        """Compare replicas of different degrees now and then. Collective over a stage.

        An optimizer that is not elementwise lets them drift apart.

        Raises:
            DivergenceError: Ranks hold other numbers of the same units.
        """
        held, steps = self.held, self.applied - self._applied_at_start
        is_due = steps == 1 or (steps > 0 and steps % _DRIFT_STEPS == 0)
        if held is None or held.built is None or not is_due:
            return
        made = held.plan
        stage = made.place(self._membership.rank).stage
        forms = {
            made.form(replica, stage) for replica, own in enumerate(made.degrees) if own[stage]
        }
        if len(forms) > 1:
            split = {
                f"model.{name}": one.detach()
                for name, one in held.built.model.named_parameters()
                if made.units_of(name)
            }
            found = self._differing(made, held.built, split, is_exact=False)
            if found is not None:
                raise DivergenceError(
                    "Session: replicas of different degrees, trained by "
                    f"{type(held.built.optimizer).__name__}",
                    found=found,
                    why="Their shards are cut at different places. An optimizer that takes norms "
                    "or products of a shard, or draws at random, changes the same element "
                    "differently on each.",
                    fix="Use an elementwise optimizer, such as AdamW or SGD, with the same "
                    "settings on all ranks, and go on from a checkpoint of before.",
                )

    def check_device(self) -> None:
        """Wait for the device, and raise if what it has may come of an aborted operation. Local.

        On the CPU an operation that was left has raised by itself.
        """
        if self._job.device.type == "cuda":
            torch.cuda.synchronize(self._job.device)
            self._membership.watch.check()

    def apply(self) -> None:
        """Apply the step whose gradients are summed, to what this rank owns. Local.

        Raises:
            UnsupportedError: The optimizer has state that could not move when a rank dies.
        """
        if self.held is not None and self.held.built is not None:
            self.held.built.step()
            if not self._has_state:
                # An optimizer makes its state in its first step.
                scalars_of(self.held.built)
                self._has_state = True
        # One statement after the other: a rank that dies between them is gone with its state.
        is_all = self.held is None or self.held.built is None or self.held.built.owned is None
        self.applied, self.is_ready, self.is_whole = self.applied + 1, False, is_all

    def gather_weights(self) -> None:
        """Get the weights that other ranks own, and send this one's. Collective over a stage.

        Raises:
            PeerError: Another rank failed; the step is applied nevertheless.
        """
        if not self.is_whole:
            owned = self.require_built().owned
            assert owned is not None
            owned.gather_weights(self.open_group)
            self.is_whole = True

    def open_group(self, ranks: tuple[int, ...]) -> Group:
        """The open group of ranks that sum gradients together."""
        names = group_names(self.require_state().plan, self._job.strategy)
        return self.require_opened().groups[names[ranks]]

    # -- what there is, or an error ----------------------------------------------------------

    def require_state(self) -> GenerationState:
        """The state that counts."""
        if self.held is None:
            raise _without("state")
        return self.held

    def require_built(self) -> TrainState:
        """Model and optimizer of this generation."""
        built = self.require_state().built
        if built is None:
            raise _without("model")
        return built

    def require_opened(self) -> Opened:
        """The groups of this generation."""
        if self.opened is None:
            raise _without("groups")
        return self.opened

    def require_sync(self) -> GradSync:
        """The sums of gradients of this generation."""
        if self.sync is None:
            raise _without("sync")
        return self.sync

    # -- generations -------------------------------------------------------------------------

    def start(self) -> None:
        """Enter the job: as a rank of generation 0, or as a newcomer. Collective."""
        started_s = time.monotonic()
        with store_errors():
            states = self._membership.enter()
            self.stops = self._membership.stops
            reason = "the job starts" if not states else "this process joins"
            failed = self._try_to_enter(states, reason, started_s)
            if failed is not None:
                self._membership.try_connections()
        if failed is not None:
            self.next_generation(failed)

    def next_generation(self, reason: str) -> None:
        """Leave the generation and enter the next one that holds. Collective.

        Args:
            reason: Reason, for the other ranks and for `transitions`.

        Raises:
            FencedError: The others have gone on without this rank.
            StateLostError: No rank that is left has some units, and there is no checkpoint.
            StoreLostError: The process that hosts the store has ended.
        """
        told: str | None = reason
        while told is not None:
            started_s = time.monotonic()
            state = RankState(
                NONE if self.held is None else self.held.generation,
                NONE if self._complete is None else self._complete.generation,
                self.applied,
                self.is_ready,
                self.is_whole,
            )
            with store_errors():
                decision, states = self._membership.form_quorum(told, state)
                if decision.is_end:
                    return
                self.stops = self._membership.stops
                told = self._try_to_enter(states, told, started_s)
                if told is not None:
                    self._membership.try_connections()

    def recoverable_reason(self, error: BaseException) -> str | None:
        """The reason to form a quorum, of an error that other ranks caused; None for others.

        Raises:
            StoreLostError: The store is lost, of which the error came.
            ConfigError: Another rank has ended before the step that this one attempts.
            PeerError: It has come again and again with the same ranks and at the same step.
        """
        if not is_recoverable(error):
            return None
        self._membership.check_store()
        if (ended := self._membership.watch.out_of_steps()) is not None:
            raise ConfigError(
                f"Session.attempts: the attempt at step {self.applied}",
                found=ended,
                why="All ranks take part in each step, and that one waits for the others to end.",
                fix="Give the same `until` on all ranks, and call request_stop() to end earlier.",
            )
        self._retries.count(error, self._membership.ranks, self.applied)
        if isinstance(error, SuspectedFailure) and self.opened is not None:
            # Before all meet who are alive, since they would connect once more in vain. Where ranks
            # end since the store is lost, their connections may tell it before the watch does.
            with store_errors():
                self._membership.try_connections()
        return headline(error)

    def close(self) -> None:
        """Close the groups. Collective: all ranks have come to the end."""
        opened, self.opened, self.sync = self.opened, None, None
        if opened is not None:
            opened.close()

    def abandon(self) -> None:
        """Leave the groups as they are. Local."""
        opened, self.opened, self.sync = self.opened, None, None
        if opened is not None:
            opened.abandon()

    # -- how it is done ----------------------------------------------------------------------

    def _try_to_enter(
        self, states: Mapping[int, RankState], reason: str, started_s: float
    ) -> str | None:
        """Enter the generation; why another one is needed, or None."""
        try:
            self._enter(resume_point(states), reason, time.monotonic() - started_s)
        except (PeerError, PeerTimeoutError) as error:
            failed = self.recoverable_reason(error)
            if failed is None:
                raise
            return failed
        except (LayoutError, StateLostError, UnsupportedError) as error:
            if self.ending is None:
                raise
            raise _cannot_go_on(self.ending, self.applied, is_saved=False) from error
        return None

    def _enter(self, point: ResumePoint, reason: str, meet_s: float) -> None:
        """Open the generation, and bring the state there."""
        member, clock = self._membership, Clock()
        self._take_up(point)
        self.abandon()
        made = self._plan(point)
        self._transfer.publish(point, self.held)
        control = member.control()
        self.opened = opened = open_generation(self._job, made, control, member.watch)
        open_s = clock.lap()
        built = self._build(made, opened, is_start=point.generation == NONE)
        build_s = clock.lap()
        built, owners, moved = self._bring(point, made, built, opened)
        if built is not None:
            self.sync = GradSync(
                made,
                built.model,
                opened.groups,
                rank=member.rank,
                strategy=self._job.strategy,
                param_layouts=built.layouts,
            )
            self._compare(made, built, owners, opened, is_start=moved is None)
        self._complete = GenerationState(member.number, made, built, owners)
        self.check_device()
        lines = [f"steps: {self.applied}", *made.agreed_lines()]
        lines += [f"{name}: {fact}" for name, fact in self._job.all_facts().items()]
        control.agree("Session: the state has arrived", lines)
        # From here on all ranks have the new state, so the old one is not needed any more.
        self.held, self._complete, self._applied_at_start = self._complete, None, self.applied
        self.is_whole = True
        took = Transition(
            generation=member.number,
            reason=reason,
            ranks=member.ranks,
            gone=dict(member.gone),
            meet_s=meet_s,
            open_s=open_s,
            build_s=build_s,
            move_s=clock.lap(),
            moved=moved,
        )
        self.transitions.append(took)
        member.note_complete()

    def _plan(self, point: ResumePoint) -> NtpPlan:
        """The plan of the generation; where there is none, that for `at_end` alone."""
        member, job = self._membership, self._job
        try:
            made = job.plan(member.ranks, member.speeds)
        except TopologyError as error:
            if point.generation == NONE:
                raise
            self.ending = _cannot_go_on(error, self.applied, is_saved=job.has_end)
            if not job.has_end:
                raise self.ending from error
            made = job.last_plan(member.ranks, member.speeds)
        if self.ending is not None:
            # Also for a process that joins when another rank dies in the end.
            member.records.ask_to_stop()
            self.stops = True
        return made

    def _take_up(self, point: ResumePoint) -> None:
        """Hold the state of `point`: follow where this rank is behind.

        Gradients of a step that is repeated go with the model that they were computed for.
        """
        complete, self._complete = self._complete, None
        if complete is not None and complete.generation == point.generation:
            self.held, self.is_whole = complete, True
        if self._membership.rank not in point.holders:
            self.held = None
        if self._membership.rank in point.behind:
            self.apply()
        elif self.held is not None and self.held.built is not None:
            self._buffers.set_back(self.applied, self.held.built.model)
        self._buffers.drop()
        self.applied, self.is_ready = point.applied, False

    def _build(self, made: NtpPlan, opened: Opened, *, is_start: bool) -> TrainState | None:
        """Model and optimizer of this rank; None if it has no units."""
        rank = self._membership.rank
        if rank in made.idle_ranks:
            return None
        built = self._job.build(made, opened.groups, rank)
        has_owners = self._job.copies is not None
        built = check_built(built, made, is_start=is_start, has_owners=has_owners)
        # Those of an attempt that failed, where the model is that of the generation before.
        built.model.zero_grad(set_to_none=True)
        return built

    def _bring(
        self, point: ResumePoint, made: NtpPlan, built: TrainState | None, opened: Opened
    ) -> tuple[TrainState | None, Owners | None, Moved | None]:
        """Bring a model its state: from other ranks, from a checkpoint, or as it was built."""
        group = opened.everyone
        if point.generation != NONE:
            try:
                return self._transfer.move(point, self.held, made, built, group)
            except StateLostError:
                if self._job.restore is None or self.ending is not None:
                    raise
                # What is held of it is no state to go on from if restoring fails on some ranks.
                self.held = None
                # The optimizer has the scalars of the state that is lost.
                built = self._build(made, opened, is_start=False)
        self.applied = self._transfer.restore(made, built, group)
        return *self._transfer.first_owners(made, built), None

    def _compare(
        self,
        made: NtpPlan,
        built: TrainState,
        owners: Owners | None,
        opened: Opened,
        *,
        is_start: bool,
    ) -> None:
        """Compare optimizers and numbers of the ranks of a stage, before the state counts."""
        lines: list[str] = []
        error: Exception | None = None
        try:
            lines = agreed_lines(built)
        except Exception as caught:
            error = caught
        agree_in_group(self._stage(made, opened), "Session: optimizer", lines, error=error)
        tensors = built.tensors
        if not is_start:
            # Each replica's own, such as running means of its samples.
            for name, _ in built.model.named_buffers():
                tensors.pop(f"model.{name}", None)
        owned = (
            None
            if owners is None
            else OwnedState(owners, owners, made.stage_ranks(self._membership.rank))
        )
        found = self._differing(made, built, tensors, is_exact=is_start, owned=owned)
        if found is not None:
            if is_start:
                raise DivergenceError(
                    "Session: the state at the start",
                    found=found,
                    why="Replicas begin with equal numbers, and what has no units is the same on "
                    "all ranks and moves as a whole; so it cannot be a copy of a shard.",
                    fix="Seed alike on all ranks, and cut the initial values of whole tensors. "
                    "Give units to a buffer that is cut like a parameter, or register it with "
                    "persistent=False.",
                )
            raise DivergenceError(
                "Session: the state after a change of ranks",
                found=found,
                why="The state has moved, and all ranks that hold a range of units should hold the "
                "same numbers. They were moved wrongly, or replicas had drifted apart before.",
                fix="Use an elementwise optimizer, such as AdamW or SGD, and settings that are the "
                "same on all ranks; else start from the last checkpoint, and report this.",
            )

    def _differing(
        self,
        made: NtpPlan,
        built: TrainState,
        tensors: Mapping[str, torch.Tensor],
        *,
        is_exact: bool,
        owned: OwnedState | None = None,
    ) -> str | None:
        assert self.opened is not None
        return differing_units(
            made,
            self._stage(made, self.opened),
            rank=self._membership.rank,
            tensors=tensors,
            param_layouts=built.layouts,
            is_exact=is_exact,
            device=self._job.device,
            owned=owned,
        )

    def _stage(self, made: NtpPlan, opened: Opened) -> Group:
        """All used ranks of the stage of this rank."""
        stage = made.place(self._membership.rank).stage
        return opened.groups[stage_group(made, stage, self._job.strategy)]


def _without(name: str) -> ClosedError:
    return ClosedError(
        f"Session: {name}",
        found=f"no {name}",
        why="A rank without units has no model, and a session that ended has no groups.",
        fix="Ask within an attempt; `is_idle` tells whether the rank has units.",
    )


def _cannot_go_on(error: TopologyError, applied: int, *, is_saved: bool) -> TopologyError:
    """The error of `plan` for the ranks that are left, and what is left of the training."""
    left = (
        f"at_end was called with the state after {applied} steps."
        if is_saved
        else "its last checkpoint is what is left, and at_end was not called."
    )
    return TopologyError(
        error.asked, found=error.found, why=error.why, fix=f"Start the job again: {left}"
    )


# Generations in a row without a step, of the same ranks, before the error counts as no accident.
_MOST_IN_VAIN = 5


def is_recoverable(error: BaseException) -> bool:
    """Whether an error means that other ranks are gone, and not that this one cannot go on."""
    if isinstance(error, FencedError | StoreLostError):
        return False
    return isinstance(error, PeerError | PeerTimeoutError)


class RetryLimit:
    """Counts recoverable errors of this rank since the ranks or the step were others. Local."""

    def __init__(self) -> None:
        self._ranks: tuple[int, ...] = ()
        self._applied, self._count = -1, 0

    def count(self, error: BaseException, ranks: tuple[int, ...], applied: int) -> None:
        """Count an error; raises one that has come again and again.

        Args:
            error: A recoverable error.
            ranks: Ranks of the generation.
            applied: Number of steps that are applied.
        """
        if not isinstance(error, SuspectedFailure | PeerTimeoutError):
            # Another rank has met an error, and leaves if it meets the same one for ever.
            return
        if (ranks, applied) != (self._ranks, self._applied):
            self._ranks, self._applied, self._count = ranks, applied, 0
        self._count += 1
        if self._count > _MOST_IN_VAIN:
            raise error
