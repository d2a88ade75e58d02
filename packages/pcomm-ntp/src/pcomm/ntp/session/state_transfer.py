"""How the model of a new generation gets its state: from other ranks, or from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pcomm.core.errors import ConfigError
from pcomm.core.groups.group import Group
from pcomm.core.tensor_parallel import ParamLayout
from pcomm.ntp.planning.plan import Plan
from pcomm.ntp.reshard import Moved, reshard, state_tensors
from pcomm.ntp.session.held import Held
from pcomm.ntp.session.job import Job, along_dp
from pcomm.ntp.session.membership import Membership
from pcomm.ntp.session.resume_point import ResumePoint
from pcomm.ntp.session.training_state import Built, scalars_of, set_scalars

__all__ = ["StateTransfer"]


class StateTransfer:
    """Brings the state that counts to the models of a generation.

    Args:
        job: Settings of the session.
        membership: This process as a member of the job.
    """

    def __init__(self, job: Job, membership: Membership) -> None:
        self._job, self._membership = job, membership

    def publish(self, point: ResumePoint, held: Held | None) -> None:
        """Write what newcomers need; for each stage one rank does, that has its state. Local.

        Args:
            point: State that counts.
            held: This rank's part of it, or None.

        Raises:
            UnsupportedError: The optimizer has state that cannot move.
        """
        if held is None:
            return
        member = self._membership
        if member.rank == point.holders[0]:
            member.records.publish(f"plan/{member.number}", held.plan.to_json())
        speakers: dict[int, int] = {}
        # A rank that did not hear that all were ready has not run what the program does after that,
        # such as setting a learning rate; it speaks only where no other one can.
        ranks = _with_units(point, held.plan)
        for rank in sorted(ranks, key=lambda one: (one in point.behind, one)):
            speakers.setdefault(held.plan.place(rank).stage, rank)
        for stage, rank in speakers.items():
            if rank == member.rank and held.built is not None:
                told = scalars_of(held.built)
                member.records.publish(f"scalars/{member.number}/{stage}", told)

    def move(
        self, point: ResumePoint, held: Held | None, made: Plan, built: Built | None, group: Group
    ) -> Moved:
        """Fill a new model and optimizer from what ranks hold. Collective over `group`.

        Args:
            point: State that counts; that of some generation.
            held: This rank's part of it, or None.
            made: Plan of the new generation.
            built: Model and optimizer that are filled; None on a rank without units.
            group: All ranks of the generation.

        Raises:
            StateLostError: On every rank, before anything was sent: no rank holds some units.
        """
        member = self._membership
        text = member.records.published(f"plan/{member.number}") or ""
        if held is None and not text:
            # Deleted, since a later generation is complete.
            member.check_fence()
        old = Plan.from_json(text) if held is None else held.plan
        if old.topology.axes != made.topology.axes:
            # The last generation of a job that cannot go on has a topology of its own.
            old, made = along_dp(old), along_dp(made)
        source = {}
        layouts: Mapping[str, ParamLayout] = {}
        if held is not None and held.built is not None:
            # A rank that has no units any more still has what others get.
            layouts = held.built.layouts
            source = state_tensors(held.built.model, held.built.optimizer)
        target = {}
        if built is not None:
            stage = made.place(member.rank).stage
            told = member.records.published(f"scalars/{member.number}/{stage}")
            if told is not None:
                set_scalars(built, told)
            target = state_tensors(built.model, built.optimizer)
            layouts = built.layouts
        return reshard(
            old,
            made,
            group,
            rank=member.rank,
            source=source,
            target=target,
            param_layouts=layouts,
            holders=_with_units(point, old),
            device=self._job.device,
        )

    def restore(self, made: Plan, built: Built | None, group: Group) -> int:
        """Load the checkpoint on all ranks, or begin at step 0. Collective over `group`.

        Args:
            made: Plan of the generation.
            built: Model and optimizer that are filled; None on a rank without units.
            group: All ranks of the generation.

        Returns:
            The step of the checkpoint, on ranks without units, too.

        Raises:
            ConfigError: On a rank whose checkpoint is of an earlier step than that of another one.
        """
        step = 0
        if built is not None and self._job.restore is not None:
            step = self._job.restore(made, built.model, built.optimizer)
        told = torch.tensor([step], dtype=torch.int64, device=self._job.device)
        applied = int(group.collectives.all_reduce(told, op="max").item())
        if built is not None and step != applied:
            raise ConfigError(
                "Session: restore",
                found=f"step {step} on rank {self._membership.rank}, {applied} on another",
                why="All ranks go on from one step.",
                fix="Return the same step on all ranks, that of the checkpoint.",
            )
        return applied


def _with_units(point: ResumePoint, old: Plan) -> list[int]:
    """The ranks that hold units of the state that counts."""
    return [rank for rank in point.holders if not old.place(rank).is_idle]
