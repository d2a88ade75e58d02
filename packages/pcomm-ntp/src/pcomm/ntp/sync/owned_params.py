"""An optimizer of the units that a rank owns alone, and the weights that owners send to others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pcomm.core.collectives.protocol import Pending
from pcomm.core.errors import ConfigError
from pcomm.core.groups.group import Group
from pcomm.core.tensor_parallel.split import ParamLayout
from pcomm.ntp.planning.owners import Intervals, Owners, UnitSizes, holding_groups
from pcomm.ntp.planning.plan import NtpPlan
from pcomm.ntp.planning.units import Units
from pcomm.ntp.redistribute.planned_moves import OwnedState
from pcomm.ntp.redistribute.spread_tensors import unit_boxes

__all__ = ["OwnedParams", "unit_sizes"]


def unit_sizes(
    plan: NtpPlan,
    model: nn.Module,
    optimizer: Optimizer,
    param_layouts: Mapping[str, ParamLayout],
) -> dict[str, UnitSizes]:
    """What there is to own: the parameters of the optimizer that train, in the model's order.

    Equal on all ranks of a stage. Local.

    Args:
        plan: Plan of the job.
        model: This rank's part of the model.
        optimizer: Optimizer of its parameters.
        param_layouts: Layouts of its parameters by name.
    """
    optimized = {one for group in optimizer.param_groups for one in group["params"]}
    found = {}
    for name, parameter in model.named_parameters():
        if parameter not in optimized or not parameter.requires_grad or not parameter.numel():
            continue
        key, units = plan.units_of(name) or ("", None)
        if units is None or not units.is_split:
            count = parameter.shape[0] if parameter.dim() else 1
            found[name] = UnitSizes("", count, parameter.numel() // count)
        else:
            dim = param_layouts.get(name, ParamLayout()).dim
            each = parameter.numel() // parameter.shape[dim]
            found[name] = UnitSizes(key, units.count, each * sum(units.sections))
    return found


@dataclass(frozen=True, eq=False)
class _Part:
    """What a rank owns of a parameter.

    Args:
        whole: The parameter of the model.
        own: Its part that the optimizer has, contiguous, as fused optimizers take it for granted: a
            view where it lies in one piece, else a copy.
        units: Units of `dim`.
        dim: Dimension along which units lie.
        extent: Units of `whole`.
        held: Units of `own`.
    """

    whole: nn.Parameter
    own: nn.Parameter
    units: Units
    dim: int
    extent: Intervals
    held: Intervals

    def boxes(self, x: Tensor, within: Intervals, intervals: Intervals) -> list[Tensor]:
        """Views of units in a tensor of the units `within`, in the order in which `own` has them.

        With one range of `intervals` these are in the order of the sections.
        """
        x = x if x.dim() else x.view(1)
        by_range = [list(unit_boxes(x, self.dim, self.units, within, one)) for one in intervals]
        return [own[section] for section in range(len(self.units.sections)) for own in by_range]

    def pieces(self, x: Tensor) -> list[Tensor]:
        """Views of the owned units in a tensor of the shape of `whole`."""
        return self.boxes(x, self.extent, self.held)

    def join(self, x: Tensor) -> Tensor:
        """The owned units of a tensor like `whole`, contiguous: a view where that can be."""
        pieces = self.pieces(x)
        if len(pieces) == 1:
            return pieces[0].contiguous()
        return torch.cat(pieces, self.dim) if pieces else _none_of(x, self.dim)

    def put(self, own: Tensor, x: Tensor) -> None:
        """Write the owned units, as `join` returns them, into a tensor like `whole`."""
        if pieces := self.pieces(x):
            parts = own.split([one.shape[self.dim] for one in pieces], self.dim)
            torch._foreach_copy_(pieces, list(parts))


def _none_of(x: Tensor, dim: int) -> Tensor:
    return (x if x.dim() else x.view(1)).narrow(dim, 0, 0).clone()


class OwnedParams:
    """The parameters of an optimizer, each cut down to what this rank owns of it.

    Making one puts them in place of the model's in the groups of the optimizer, in the same order;
    a parameter of which this rank owns nothing has a part without elements, so that counts of
    steps are the same on all ranks. State that the optimizer has is cut alike.

    Args:
        plan: Plan of the job.
        rank: Global rank of this process.
        model: This rank's part of the model.
        optimizer: An optimizer that was made for its parameters.
        param_layouts: Layouts of its parameters by name.
        owners: Owners under the plan.

    Attributes:
        parameters: Parameter that the optimizer has of each one of the model, by name.

    Raises:
        ConfigError: The optimizer was cut before.
    """

    def __init__(
        self,
        plan: NtpPlan,
        rank: int,
        model: nn.Module,
        optimizer: Optimizer,
        param_layouts: Mapping[str, ParamLayout],
        owners: Owners,
    ) -> None:
        self._plan, self._rank, self._owners = plan, rank, owners
        self._optimizer = optimizer
        state = OwnedState(owners, owners, ())
        self._parts: dict[str, _Part] = {}
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name not in owners.sizes:
                    continue
                layout = param_layouts.get(name, ParamLayout())
                is_split = bool(owners.sizes[name].key)
                dim = layout.dim % max(1, parameter.dim()) if is_split else 0
                extent = state.extent(plan, name, rank)
                held = owners.held(name, rank)
                units = state.units(plan, name)
                part = _Part(parameter, parameter, units, dim, extent, held)
                own = nn.Parameter(part.join(parameter.detach()))
                self._parts[name] = _Part(parameter, own, units, dim, extent, held)
        self._replace(optimizer)
        self.parameters: dict[str, Tensor] = dict(model.named_parameters())
        self.parameters.update({name: one.own for name, one in self._parts.items()})

    def _replace(self, optimizer: Optimizer) -> None:
        parts = {one.whole: one for one in self._parts.values()}
        found = {one for group in optimizer.param_groups for one in group["params"]}
        if not found.issuperset(parts):
            raise ConfigError(
                "Session: the optimizer that build returns",
                found="an optimizer that does not have the model's parameters, such as that of "
                "the generation before",
                why="With copies it gets the parts of them that its rank owns, once.",
                fix="Make a new optimizer in each call of build.",
            )
        for group in optimizer.param_groups:
            group["params"] = [parts[p].own if p in parts else p for p in group["params"]]
        for whole, part in parts.items():
            if whole in optimizer.state:
                old = optimizer.state.pop(whole)
                optimizer.state[part.own] = {
                    key: part.join(value).clone()
                    if isinstance(value, Tensor) and value.shape == whole.shape and key != "step"
                    else value
                    for key, value in old.items()
                }

    @property
    def sizes(self) -> Mapping[str, UnitSizes]:
        """Parameters of which ranks own parts, by name."""
        return self._owners.sizes

    @property
    def num_elements(self) -> int:
        """Number of elements that this rank owns."""
        return sum(one.own.numel() for one in self._parts.values())

    def step(self) -> None:
        """One step of the optimizer by the model's gradients, of the owned weights. Local.

        If it fails before the optimizer has begun, nothing has changed.
        """
        with torch.no_grad():
            for part in self._parts.values():
                gradient = part.whole.grad
                part.own.grad = None if gradient is None else part.join(gradient)
                self._copy(part, to_model=False)
        self._optimizer.step()
        with torch.no_grad():
            for part in self._parts.values():
                part.own.grad = None
                self._copy(part, to_model=True)

    @staticmethod
    def _copy(part: _Part, *, to_model: bool) -> None:
        """Copy between a part that is no view and the parameter."""
        whole, own = part.whole.detach(), part.own.detach()
        pieces = part.pieces(whole)
        if len(pieces) > 1 or (pieces and not pieces[0].is_contiguous()):
            if to_model:
                part.put(own, whole)
            else:
                own.copy_(part.join(whole))

    def gather_weights(self, open_group: Callable[[tuple[int, ...]], Group]) -> None:
        """Give all holders the weights of the owners. Collective over the stage.

        Args:
            open_group: Function from a set of ranks to the open group.

        Raises:
            PeerError: Another rank failed; weights of other owners are old or new then.
        """
        with torch.no_grad():
            own = {name: one.own.detach() for name, one in self._parts.items()}
            whole = {name: one.whole.detach() for name, one in self._parts.items()}
            self._gather(own, whole, open_group)

    def gather_state(
        self, open_group: Callable[[tuple[int, ...]], Group]
    ) -> Iterator[tuple[str, Tensor]]:
        """The state of all units that this rank holds, owned or not. Collective over the stage.

        It gathers one tensor at a time: to keep all of them takes the memory that owners save.

        Args:
            open_group: Function from a set of ranks to the open group.

        Yields:
            Name, `optimizer.KEY.NAME`, and a new tensor of the shape of the parameter.

        Raises:
            PeerError: Another rank failed.
        """
        keys = {
            key: None
            for part in self._parts.values()
            for key, value in self._optimizer.state.get(part.own, {}).items()
            if isinstance(value, Tensor) and value.shape == part.own.shape and key != "step"
        }
        for key in keys:
            for name, part in self._parts.items():
                value = self._optimizer.state.get(part.own, {}).get(key)
                if isinstance(value, Tensor):
                    whole = torch.empty_like(part.whole, dtype=value.dtype, requires_grad=False)
                    with torch.no_grad():
                        # Nobody sends units that this rank alone holds.
                        part.put(value, whole)
                        self._gather({name: value}, {name: whole}, open_group)
                    yield f"optimizer.{key}.{name}", whole

    def _gather(
        self,
        own: Mapping[str, Tensor],
        whole: Mapping[str, Tensor],
        open_group: Callable[[tuple[int, ...]], Group],
    ) -> None:
        """Fill tensors of the model's shapes from those of owners; two messages in flight."""
        before: _Message | None = None
        for ranks, names in self._messages(own):
            message = _Message(open_group(ranks), self._rank)
            for name, start, stop, sender in names:
                part, units = self._parts[name], ((start, stop),)
                mine = part.boxes(own[name], part.held, units) if sender == self._rank else []
                message.add(sender, part.boxes(whole[name], part.extent, units), mine)
            message.start()
            if before is not None:
                before.finish()
            before = message
        if before is not None:
            before.finish()

    def _messages(
        self, own: Mapping[str, Tensor]
    ) -> Iterator[tuple[tuple[int, ...], list[tuple[str, int, int, int]]]]:
        """Ranges with their senders by the ranks that hold them, in one order on all ranks."""
        found: dict[tuple[tuple[int, ...], str], list[tuple[str, int, int, int]]] = {}
        for name, x in own.items():
            sent = self._owners.senders[name]
            for first, last, ranks in holding_groups(
                self._plan, self._rank, self._owners.sizes[name]
            ):
                if self._rank in ranks and len(ranks) > 1:
                    inside = [(name, *one) for one in sent if first <= one[0] and one[1] <= last]
                    found.setdefault((ranks, str(x.dtype)), []).extend(inside)
        for (ranks, _), ranges in sorted(found.items()):
            size, chunk = 0, list[tuple[str, int, int, int]]()
            for one in ranges:
                size += (one[2] - one[1]) * self._owners.sizes[one[0]].size
                chunk.append(one)
                if size >= _CHUNK_ELEMENTS:
                    yield ranks, chunk
                    size, chunk = 0, []
            if chunk:
                yield ranks, chunk


