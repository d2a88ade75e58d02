"""How the state of a rank comes from one generation to the next."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pcomm.core.errors import ConfigError, FencedError, PeerError, PeerTimeoutError
from pcomm.core.tensor_parallel import param_layouts_of
from pcomm.ntp.planning.plan import Plan
from pcomm.ntp.reshard import Moved, StateLostError, reshard, state_tensors
from pcomm.ntp.session import store_errors
from pcomm.ntp.session.job import Job
from pcomm.ntp.session.left_behind import wait_or_leave
from pcomm.ntp.session.membership import Membership
from pcomm.ntp.session.opening import EVERYONE, Opened, open_generation
from pcomm.ntp.session.resume_point import NONE, Arrival, ResumePoint, resume_point
from pcomm.ntp.session.suspicion import SuspectedFailure
from pcomm.ntp.session.training_state import Built, scalars_of, set_scalars
from pcomm.ntp.sync.grad_sync import GradSync

__all__ = ["Recovery", "Transition", "is_setback"]

# Generations in a row without a step, of the same ranks, before the error counts as no accident.
_MOST_IN_VAIN = 5


@dataclass(frozen=True)
class Held:
    """The state of one generation on this rank.

    Args:
        generation: Number of the generation.
        plan: Plan under which the state lies.
        built: Model and optimizer; None on a rank without units.
    """

    generation: int
    plan: Plan
    built: Built | None


@dataclass(frozen=True)
class Transition:
    """How a generation came about, as one of its ranks saw it.

    Args:
        generation: Number of the generation.
        reason: Reason for leaving the one before.
        ranks: Ranks of the generation.
        gone: Ranks of the one before whose processes are gone, each with the reason.
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


