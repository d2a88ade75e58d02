"""What moves between generations, and how the model of a new one gets it.

Tensors that have the shape of a parameter are cut like it, and move from other ranks or come from a
checkpoint. Everything else of an optimizer, such as its count of steps, learning rate and betas, is
the same on all ranks and travels as text through the store.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from pcomm.core import Topology
from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.core.groups.group import Group
from pcomm.core.tensor_parallel import ParamLayout, param_layouts_of
from pcomm.core.tensor_parallel.optimizers import first_mixed, known_mixed
from pcomm.ntp.planning.hosts import Hosts
from pcomm.ntp.planning.owners import Owners, UnitSizes
from pcomm.ntp.planning.plan import NtpPlan
from pcomm.ntp.planning.survival import Survival
from pcomm.ntp.redistribute import Moved, redistribute, state_tensors
from pcomm.ntp.redistribute.named_tensors import parameter_name
from pcomm.ntp.redistribute.planned_moves import OwnedState
from pcomm.ntp.session.membership import Membership
from pcomm.ntp.session.resume_point import ResumePoint
from pcomm.ntp.sync.owned_params import OwnedParams, unit_sizes

__all__ = [
    "BufferSnapshot",
    "GenerationState",
    "Restore",
    "StateTransfer",
    "TrainState",
    "agreed_lines",
    "check_built",
    "scalars_of",
    "set_scalars",
    "topology_along_dp",
]


_log = logging.getLogger("pcomm.ntp")
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class TrainState:
    """What `build` returns for a generation.

    Args:
        model: This rank's shard of the model, built for the plan and the groups.
        optimizer: Optimizer of its parameters; it may be fresh, since its state arrives. Settings
            of a group other than numbers, texts and lists of these stay as they are built. It
            computes each element by itself: replicas cut a parameter at different places, so a
            norm or product of a shard would let them drift apart.
        param_layouts: Layout of each parameter by its name; by default those that the model's
            layers declare.
        owned: Parts of the parameters that this rank owns; set by a session with `copies`.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    param_layouts: Mapping[str, ParamLayout] | None = None
    owned: OwnedParams | None = field(default=None, repr=False)

    @property
    def layouts(self) -> Mapping[str, ParamLayout]:
        """The layouts that were given, or those that the model's layers declare."""
        own = self.param_layouts
        return param_layouts_of(self.model) if own is None else own

    @property
    def optimized(self) -> Mapping[str, Tensor]:
        """What the optimizer has of each parameter, by its name: itself, or the owned part."""
        return dict(self.model.named_parameters()) if self.owned is None else self.owned.parameters

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors that move with the units, by name; see `state_tensors`."""
        return state_tensors(self.model, self.optimizer, self.optimized)

    def gather(
        self, open_group: Callable[[tuple[int, ...]], Group]
    ) -> Iterator[tuple[str, Tensor]]:
        """`tensors`, whole also where ranks own parts. Collective over the stage if they do.

        Args:
            open_group: Function from a set of ranks to the open group.
        """
        owned = {} if self.owned is None else self.owned.sizes
        for name, tensor in self.tensors.items():
            if name.startswith("model.") or parameter_name(name) not in owned:
                yield name, tensor
        if self.owned is not None:
            yield from self.owned.gather_state(open_group)

    def step(self) -> None:
        """One step of the optimizer, of the units that this rank owns. Local."""
        if self.owned is None:
            self.optimizer.step()
        else:
            self.owned.step()


def check_built(
    found: object, plan: NtpPlan, *, is_start: bool, has_owners: bool = False
) -> TrainState:
    """What `build` has returned, if a session can train it. Local.

    Args:
        found: The object that `build` has returned.
        plan: The plan that it has built for.
        is_start: True to try an optimizer that is not torch's, which takes tenths of a second.
        has_owners: True if each rank computes parts of whole parameters, too.

    Raises:
        ConfigError: It is no `TrainState`.
        UnsupportedError: The optimizer looks at whole tensors of which ranks hold parts, or nothing
            can tell whether it does; or it spreads its state over ranks.
    """
    if not isinstance(found, TrainState):
        raise ConfigError(
            "Session: build",
            found=f"a function that returns a {type(found).__name__}",
            why="The session moves the state of both, model and optimizer.",
            fix="Return TrainState(model, optimizer).",
        )
    if "ZeroRedundancyOptimizer" in {kind.__name__ for kind in type(found.optimizer).__mro__}:
        raise UnsupportedError(
            "Session: ZeroRedundancyOptimizer",
            found="an optimizer that spreads its state over ranks, and communicates in step()",
            why="A rank that dies takes its part along, and may die while others are in step().",
            fix="Use the optimizer that it wraps; each rank holds the state of its own units.",
        )
    names = {
        own: name
        for name, own in found.model.named_parameters()
        if has_owners or ((units := plan.units_of(name)) and units[1].is_split)
    }
    optimized = [one for group in found.optimizer.param_groups for one in group["params"]]
    split = [own for own in optimized if own in names]
    mixed = split[0] if split and known_mixed(found.optimizer) else None
    if mixed is None and split and is_start:
        layouts = found.layouts
        mixed = first_mixed(
            found.optimizer,
            {own: layouts.get(names[own], ParamLayout()).dim for own in split},
        )
    if mixed is not None:
        raise UnsupportedError(
            f"Session: optimizer {type(found.optimizer).__name__} of {names[mixed]!r}",
            found="a parameter of which each rank holds a part",
            why="It takes norms or products of whole tensors. Of parts these differ between "
            "replicas with different degrees, which would drift apart once a rank has died.",
            fix="Use an elementwise optimizer, such as AdamW or SGD; or give it only "
            "parameters without units.",
        )
    return found


@dataclass(frozen=True)
class GenerationState:
    """The state of one generation on this rank.

    Args:
        generation: Number of the generation.
        plan: Plan under which the state lies.
        built: Model and optimizer; None on a rank without units.
        owners: Owners of the optimizer's state; None where each rank has that of its units, and on
            a rank that never had any.
    """

    generation: int
    plan: NtpPlan
    built: TrainState | None
    owners: Owners | None = None


class BufferSnapshot:
    """Copies of a model's persistent buffers from the beginning of a step. Local.

    A forward changes buffers before it is known whether the step counts.
    """

    def __init__(self) -> None:
        self._step = 0
        self._copies: dict[str, Tensor] = {}

    def keep(self, step: int, model: nn.Module) -> None:
        """Copy the buffers of `model` at the beginning of `step`."""
        self._step = step
        self._copies = {name: one.clone() for name, one in _buffers_of(model).items()}

    def set_back(self, step: int, model: nn.Module) -> None:
        """Write the copies back if they are those of `step`, which is repeated."""
        if step == self._step:
            for name, one in _buffers_of(model).items():
                if name in self._copies:
                    one.copy_(self._copies[name])

    def drop(self) -> None:
        """Forget the copies."""
        self._step, self._copies = 0, {}


def _buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that move with the state."""
    saved = model.state_dict(keep_vars=True)
    return {name: one.detach() for name, one in model.named_buffers() if name in saved}