# Elements of a message; of each owner there is one in flight beside one that is unpacked.
_CHUNK_ELEMENTS = 1 << 23


class _Message:
    """What the owners of some ranges send to all ranks that hold them."""

    def __init__(self, group: Group, rank: int) -> None:
        self._group, self._rank = group, rank
        self._boxes: dict[int, list[Tensor]] = {}
        self._mine: list[Tensor] = []
        self._pending: Pending | None = None

    def add(self, sender: int, boxes: Sequence[Tensor], mine: Sequence[Tensor]) -> None:
        """Add a range: where it goes, and what is sent if this rank is the sender."""
        self._boxes.setdefault(sender, []).extend(boxes)
        self._mine += mine

    def start(self) -> None:
        """Start it. Collective over the group."""
        any_box = next(iter(self._boxes.values()))[0]
        parts = [one.reshape(-1) for one in self._mine]
        data = torch.cat(parts) if parts else any_box.new_empty(0)
        sizes = [
            sum(one.numel() for one in self._boxes.get(rank, ())) for rank in self._group.ranks
        ]
        self._pending = self._group.collectives.all_gather_async(data, sizes=sizes)

    def finish(self) -> None:
        """Wait, and write what others have sent, and what this rank sends, in its place."""
        assert self._pending is not None
        data, start = self._pending.wait(), 0
        into: list[Tensor] = []
        found: list[Tensor] = []
        for rank in self._group.ranks:
            for box in self._boxes.get(rank, ()):
                into.append(box)
                found.append(data[start : start + box.numel()].view(box.shape))
                start += box.numel()
        torch._foreach_copy_(into, found)