def is_setback(error: BaseException) -> bool:
    """Whether an error means that other ranks are gone, and not that this one cannot go on."""
    if isinstance(error, FencedError | store_errors.StoreLostError):
        return False
    return isinstance(error, PeerError | PeerTimeoutError)


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
        is_ready: True while the gradients of the next step are summed and not applied.
        stops: True once a rank has asked to end, known to all.
        transitions: How each generation came about and what it took, the newest last.
    """

    def __init__(self, job: Job, membership: Membership) -> None:
        self._job, self._membership = job, membership
        self.held: Held | None = None
        self._complete: Held | None = None
        self.opened: Opened | None = None
        self.sync: GradSync | None = None
        self.applied, self.is_ready, self.stops = 0, False, False
        self._buffers: tuple[int, dict[str, Tensor]] = 0, {}
        self._in_vain: tuple[tuple[tuple[int, ...], int], int] = ((), -1), 0
        self.transitions: list[Transition] = []

    # -- steps -------------------------------------------------------------------------------

    def begin(self) -> None:
        """Keep the buffers, which a forward changes, for the case that the step is repeated."""
        if self.held is not None and self.held.built is not None:
            found = _buffers_of(self.held.built.model)
            self._buffers = self.applied, {name: one.clone() for name, one in found.items()}

    def apply(self) -> None:
        """Apply the step whose gradients are summed. Local."""
        if self.held is not None and self.held.built is not None:
            self.held.built.optimizer.step()
        # One statement after the other: a rank that dies between them is gone with its state.
        self.applied, self.is_ready = self.applied + 1, False

    # -- generations -------------------------------------------------------------------------

    def start(self) -> None:
        """Enter the job: as a rank of generation 0, or as a newcomer. Collective."""
        started_s = time.monotonic()
        with store_errors.told():
            states = self._membership.enter()
            self.stops = self._membership.stops
            reason = "the job starts" if not states else "this process joins"
            try:
                self._settle(resume_point(states), reason, time.monotonic() - started_s)
                return
            except (PeerError, PeerTimeoutError) as error:
                self._check_setback(error)
                told = _headline(error)
        self.move(told)

    def move(self, reason: str) -> None:
        """Leave the generation and enter the next one that holds. Collective.

        Args:
            reason: Reason, for the other ranks and for `transitions`.
        """
        while True:
            started_s = time.monotonic()
            arrival = Arrival(
                NONE if self.held is None else self.held.generation,
                NONE if self._complete is None else self._complete.generation,
                self.applied,
                self.is_ready,
            )
            with store_errors.told():
                decision, states = self._membership.meet(reason, arrival)
                if decision.is_end:
                    return
                self.stops = self._membership.stops
                try:
                    self._settle(resume_point(states), reason, time.monotonic() - started_s)
                    return
                except (PeerError, PeerTimeoutError) as error:
                    self._check_setback(error)
                    self.count_in_vain(error)
                    reason = _headline(error)

    def count_in_vain(self, error: BaseException) -> None:
        """Raise an error that has come again and again with the same ranks and at the same step."""
        if not isinstance(error, SuspectedFailure | PeerTimeoutError):
            # Another rank has met an error, and leaves if it meets the same one for ever.
            return
        now = self._membership.ranks, self.applied
        before, count = self._in_vain
        self._in_vain = now, count + 1 if now == before else 1
        if self._in_vain[1] > _MOST_IN_VAIN:
            raise error

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

    def _check_setback(self, error: Exception) -> None:
        self._membership.check_store()
        if not is_setback(error):
            raise error

    def _settle(self, point: ResumePoint, reason: str, meet_s: float) -> None:
        """Open the generation, and bring the state there."""
        member, job = self._membership, self._job
        clock = _Clock()
        self._take_up(point)
        self.abandon()
        made = job.plan(member.ranks, member.speeds)
        self._publish(point)
        control = member.control()
        self.opened = wait_or_leave(
            lambda: open_generation(
                made,
                control,
                job.groups_of(made),
                job.strategy,
                member.watch.failure,
                backend=job.backend,
                timeout_s=job.patience.operation_s,
            ),
            member.watch.check,
            Opened.abandon,
            f"pcomm session: connects generation {member.number}",
        )
        open_s = clock.lap()
        built = None
        if member.rank not in made.idle_ranks:
            built = job.build(made, self.opened.groups, member.rank)
        build_s = clock.lap()
        try:
            moved = self._fill(point, made, built)
        except StateLostError:
            # Raised on all ranks, before anything was sent.
            if job.restore is None:
                raise
            if built is not None:
                # Its optimizer has the scalars of the state that is lost.
                built = job.build(made, self.opened.groups, member.rank)
            moved = None
            self._restore(made, built)
        if built is not None:
            self.sync = GradSync(
                made, built.model, self.opened.groups, rank=member.rank, strategy=job.strategy
            )
        self._complete = Held(member.number, made, built)
        lines = [f"steps: {self.applied}", *made.agreed_lines()]
        lines += [f"{name}: {fact}" for name, fact in job.all_facts().items()]
        control.agree("Session: the state has arrived", lines)
        # From here on all ranks have the new state, so the old one is not needed any more.
        self.held, self._complete = self._complete, None
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
        member.gone.clear()

    def _take_up(self, point: ResumePoint) -> None:
        """Hold the state of `point`: follow where this rank is behind."""
        complete, self._complete = self._complete, None
        if complete is not None and complete.generation == point.generation:
            self.held = complete
        if self._membership.rank not in point.holders:
            self.held = None
        if self._membership.rank in point.behind:
            self.apply()
        elif self.held is not None and self.held.built is not None:
            step, kept = self._buffers
            if step == self.applied:
                for name, one in _buffers_of(self.held.built.model).items():
                    if name in kept:
                        one.copy_(kept[name])
        self._buffers = 0, {}
        self.applied, self.is_ready = point.applied, False

    def _publish(self, point: ResumePoint) -> None:
        """Write what newcomers need; for each stage one rank does, that has its state."""
        if self.held is None:
            return
        member, held = self._membership, self.held
        if member.rank == point.holders[0]:
            member.records.publish(f"plan/{member.number}", held.plan.to_json())
        speakers: dict[int, int] = {}
        # A rank that did not hear that all were ready has not run what the program does after that,
        # such as setting a learning rate; it speaks only where no other one can.
        ranks = self._with_units(point, held.plan)
        for rank in sorted(ranks, key=lambda one: (one in point.behind, one)):
            speakers.setdefault(held.plan.place(rank).stage, rank)
        for stage, rank in speakers.items():
            if rank == member.rank and held.built is not None:
                told = scalars_of(held.built)
                member.records.publish(f"scalars/{member.number}/{stage}", told)

    def _fill(self, point: ResumePoint, made: Plan, built: Built | None) -> Moved | None:
        """Give the new model its state: from other ranks, from a checkpoint, or as it was built."""
        if point.generation == NONE:
            self._restore(made, built)
            return None
        member = self._membership
        text = member.records.published(f"plan/{member.number}") or ""
        old = Plan.from_json(text) if self.held is None else self.held.plan
        source = {}
        if self.held is not None and self.held.built is not None:
            source = state_tensors(self.held.built.model, self.held.built.optimizer)
        target, layouts = {}, {}
        if built is not None:
            stage = made.place(member.rank).stage
            told = member.records.published(f"scalars/{member.number}/{stage}")
            if told is not None:
                set_scalars(built, told)
            target = state_tensors(built.model, built.optimizer)
            layouts = param_layouts_of(built.model)
        assert self.opened is not None
        return reshard(
            old,
            made,
            self.opened.every[EVERYONE],
            rank=member.rank,
            source=source,
            target=target,
            param_layouts=layouts,
            holders=self._with_units(point, old),
            device=torch.device(self._job.device),
        )

    def _restore(self, made: Plan, built: Built | None) -> None:
        """Load the checkpoint on all ranks, or begin at step 0."""
        step = 0
        if built is not None and self._job.restore is not None:
            step = self._job.restore(made, built.model, built.optimizer)
        assert self.opened is not None
        # Ranks without units take the number of the others.
        told = torch.tensor([step], dtype=torch.int64, device=self._job.device)
        found = self.opened.every[EVERYONE].collectives.all_reduce(told, op="max")
        self.applied = int(found.item())
        if built is not None and step != self.applied:
            raise ConfigError(
                "Session: restore",
                found=f"step {step} on rank {self._membership.rank}, {self.applied} on another",
                why="All ranks go on from one step.",
                fix="Return the same step on all ranks, that of the checkpoint.",
            )

    def _with_units(self, point: ResumePoint, old: Plan) -> list[int]:
        return [rank for rank in point.holders if not old.place(rank).is_idle]


def _buffers_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """The buffers that move with the state."""
    saved = model.state_dict(keep_vars=True)
    return {name: one.detach() for name, one in model.named_buffers() if name in saved}


class _Clock:
    """Seconds between one look and the next."""

    def __init__(self) -> None:
        self._last_s = time.monotonic()

    def lap(self) -> float:
        before, self._last_s = self._last_s, time.monotonic()
        return self._last_s - before


def _headline(error: BaseException) -> str:
    return str(error).splitlines()[0]