Restore = Callable[[NtpPlan, torch.nn.Module, torch.optim.Optimizer], int]


class StateTransfer:
    """Brings the state that counts to the models of a generation.

    Args:
        device: Device of tensors between ranks.
        restore: Function that loads a checkpoint; None where there is none.
        membership: This process as a member of the job.
        copies: Number of owners of each unit; None where every rank has the optimizer's state of
            its units.
    """

    def __init__(
        self,
        device: torch.device,
        restore: Restore | None,
        membership: Membership,
        copies: int | None = None,
    ) -> None:
        self._device, self._restore, self._membership = device, restore, membership
        self._copies = copies
        self._told = Survival(copies or 0, copies or 0)

    def publish(self, point: ResumePoint, held: GenerationState | None) -> None:
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
        whole = point.whole()
        for rank in sorted(ranks, key=lambda one: (one not in whole, one in point.behind, one)):
            speakers.setdefault(held.plan.place(rank).stage, rank)
        for stage, rank in speakers.items():
            if rank == member.rank and held.built is not None:
                told = scalars_of(held.built)
                member.records.publish(f"scalars/{member.number}/{stage}", told)
                if held.owners is not None:
                    name = f"plan/{member.number}/owners/{stage}"
                    member.records.publish(name, held.owners.to_json())

    def move(
        self,
        point: ResumePoint,
        held: GenerationState | None,
        made: NtpPlan,
        built: TrainState | None,
        group: Group,
    ) -> tuple[TrainState | None, Owners | None, Moved]:
        """Fill a new model and optimizer from what ranks hold. Collective over `group`.

        Who sends which units is decided by `pcomm.ntp.redistribute.moves`.

        Args:
            point: State that counts; that of some generation.
            held: This rank's part of it, or None.
            made: Plan of the new generation.
            built: Model and optimizer that are filled; None on a rank without units.
            group: All ranks of the generation.

        Returns:
            Model and optimizer with the state, owners under the new plan, and bytes that moved.

        Raises:
            ConfigError: The optimizer that was built has other parameters than the one before.
            StateLostError: On every rank, before anything was sent: no rank holds some units.
        """
        member = self._membership
        text = member.records.published(f"plan/{member.number}") or ""
        if held is None and not text:
            # Deleted, since a later generation is complete.
            member.check_fence()
        old = NtpPlan.from_json(text) if held is None else held.plan
        if old.topology.axes != made.topology.axes:
            # The last generation of a job that cannot go on has a topology of its own.
            old, made = _along_dp(old), _along_dp(made)
        source = {}
        layouts: Mapping[str, ParamLayout] = {}
        if held is not None and held.built is not None:
            # A rank that has no units any more still has what others get.
            layouts = held.built.layouts
            source = held.built.tensors
        owned = self._owned_state(point, held, old, made)
        if built is not None and owned is not None:
            if unit_sizes(made, built.model, built.optimizer, built.layouts) != owned.old.sizes:
                raise ConfigError(
                    "Session: the optimizer that build returns",
                    found="an optimizer of other parameters than before",
                    why="Its state has owners by the names of the parameters, from the start on.",
                    fix="Make it of the same parameters under every plan, all of which train.",
                )
            built = self._with_owners(made, built, owned.new)
        target = {}
        if built is not None:
            stage = made.place(member.rank).stage
            told = member.records.published(f"scalars/{member.number}/{stage}")
            if told is not None:
                set_scalars(built, told)
            target = built.tensors
            layouts = built.layouts
        moved = redistribute(
            old,
            made,
            group,
            rank=member.rank,
            source=source,
            target=target,
            param_layouts=layouts,
            holders=_with_units(point, old),
            owned=owned,
            device=self._device,
        )
        return built, None if owned is None else owned.new, moved

    def _owned_state(
        self, point: ResumePoint, held: GenerationState | None, old: NtpPlan, made: NtpPlan
    ) -> OwnedState | None:
        """Owners before and after; the same on all ranks of a stage. Local."""
        if self._copies is None:
            return None
        member = self._membership
        before = None if held is None else held.owners
        if before is None:
            stage = made.topology.coordinates(member.rank).get("pp", 0)
            text = member.records.published(f"plan/{member.number}/owners/{stage}")
            if text is None:
                member.check_fence()
            before = Owners.from_json(text or "{}")
        new = self._deal(made, self._copies, before.sizes, before, _with_units(point, old))
        return OwnedState(before, new, point.whole())

    def _deal(
        self,
        made: NtpPlan,
        copies: int,
        sizes: Mapping[str, UnitSizes],
        before: Owners | None = None,
        alive: Collection[int] = (),
    ) -> Owners:
        """Owners on the hosts that the ranks have told; warns where fewer may be lost. Local."""
        member, hosts = self._membership, Hosts(copies, self._membership.hosts())
        new = Owners.deal(made, member.rank, sizes, hosts, before=before, alive=alive)
        found, told, self._told = new.survival(hosts), self._told, new.survival(hosts)
        if found.is_less(told) and member.rank == min(made.stage_ranks(member.rank)):
            _log.warning("optimizer state from now on: %s", found.describe())
        return new

    def first_owners(
        self, made: NtpPlan, built: TrainState | None
    ) -> tuple[TrainState | None, Owners | None]:
        """Deal out the state of an optimizer that has all of it, or none yet. Local.

        Args:
            made: Plan of the generation.
            built: Model and optimizer; None on a rank without units.
        """
        if self._copies is None or built is None:
            return built, None
        sizes = unit_sizes(made, built.model, built.optimizer, built.layouts)
        owners = self._deal(made, self._copies, sizes)
        return self._with_owners(made, built, owners), owners

    def _with_owners(self, made: NtpPlan, built: TrainState, owners: Owners) -> TrainState:
        owned = OwnedParams(
            made,
            self._membership.rank,
            built.model,
            built.optimizer,
            built.layouts,
            owners,
        )
        return replace(built, owned=owned)

    def restore(self, made: NtpPlan, built: TrainState | None, group: Group) -> int:
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
        if built is not None and self._restore is not None:
            step = self._restore(made, built.model, built.optimizer)
        told = torch.tensor([step], dtype=torch.int64, device=self._device)
        applied = int(group.collectives.all_reduce(told, op="max").item())
        if built is not None and step != applied:
            raise ConfigError(
                "Session: restore",
                found=f"step {step} on rank {self._membership.rank}, {applied} on another",
                why="All ranks go on from one step.",
                fix="Return the same step on all ranks, that of the checkpoint.",
            )
        return applied


