"""The tensors of one rank beside what two plans say of them: checked before anything is sent."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from pcomm.core import Layout
from pcomm.core.errors import ConfigError, LayoutError, PcommError
from pcomm.core.tensor_parallel import ParamLayout
from pcomm.ntp.planning.owners import Intervals
from pcomm.ntp.planning.plan import NtpPlan
from pcomm.ntp.planning.units import Units, lies_as_planned
from pcomm.ntp.redistribute.named_tensors import parameter_name
from pcomm.ntp.redistribute.planned_moves import Interval, OwnedState, held_units, split_units

__all__ = ["SpreadTensor", "spread_tensors", "unit_boxes"]


@dataclass(frozen=True, eq=False)
class Side:
    """A tensor of this rank, and the units that it holds.

    Args:
        tensor: The shard, or the whole tensor if it is replicated.
        held: Its units: in each section those of one range after another.
        newest: Those of its units whose numbers count.
    """

    tensor: Tensor
    held: Intervals
    newest: Intervals

    @property
    def count(self) -> int:
        """Number of units that it has."""
        return sum(stop - start for start, stop in self.held)


@dataclass(frozen=True, eq=False)
class SpreadTensor:
    """A tensor under the old plan and the new one, as far as this rank has it.

    Args:
        name: Name of the tensor.
        parameter: Name of the parameter to which it belongs.
        units: Units of `dim`; None if it is replicated.
        dim: Dimension along which it is split, counted from the front; 0 if it is replicated.
        source: Tensors of this rank under the old plan; None if it has nothing.
        target: Tensors of this rank under the new plan; None if it is idle there.
    """

    name: str
    parameter: str
    units: Units | None
    dim: int
    source: Side | None
    target: Side | None

    @property
    def any_side(self) -> Side:
        """The target, or the source where there is none."""
        side = self.target or self.source
        assert side is not None
        return side

    @property
    def position_bytes(self) -> int:
        """Bytes of one position of `dim`."""
        x = self.any_side.tensor
        length = x.shape[self.dim] if x.dim() else 1
        return x.numel() // length * x.element_size() if length else 0

    def agreed(self) -> str:
        """One line that is the same on all ranks of a stage."""
        x = self.any_side.tensor
        shape, split = list(x.shape), "replicated"
        if self.units is not None and shape:
            shape[self.dim] = self.units.count * sum(self.units.sections)
            split = f"split along dim {self.dim}"
        dtype = str(x.dtype).removeprefix("torch.")
        return f"{self.name}: {shape}, {dtype}, {split}"

    def boxes(self, side: Side, interval: Interval) -> Iterator[Tensor]:
        """Views of the elements of some units, one for each section of the dimension."""
        x = side.tensor if side.tensor.dim() else side.tensor.view(1)
        if self.units is None:
            yield x
        else:
            yield from unit_boxes(x, self.dim, self.units, side.held, interval)

    def unit_bytes(self) -> int:
        """Bytes of one unit."""
        if self.units is None:
            x = self.any_side.tensor
            return x.numel() * x.element_size()
        return self.position_bytes * sum(self.units.sections)


def unit_boxes(
    x: Tensor, dim: int, units: Units, held: Intervals, interval: Interval
) -> Iterator[Tensor]:
    """Views of the elements of some units, one for each section of the dimension.

    Args:
        x: Tensor of the units `held`, section by section and in each of them range by range.
        dim: Dimension along which units lie.
        units: Units of the dimension.
        held: Units of the tensor.
        interval: Units that are wanted, which lie in one of the ranges of `held`.
    """
    start, stop = interval
    offset = 0
    for width in units.sections:
        for first, last in held:
            if first <= start and stop <= last:
                yield x.narrow(dim, offset + (start - first) * width, (stop - start) * width)
            offset += (last - first) * width


def spread_tensors(
    old: NtpPlan,
    new: NtpPlan,
    rank: int,
    source: Mapping[str, Tensor],
    target: Mapping[str, Tensor],
    param_layouts: Mapping[str, ParamLayout],
    holders: Collection[int],
    owned: OwnedState | None = None,
) -> list[SpreadTensor]:
    """The tensors of a rank, ascending by name. Local.

    A tensor `optimizer.KEY.NAME` whose parameter has owners is that of the units that this rank
    owns, in each section one range after another.

    Raises:
        ConfigError: Names that are missing on a side, tensors where the plan has none, a split
            parameter without units.
        LayoutError: A tensor of another shape or data type than the plans and the other side say.
    """
    has_old = rank in holders and held_units(old, None, rank) is not None
    has_new = held_units(new, None, rank) is not None
    _check_names(rank, "source", "old", source, has_old)
    _check_names(rank, "target", "new", target, has_new)
    if has_old and has_new and set(source) != set(target):
        only = sorted(set(source) ^ set(target))
        raise ConfigError(
            f"redistribute: rank {rank}, {only[0]!r}",
            found=f"{len(only)} names that only {'source' if only[0] in source else 'target'} has",
            why="Every tensor of the old state has its place in the new one, and none is invented.",
            fix="Pass the same names on both sides; add_state makes an optimizer's state.",
        )
    found = []
    for name in sorted({*source, *target} if has_old or has_new else ()):
        parameter = parameter_name(name)
        units, layout = split_units(new, parameter), param_layouts.get(parameter, ParamLayout())
        if units is None and layout.is_split:
            raise ConfigError(
                f"redistribute: {name!r}",
                found=f"a parameter split along dim {layout.dim} that the plan has no units for",
                why="Without units nothing says which part a rank has under a plan.",
                fix="Give plan() units for its name, or for a pattern that matches it.",
            )
        one = source[name] if has_old else target[name]
        is_state = name.startswith("optimizer.")
        has_owners = owned is not None and owned.covers(parameter)
        dim = layout.dim % max(one.dim(), 1) if units is not None else 0
        if owned is not None and has_owners:
            units = owned.units(new, parameter)
        sides: list[Side | None] = []
        for is_there, tensors, plan in ((has_old, source, old), (has_new, target, new)):
            if not is_there:
                sides.append(None)
            elif owned is None or not has_owners:
                own = held_units(plan, units, rank)
                held: Intervals = () if own is None else (own,)
                sides.append(Side(tensors[name], held, held) if held else None)
            elif plan is new and tensors is target:
                held = owned.needed(plan, parameter, rank, is_state=is_state)
                sides.append(Side(tensors[name], held, held))
            else:
                newest = owned.newest(plan, parameter, rank, is_state=is_state)
                held = newest if is_state else owned.extent(plan, parameter, rank)
                sides.append(Side(tensors[name], held, newest))
        made = SpreadTensor(name, parameter, units, dim, sides[0], sides[1])
        _check_shapes(made, rank)
        is_split = split_units(new, parameter) is not None
        if made.target is not None and is_split and layout.layout is not None:
            _check_layout(new, rank, made, layout.layout)
        found.append(made)
    return found


def _check_names(
    rank: int, side: str, plan: str, tensors: Mapping[str, Tensor], is_there: bool
) -> None:
    if is_there != bool(tensors):
        state = "has state" if is_there else "has no state"
        raise ConfigError(
            f"redistribute: {side} of {len(tensors)} tensors",
            found=f"rank {rank}, which {state} under the {plan} plan",
            why="Ranks that are idle, gone or new hold nothing; all others hold their shards.",
            fix=f"Pass {'all tensors' if is_there else 'no tensors'} as {side} on this rank, "
            "and name as holders the ranks that are alive and have state.",
        )


def _check_layout(new: NtpPlan, rank: int, one: SpreadTensor, declared: Layout) -> None:
    """Refuse a model whose shard has the right size, and other positions than the plan says."""
    place = new.place(rank)
    planned = new.layout(one.parameter, place.replica, place.stage)
    if not lies_as_planned(declared, planned):
        raise _unfit(
            f"redistribute: target {one.name!r} on rank {rank}",
            f"a layout of {declared.describe()}, the plan has {planned.describe()}",
        )


def _check_shapes(one: SpreadTensor, rank: int) -> None:
    sides = [
        (text, side) for text, side in (("source", one.source), ("target", one.target)) if side
    ]
    for text, side in sides:
        shape = side.tensor.shape
        if one.units is not None:
            positions = side.count * sum(one.units.sections)
            if (shape[one.dim] if shape else 1) != positions:
                raise _unfit(
                    f"redistribute: {text} {one.name!r} of shape {tuple(shape)} on rank {rank}",
                    f"{positions} positions along dim {one.dim}: units {_told(side)} of "
                    f"{one.units.count}",
                )
    if len(sides) == 2:
        a, b = (side.tensor for _, side in sides)
        rest = [
            [n for d, n in enumerate(x.shape) if one.units is None or d != one.dim] for x in (a, b)
        ]
        if rest[0] != rest[1] or a.dtype != b.dtype:
            raise _unfit(
                f"redistribute: {one.name!r} on rank {rank}",
                f"{tuple(a.shape)} of {a.dtype} before, {tuple(b.shape)} of {b.dtype} after",
            )
        # A shard may keep its shape and move by a unit.
        if sides[0][1].held != sides[1][1].held and _shares_memory(a, b):
            raise LayoutError(
                f"redistribute: {one.name!r} on rank {rank}",
                found=f"one memory on both sides, for units {_told(sides[0][1])} before and "
                f"{_told(sides[1][1])} after",
                why="The source is only read, and the target would be written into it.",
                fix="Pass the same tensor on both sides only where the rank's units stay the same.",
            )


def _shares_memory(one: Tensor, other: Tensor) -> bool:
    (first, end), (other_first, other_end) = _addresses(one), _addresses(other)
    return max(first, other_first) < min(end, other_end)


def _addresses(x: Tensor) -> tuple[int, int]:
    """Address of the first byte of a tensor, and the one after its last byte."""
    if not x.numel():
        return 0, 0
    last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def _told(side: Side) -> str:
    return ", ".join(f"{start} to {stop - 1}" for start, stop in side.held) or "none"


def _unfit(asked: str, found: str) -> PcommError:
    return LayoutError(
        asked,
        found=found,
        why="The plan says which units a rank has, and nothing but their place changes.",
        fix="Build the model of each plan with plan.layout, and keep data types.",
    )
