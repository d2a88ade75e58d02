"""The result of `fully_shard`: parameters, `clip_grad_norm`, accumulation, whole state, reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pcomm.core.control.agreement import agree_in_group
from pcomm.core.errors import ConfigError, PcommError
from pcomm.core.groups.group import Group
from pcomm.core.tensor_parallel import optimizers as squares
from pcomm.fsdp.full_state import NameTable, load_whole, read_names, whole_state
from pcomm.fsdp.plan.group_plan import GroupPlan
from pcomm.fsdp.registered_memory import PooledMemory
from pcomm.fsdp.runtime.fsdp_runtime import FsdpRuntime
from pcomm.fsdp.runtime.schedule import ALL_REDUCED, Schedule
from pcomm.fsdp.runtime.shards import LocalParams, ParamShard
from pcomm.fsdp.torch_guards import Guards

if TYPE_CHECKING:
    from pcomm.core.simulate.program import Rail
    from pcomm.core.trace.events import Event
    from pcomm.core.trace.recording import Recorder
    from pcomm.fsdp.compute_costs import Costs
    from pcomm.fsdp.report import Report
    from pcomm.fsdp.separation import Separation

__all__ = ["Sharded"]


def _every(_name: str) -> bool:
    return True


class Sharded:
    """A model with shards as parameters outside of its forward and backward.

    The model is changed in place and called as before. The optimizer gets `parameters()`.

    Args:
        model: The model.
        runtime: State of the model and its schedule.
        names: The first name of each parameter, by each of its names in the model.
        separations: Measurements of `separate="auto"`.
        memory: Registered memory of the groups, if there is any.
        choice: The line about units that were found; empty if the caller named them.

    Attributes:
        model: The model that was sharded.
        plans: The plan of each parameter group, in the order of the units.
        separations: Measurements of `separate="auto"`, one for each pair of groups.
    """

    def __init__(
        self,
        model: nn.Module,
        runtime: FsdpRuntime,
        names: Mapping[str, str],
        separations: Sequence[Separation] = (),
        memory: PooledMemory | None = None,
        choice: str = "",
    ) -> None:
        self.model = model
        self.plans: tuple[GroupPlan, ...] = tuple(shard.plan for shard in runtime.shards)
        self.separations = tuple(separations)
        self._runtime, self._names = runtime, dict(names)
        self._memory, self._choice = memory, choice
        self._guards = Guards(model, runtime.shards, runtime.complete)

    @property
    def _shards(self) -> tuple[ParamShard | LocalParams, ...]:
        """The shards of all parameter groups; an error once this is closed."""
        return self._runtime.shards

    def close(self) -> None:
        """Take the model off its groups: hooks are removed, buffers and groups let go. Local.

        Closing the groups does it too. The model and the optimizer keep this rank's shards; both
        the model and this object raise `ClosedError` where they would need the other ranks. Save
        what is to be kept before. Calling it again does nothing.
        """
        self._runtime.close()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's shard of every parameter, by its name in the model, in the model's order.

        A parameter of which this rank holds nothing has no elements. Local.
        """
        parameters = {
            name: parameter
            for shard in self._shards
            for name, parameter in zip(shard.plan.names, shard.parameters, strict=True)
        }
        for name, first in self._names.items():
            if name == first:
                yield name, parameters[name]

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's shard of every parameter, for an optimizer. Local."""
        for _, parameter in self.named_parameters():
            yield parameter

    def names(self) -> NameTable:
        """Names of parameters, buffers and extra state in the model's state dict, as of now. Local.

        Wrappers that rename parameters there, such as `checkpoint_wrapper`, may come and go.
        """
        return read_names(self.model, self._shards, self._guards.allowed)

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Buffers in the model's state dict, which are never sharded, by name there. Local."""
        for name, buffer in self.names().buffers.items():
            yield name, buffer.holder()[buffer.name].detach()

    @contextmanager
    def as_shards(self) -> Iterator[None]:
        """Within it, torch's own state dicts are those of this rank's shards. Local.

        `state_dict` and `load_state_dict` of the model and of its optimizers, which are refused
        otherwise. They fit the same rank of the same model, sharded in the same way.
        """
        with self._guards.allowed():
            yield
        self.parameters_changed()

    @contextmanager
    def accumulate(self, *, is_last: bool) -> Iterator[None]:
        """Within it, each backward is that of the last micro-batch of a step, or is not.

        Gradients of earlier ones add up as the strategy says, and are not summed over replicas.
        Without it every backward is the last of its step. Local; all ranks say the same.
        """
        before, self._runtime.is_last = self._runtime.is_last, is_last
        try:
            yield
        finally:
            self._runtime.is_last = before

    @contextmanager
    def recording(self, recorder: Recorder) -> Iterator[None]:
        """Within it, what units compute is recorded as `forward UNIT` and `backward UNIT`. Local.

        Waits for communication are left out. `Costs.from_events` makes costs of the events.
        """
        from pcomm.fsdp.compute_costs import ComputeRecorder

        self._runtime.unit_clock = ComputeRecorder(recorder)
        try:
            yield
        finally:
            self._runtime.unit_clock = None

    def zero_grad(self) -> None:
        """Drop all gradients, also unsharded ones that are not reduced yet. Local.

        An optimizer's `zero_grad` cannot reach those; between steps there are none.
        """
        for parameter in self.parameters():
            parameter.grad = None
        self._runtime.forget_gradients()

    def sum_of_squares(self, selects: Callable[[str], bool] = _every) -> Tensor:
        """Sum of squares of all gradients, or of those of selected parameters, in fp64.

        Collective over the gather group of each scope, and over what the scope is spread over; all
        ranks select the same. Where tensor parallelism splits some parameters and repeats others,
        take both apart and add those of the former over its group.

        Shards have nothing in common, and replicas hold the same and count once. Scopes that share
        both groups share the all-reduce of one number.

        Args:
            selects: Function of a parameter's name; True if the parameter is to be counted.

        Raises:
            PeerError: Another rank does not call it within the time limit of the group.
        """
        return self._sum_of_squares("sum_of_squares", selects)

    def _sum_of_squares(self, asked: str, selects: Callable[[str], bool] = _every) -> Tensor:
        shards = self._shards
        device = shards[0].parameters[0].device if shards else torch.device("cpu")
        terms: dict[tuple[tuple[int, ...], ...], list[Tensor]] = {}
        over: dict[tuple[tuple[int, ...], ...], list[Group]] = {}
        for shard in shards:
            plan = shard.plan
            summed = [one for one in (plan.gather, plan.spread) if one is not None and one.size > 1]
            key = tuple(one.ranks for one in summed)
            over[key] = summed
            mine = terms.setdefault(key, [])
            gradients = [
                parameter.grad.as_subclass(Tensor)
                for name, parameter in zip(plan.names, shard.parameters, strict=True)
                if parameter.grad is not None and selects(name)
            ]
            if gradients:
                mine.append(squares.sum_of_squares(gradients, device))
        total = torch.zeros((), dtype=torch.float64, device=device)
        for key, mine in terms.items():
            found = torch.stack(mine).sum() if mine else torch.zeros_like(total)
            for one in over[key]:
                pending = one.collectives.all_reduce_async(found)
                found = self._runtime.complete(pending, f"{asked}, which every rank has to call")
            total += found
        return total

    def grad_norm(self) -> Tensor:
        """The norm of all gradients of the whole model, in fp64. Collective; see above."""
        return self._sum_of_squares("grad_norm").sqrt()

    def clip_grad_norm(self, max_norm: float, *, norm: Tensor | None = None) -> Tensor:
        """Scale gradients so that their norm is at most `max_norm`. Collective over all groups.

        Args:
            max_norm: The limit.
            norm: The norm, if it is known already, so that nothing is sent; None to compute it.

        Returns:
            The norm before, in fp64, the same on all ranks.

        Raises:
            ConfigError: The limit is negative, or no number; before anything is sent.
            PeerError: Another rank does not call it within the time limit of the group.
        """
        if not max_norm >= 0:
            raise ConfigError(
                f"clip_grad_norm({max_norm!r})",
                found="a limit that no norm can have",
                why="Gradients are multiplied by the limit over their norm.",
                fix="Pass a number >= 0; float('inf') leaves gradients as they are.",
            )
        norm = self._sum_of_squares("clip_grad_norm").sqrt() if norm is None else norm
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for shard in self._shards:
            gradients = [p.grad.as_subclass(Tensor) for p in shard.parameters if p.grad is not None]
            if gradients:
                torch._foreach_mul_(gradients, scale.to(gradients[0].dtype))
        return norm

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each whole parameter, which its shard need not show. Local."""
        return {
            name: shape
            for plan in self.plans
            for name, shape in zip(plan.names, plan.layout.shapes, strict=True)
        }

    def memory(self) -> dict[str, int]:
        """Bytes that this rank holds now, by kind of buffer. Local."""
        kinds = dict.fromkeys(("shards", "gathered", "gradients", "shard gradients"), 0)
        unsharded = [(one.unsharded, one.gradients) for one in self._runtime.groups.values()]
        for holder in (*self._shards, *(one for pair in unsharded for one in pair)):
            for kind, num_bytes in holder.memory().items():
                kinds[kind] += num_bytes
        return kinds

    def full_state_dict(self, *, device: torch.device | None = None) -> dict[str, Tensor]:
        """All parameters and buffers, whole, as an unsharded model has them. Collective.

        One unit after another is gathered, in the dtype of the main weights. The model's own
        `state_dict` then runs with whole parameters, so that hooks and wrappers see those.

        Args:
            device: Device of the copies; None for that of the shards.

        Raises:
            PeerTimeoutError: Another rank does not call it within `PCOMM_TIMEOUT_S`.
        """
        self._meet("full_state_dict")
        return whole_state(self.model, self._shards, self._guards.allowed, device)

    def full_gradients(self) -> dict[str, Tensor]:
        """All gradients, whole, by the names of the parameters. Collective; for inspection.

        Parameters that have none, such as frozen ones, are left out.

        Raises:
            PeerTimeoutError: Another rank does not call it within `PCOMM_TIMEOUT_S`.
        """
        self._meet("full_gradients")
        return {
            name: gradient.clone()
            for shard in self._shards
            for name, gradient in shard.full_gradients()
        }

    def _meet(self, asked: str) -> None:
        """All ranks that gather together are here: elsewhere their gathers would be others."""
        groups = {shard.plan.gather.ranks: shard.plan.gather for shard in self._shards}
        try:
            for group in groups.values():
                agree_in_group(group, f"fsdp: {asked}", [])
        except PcommError as problem:
            self._runtime.tell_failure(str(problem))
            raise

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take this rank's shard of an unsharded state dict, which every rank passes. Local.

        The model's own `load_state_dict` takes it, so wrappers and hooks that read other names do.
        A parameter with several names may come by one of them.

        Raises:
            ConfigError: Names or shapes that do not fit; then nothing is changed.
        """
        load_whole(self.model, self._shards, self.names(), self._guards.allowed, state)
        self.parameters_changed()

    def parameters_changed(self) -> None:
        """Say that shards were written other than by an optimizer after a backward. Local.

        Needed where parameters stay gathered between steps; all ranks call it.
        """
        self._runtime.invalidate()

    @property
    def schedule(self) -> Schedule | None:
        """The schedule of the last micro-batch of a training step; None until it is recorded."""
        return self._runtime.schedule(is_last=True)

    def schedules(self, micro_batches: int = 1) -> tuple[Schedule, ...]:
        """The schedules of a step of so many micro-batches; empty until one is recorded. Local."""
        found: list[Schedule] = []
        gathered: frozenset[str] = frozenset()
        unreduced = ALL_REDUCED
        for number in range(micro_batches):
            is_last = number == micro_batches - 1
            schedule = self._runtime.schedule(
                is_last=is_last, gathered=gathered, unreduced=unreduced
            )
            if schedule is None:
                return ()
            found.append(schedule)
            gathered, unreduced = schedule.gathered_at_end, schedule.unreduced_at_end
        return tuple(found)

    def report(
        self,
        *,
        micro_batches: int = 1,
        link: Rail | None = None,
        costs: Costs | None = None,
        step_s: float | None = None,
        events: Sequence[Event] = (),
    ) -> Report:
        """Parameter groups, schedule, bytes and memory of a step; `str` of it reads well.

        Local. Figures that need the schedule are there once it is recorded.

        Args:
            micro_batches: Number of micro-batches of the step that is reported.
            link: Bandwidth and latency of this rank, for the shortest time of a step.
            costs: Seconds that units compute, for the same.
            step_s: A measured step, to be compared with that.
            events: Events of `pcomm.core.trace`, for the fraction of communication that is hidden.
        """
        from pcomm.fsdp.report import report_of

        lines = [self._choice] if self._choice else []
        lines += [plan.describe() for plan in self.plans]
        lines += [separation.describe() for separation in self.separations]
        if self._memory is not None:
            lines.append(self._memory.describe())
        schedules = self.schedules(micro_batches)
        unused = self._runtime.unused() if schedules else []
        if unused:
            lines.append(f"units not used so far: {', '.join(unused)}")
        lines.append(schedules[-1].describe() if schedules else "no schedule yet")
        return report_of(
            "\n".join(lines),
            schedules,
            self.plans,
            link=link,
            costs=costs,
            step_s=step_s,
            events=events,
            arenas=self._memory.planned if self._memory is not None else (),
        )