def _with_units(point: ResumePoint, old: NtpPlan) -> list[int]:
    """The ranks that hold units of the state that counts."""
    return [rank for rank in point.holders if not old.place(rank).is_idle]


def _along_dp(made: NtpPlan) -> NtpPlan:
    """A plan by which each rank holds what it does by `made`, with all axes but `tp` in `dp`.

    Raises:
        UnsupportedError: There are pipeline stages or slow ranks, or `tp` is not the fastest axis.
    """
    topology = topology_along_dp(made.topology, made.rank_speeds)
    firsts = topology.ranks[:: topology.axes["tp"]]
    degrees = tuple(made.degrees[made.topology.coordinates(rank)["dp"]] for rank in firsts)
    return NtpPlan(topology.with_failed(made.topology.failed), made.units, made.policy, degrees)


def topology_along_dp(topology: Topology, speeds: object) -> Topology:
    """The same ranks for the last generation: each tensor-parallel group at a place of `dp`.

    Raises:
        UnsupportedError: The same cases in which `_along_dp` raises it.
    """
    size = topology.axes["tp"]
    # What the groups along cp of a replica hold depends on the slow ranks of all of them.
    if topology.order[0] != "tp" or topology.axes.get("pp", 1) > 1 or speeds:
        raise UnsupportedError(
            f"Session: the end of a job of {topology.describe()}",
            found="pipeline stages, slow ranks, or tp not as the fastest axis",
            why="A tensor-parallel group is no replica of its own then.",
            fix="Start the job again from its last checkpoint.",
        )
    axes = dict.fromkeys(topology.axes, 1) | {"tp": size, "dp": topology.world_size // size}
    return Topology(axes, topology.order, offset=topology.offset)


def agreed_lines(built: TrainState) -> list[str]:
    """Kind and settings of the optimizer, a line each; the same on all ranks of a stage. Local.

    Raises:
        ConfigError: The same cases in which `scalars_of` raises it.
        UnsupportedError: The same cases in which `scalars_of` raises it.
    """
    told = json.loads(scalars_of(built))
    names = {id(own): name for name, own in built.optimized.items()}
    kind = type(built.optimizer)
    lines = [f"optimizer: {kind.__module__}.{kind.__qualname__}"]
    for number, group in enumerate(built.optimizer.param_groups):
        lines += [f"{key} of group {number}: {v}" for key, v in told["groups"][number].items()]
        lines += [f"group {number}: {names.get(id(one))}" for one in group["params"]]
    return [*lines, *(f"state of {name}: {own}" for name, own in told["state"].items())]


def scalars_of(built: TrainState) -> str:
    """Text of all that `set_scalars` needs; the same on ranks with equal state. Local.

    Raises:
        ConfigError: The optimizer has state of a parameter that the model does not have.
        UnsupportedError: It has state that is neither of its parameter's shape nor one number.
    """
    names: dict[Tensor, str] = {own: name for name, own in built.optimized.items()}
    groups = []
    for group in built.optimizer.param_groups:
        told = {k: _told(v) for k, v in group.items() if k != "params" and _is_plain(v)}
        groups.append(told)
    state: dict[str, dict[str, Any]] = {}
    for parameter, own in built.optimizer.state.items():
        if parameter not in names:
            raise ConfigError(
                "Session: the optimizer",
                found="state of a parameter that is not one of the model's",
                why="State moves with the parameters of the model, by their names.",
                fix="Give the optimizer parameters of the model alone.",
            )
        state[names[parameter]] = {
            key: _told_state(names[parameter], key, value, parameter) for key, value in own.items()
        }
    return json.dumps({"groups": groups, "state": state})


def set_scalars(built: TrainState, text: str) -> None:
    """Give a fresh optimizer the scalars of another, and room for its state. Local.

    Args:
        built: Model and optimizer that get them.
        text: Result of `scalars_of`, maybe on another rank of the stage.

    Raises:
        ConfigError: The optimizers have other numbers of groups.
    """
    found = json.loads(text)
    num_groups = len(built.optimizer.param_groups)
    if num_groups != len(found["groups"]):
        raise ConfigError(
            "Session: the optimizer that build returns",
            found=f"{num_groups} groups of parameters, and {len(found['groups'])} before",
            why="Settings such as learning rates go from group to group.",
            fix="Make the same groups under every plan, empty ones included.",
        )
    parameters = built.optimized
    names = {parameter: name for name, parameter in parameters.items()}
    # Where torch's own load_state_dict keeps the count, too.
    on_device = {
        names[one]
        for group in built.optimizer.param_groups
        if group.get("capturable") or group.get("fused")
        for one in group["params"]
        if one in names
    }
    for group, told in zip(built.optimizer.param_groups, found["groups"], strict=True):
        for key, value in told.items():
            group[key] = _as_told(value, group.get(key))
    for name, own in found["state"].items():
        if name not in parameters:
            continue
        state = built.optimizer.state[parameters[name]]
        for key, value in own.items():
            if isinstance(value, Mapping) and "shaped" in value:
                dtype = getattr(torch, value["shaped"])
                state[key] = torch.zeros_like(parameters[name], dtype=dtype).detach()
            else:
                state[key] = _as_told(value, state.get(key))
                if key == "step" and isinstance(state[key], Tensor) and name in on_device:
                    state[key] = state[key].to(parameters[name].device)


def _is_shaped(key: str, value: object, parameter: Tensor) -> bool:
    # A parameter of one number has the shape of a count.
    return isinstance(value, Tensor) and value.shape == parameter.shape and key != "step"


def _told_state(name: str, key: str, value: object, parameter: Tensor) -> Any:
    if isinstance(value, Tensor) and _is_shaped(key, value, parameter):
        return {"shaped": str(value.dtype).removeprefix("torch.")}
    if _is_plain(value):
        return _told(value)
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
    raise UnsupportedError(
        f"Session: optimizer state {key!r} of parameter {name!r}",
        found=f"a {type(value).__name__}{shape}, for a parameter of shape {tuple(parameter.shape)}",
        why="State is cut like its parameter, or is one number that all ranks share.",
        fix="Use an optimizer with such state, such as SGD, Adam or AdamW.",
    )


def _is_plain(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    if isinstance(value, tuple | list):
        return all(isinstance(one, _PLAIN) for one in value)
    return isinstance(value, _PLAIN)


def _told(value: Any) -> Any:
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": value.item(), "dtype": dtype, "shape": list(value.shape)}
    return list(value) if isinstance(value, tuple) else value


def _as_told(value: Any, now: Any) -> Any:
    if isinstance(value, Mapping):
        device = now.device if isinstance(now, Tensor) else None
        dtype = getattr(torch, value["dtype"])
        return torch.full(value["shape"], value["tensor"], dtype=dtype, device=device)
    return tuple(value) if isinstance(value, list) and isinstance(now, tuple) else value
