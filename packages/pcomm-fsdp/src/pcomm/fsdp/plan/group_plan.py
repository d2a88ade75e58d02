"""One parameter group as planned: its place in flat memory, groups, formats and divisor.

The flat layout is integers only. Shards end at row boundaries, so that a rank holds whole rows of
each parameter: optimizers that look at rows, block-wise quantisation and checkpoints then need no
cooperation between ranks. That is made by padding before parameters, as little as there can be for
an order of the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from pcomm.core.errors import ConfigError
from pcomm.core.groups.group import Group
from pcomm.fsdp.plan.units import Member, UnitModules
from pcomm.fsdp.settings import CommPolicy, Precision, ReshardPolicy, Scope

__all__ = [
    "FlatLayout",
    "GroupPlan",
    "PlannedGroup",
    "plan_flat_layout",
    "plan_groups",
]


# Kernels on CUDA load 16 bytes at a time.
_ALIGNMENT_BYTES = 16


class PlannedGroup(NamedTuple):
    """A plan and the parameters it is for, in the same order."""

    plan: GroupPlan
    members: list[Member]


def plan_groups(
    units: Sequence[UnitModules],
    default: Scope,
    scopes: Mapping[str, Scope],
    comm: CommPolicy,
    precision: Precision,
) -> list[PlannedGroup]:
    """One plan for each unit, scope, dtype and kind (trained or frozen). Local.

    Args:
        units: The result of `find_units`.
        default: The scope of parameters that no other one selects.
        scopes: Scopes by name; the first that selects a parameter has it.
        comm: Padding, and the separation of gathers and reduces.
        precision: Number formats of scopes that have none of their own.

    Raises:
        ConfigError: A scope that selects nothing, a divisor that is no positive number, or a
            parameter that is no floating-point number.
    """
    counts = dict.fromkeys(scopes, 0)
    planned: list[PlannedGroup] = []
    for unit in units:
        split: dict[tuple[str, torch.dtype, bool], list[Member]] = {}
        for member in unit.members:
            parameter = member.parameter
            scope = next((n for n, s in scopes.items() if s.selects(member.name, parameter)), "")
            if scope:
                counts[scope] += 1
            if not parameter.dtype.is_floating_point:
                raise ConfigError(
                    f"fully_shard: parameter {member.name!r}",
                    found=f"dtype {parameter.dtype}",
                    why="Parameters are converted between floating-point formats, and their "
                    "gradients too.",
                    fix="Keep what is no floating-point number in a buffer.",
                )
            key = scope, parameter.dtype, parameter.requires_grad
            split.setdefault(key, []).append(member)
        for (scope, dtype, is_trainable), members in split.items():
            name = _name(unit.name, scope, dtype, is_trainable, list(split))
            chosen = scopes.get(scope, default)
            plan = _plan(
                name, unit, scope, chosen, default, members, dtype, is_trainable, comm, precision
            )
            planned.append(PlannedGroup(plan, members))
    empty = [name for name, count in counts.items() if not count]
    if empty:
        raise ConfigError(
            f"fully_shard: scopes {', '.join(empty)}",
            found="no parameter of the model that they select",
            why="A scope without parameters is most likely a misspelt name.",
            fix="Correct `selects`, which gets the parameter's name in the model, or drop it.",
        )
    return planned


def _plan(
    name: str,
    unit: UnitModules,
    scope: str,
    chosen: Scope,
    default: Scope,
    members: Sequence[Member],
    dtype: torch.dtype,
    is_trainable: bool,
    comm: CommPolicy,
    precision: Precision,
) -> GroupPlan:
    roles, precision = chosen.roles, chosen.precision or precision
    main_dtype = precision.main_dtype or dtype
    param_dtype = precision.param_dtype or main_dtype
    layout = plan_flat_layout(
        [tuple(member.parameter.shape) for member in members],
        roles.gather.size,
        alignment=max(1, _ALIGNMENT_BYTES // param_dtype.itemsize),
        max_padding=comm.max_padding,
    )
    replicate = roles.replicate
    return GroupPlan(
        name=name,
        unit=unit.name,
        scope=scope,
        names=tuple(member.name for member in members),
        gather=roles.gather,
        reduce=roles.gather if comm.separate == "never" else roles.reduce,
        replicate=None if replicate is None or replicate.size == 1 else replicate,
        spread=chosen.spread,
        divisor=_divisor(scope, chosen, default),
        param_dtype=param_dtype,
        reduce_dtype=precision.reduce_dtype or param_dtype,
        main_dtype=main_dtype,
        is_trainable=is_trainable,
        reshard=chosen.reshard or default.reshard or ReshardPolicy(),
        layout=layout,
    )


def _divisor(scope: str, chosen: Scope, default: Scope) -> float:
    for one in (chosen, default):
        if one.divisor is not None:
            if not one.divisor > 0:
                raise ConfigError(
                    f"fully_shard: divisor {one.divisor!r} of scope {scope!r}",
                    found="a number that is not positive",
                    why="The summed gradient is divided by it.",
                    fix="Leave it out for the mean over ranks, or pass 1 for the sum.",
                )
            return float(one.divisor)
    return float(default.roles.num_ranks)


def _name(
    unit: str,
    scope: str,
    dtype: torch.dtype,
    is_trainable: bool,
    keys: Sequence[tuple[str, torch.dtype, bool]],
) -> str:
    """The unit's name, and what tells this group from the others of the unit."""
    marks = [scope] if scope else []
    if len({key[1] for key in keys}) > 1:
        marks.append(str(dtype).removeprefix("torch."))
    if not is_trainable and len({key[2] for key in keys}) > 1:
        marks.append("frozen")
    return "/".join([unit, *marks])


@dataclass(frozen=True)
class GroupPlan:
    """The groups, formats and layout of the parameters of one unit, scope, dtype and kind.

    Made when the model is sharded and never changed. Buffers carry it, so no place where something
    is gathered or reduced chooses a group.

    Args:
        name: Unique in the model: the unit, and the scope and kind where there are several.
        unit: The unit that uses the parameters.
        scope: Name of the scope, empty for the model's own.
        names: Names of the parameters in the model.
        gather: Group that gathers parameters.
        reduce: Group that reduces gradients.
        replicate: Group over which gradients of shards are summed, if there are replicas.
        spread: Group with one rank for each set of other parameters of the scope.
        divisor: Number that summed gradients are divided by.
        param_dtype: Dtype of unsharded parameters.
        reduce_dtype: Dtype of unsharded gradients.
        main_dtype: Dtype of the shard.
        is_trainable: True if there are gradients at all.
        reshard: Time until which parameters and gradients stay unsharded.
        layout: Offset of each parameter in the flat buffer.
        gather_pool: Arena of the unsharded parameters, registered with `gather`; empty for
            ordinary memory.
        reduce_pool: Arena of unsharded gradients, registered with `reduce`; empty for ordinary
            memory.
    """

    name: str
    unit: str
    scope: str
    names: tuple[str, ...]
    gather: Group
    reduce: Group
    replicate: Group | None
    spread: Group | None
    divisor: float
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    main_dtype: torch.dtype
    is_trainable: bool
    reshard: ReshardPolicy
    layout: FlatLayout
    gather_pool: str = ""
    reduce_pool: str = ""

    @property
    def rank(self) -> int:
        """This rank's place among those that share the parameters."""
        return self.gather.rank

    @property
    def num_replicas(self) -> int:
        """Number of ranks that hold this shard."""
        return 1 if self.replicate is None else self.replicate.size

    @property
    def is_local(self) -> bool:
        """True if the parameters stay as they are: one rank, and nothing to convert."""
        return self.is_one_buffer and self.num_replicas == 1

    @property
    def is_one_buffer(self) -> bool:
        """True if the shard is the unsharded buffer: one rank, and nothing to convert."""
        return self.gather.size == 1 and self.param_dtype == self.main_dtype

    @property
    def cut_names(self) -> list[str]:
        """Parameters that are cut inside rows, and have shards of one dimension."""
        cut = self.layout.is_cut_inside_rows
        return [name for index, name in enumerate(self.names) if cut(index)]

    @property
    def takes_gradient_over(self) -> bool:
        """True if autograd's own tensor can be reduced: nothing has to be put beside it."""
        is_same = self.layout.is_one_parameter and self.param_dtype == self.reduce_dtype
        return is_same and not self.reduce_pool

    @property
    def predivisor(self) -> float:
        """By which gradients are divided before they are summed, a power of two.

        A sum of fp16 numbers over ranks may be too large where their mean is not. The smallest
        that is not below the root of the number of ranks, as in FSDP2: what is divided by more
        becomes too small instead. Other formats have room for the sum.
        """
        factor = 1
        while self.reduce_dtype == torch.float16 and factor * factor < self.reduce.size:
            factor *= 2
        return float(factor)

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the unsharded parameters."""
        return self.layout.length * self.param_dtype.itemsize

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the unsharded gradients."""
        return self.layout.length * self.reduce_dtype.itemsize

    @property
    def gather_bytes(self) -> int:
        """Least bytes that this rank sends in one gather."""
        return (self.gather.size - 1) * self.layout.shard_length * self.param_dtype.itemsize

    @property
    def reduce_bytes(self) -> int:
        """Least bytes that this rank sends in one reduce."""
        return (self.reduce.size - 1) * self.layout.shard_length * self.reduce_dtype.itemsize

    def full_view(self, flat: Tensor, index: int) -> Tensor:
        """Parameter `index` in an unsharded buffer of `layout.length` elements: a view."""
        start, shape = self.layout.offsets[index], self.layout.shapes[index]
        return flat[start : start + math.prod(shape)].view(shape)

    def shard_view(self, flat: Tensor, index: int) -> Tensor:
        """This rank's shard of parameter `index` in a flat shard: a view."""
        held = self.layout.shard_range(index, self.rank)
        shape = self.layout.local_shape(index, self.rank)
        return flat[held.offset : held.offset + held.length].view(shape)

    def lines(self) -> list[str]:
        """The plan as the ranks compare it: all but which rank this is."""
        kinds = f"{self.param_dtype} {self.reduce_dtype} {self.main_dtype}"
        what = f"{self.name}: {len(self.names)} parameters, {kinds}, divisor {self.divisor:g}"
        how = f"{self.reshard}, trainable {self.is_trainable}, replicas {self.num_replicas}"
        places = f"{self.layout.shapes} at {self.layout.offsets} of {self.layout.shard_length}"
        return [f"{what}, {how}, {', '.join(self.names)}", places]

    def describe(self) -> str:
        """Two lines for a report."""
        if self.is_local:
            return f"{self.name}: {len(self.names)} parameters left as they are, one rank"
        groups = f"gather {self.gather.key}, reduce {self.reduce.key}"
        if self.replicate is not None:
            groups += f", replicate {self.replicate.key}"
        kinds = f"{self.param_dtype}/{self.reduce_dtype}/{self.main_dtype}".replace("torch.", "")
        frozen = "" if self.is_trainable else ", frozen"
        head = f"{self.name}: {groups}, divisor {self.divisor:g}, {kinds}{frozen}"
        cut = f"\n    1-D for the optimizer: {', '.join(self.cut_names)}" if self.cut_names else ""
        return f"{head}\n    {self.layout.describe()}{cut}"


class ShardRange(NamedTuple):
    """The range of one parameter in one rank's shard, in elements.

    Attributes:
        start: First element of the range in the flattened parameter.
        length: Length of the range; 0 for a rank that holds nothing of the parameter.
        offset: First element of the range in the rank's shard.
    """

    start: int
    length: int
    offset: int


@dataclass(frozen=True)
class FlatLayout:
    """Offsets of parameters in a buffer of `size` equal shards.

    Args:
        shapes: Shape of each parameter.
        offsets: First element of each parameter in the buffer.
        shard_length: Elements of each rank's shard.
        size: Number of ranks.
        is_row_aligned: True if every shard ends at a row boundary of the parameter it cuts. A row
            is everything behind one index of the first dimension. If False, some parameters are
            cut inside rows; see `is_cut_inside_rows`.
    """

    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    shard_length: int
    size: int
    is_row_aligned: bool

    @property
    def length(self) -> int:
        """Elements of the whole buffer."""
        return self.shard_length * self.size

    @cached_property
    def num_elements(self) -> int:
        """Elements of all parameters."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def padding(self) -> int:
        """Elements that belong to no parameter."""
        return self.length - self.num_elements

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Ranges of padding: begins and ends, ascending."""
        ends = [0]
        begins = []
        for begin, shape in sorted(zip(self.offsets, self.shapes, strict=True)):
            begins.append(begin)
            ends.append(begin + math.prod(shape))
        begins.append(self.length)
        pairs = zip(ends, begins, strict=True)
        return tuple((begin, end) for begin, end in pairs if begin < end)

    @property
    def is_one_parameter(self) -> bool:
        """True if the buffer is a single parameter and nothing else."""
        return len(self.shapes) == 1 and not self.padding

    def shard_range(self, index: int, rank: int) -> ShardRange:
        """The range of parameter `index` that `rank` holds."""
        begin = self.offsets[index]
        end = begin + math.prod(self.shapes[index])
        first = max(begin, rank * self.shard_length)
        last = min(end, (rank + 1) * self.shard_length)
        if last <= first:
            return ShardRange(0, 0, 0)
        return ShardRange(first - begin, last - first, first - rank * self.shard_length)

    def is_entire(self, index: int) -> bool:
        """True if one rank holds all of parameter `index`."""
        return sum(self.shard_range(index, rank).length > 0 for rank in range(self.size)) <= 1

    def is_cut_inside_rows(self, index: int) -> bool:
        """True if a rank holds only some of a row of parameter `index`."""
        return not self.is_row_aligned and self._cut_inside_rows[index]

    @cached_property
    def _cut_inside_rows(self) -> tuple[bool, ...]:
        cut = []
        for begin, shape in zip(self.offsets, self.shapes, strict=True):
            row, end = max(1, row_length(shape)), begin + math.prod(shape)
            boundaries = range(
                (begin // self.shard_length + 1) * self.shard_length, end, self.shard_length
            )
            cut.append(any((boundary - begin) % row for boundary in boundaries))
        return tuple(cut)

    def local_shape(self, index: int, rank: int) -> tuple[int, ...]:
        """Shape of the shard of `rank`: whole rows; one dimension if it is cut inside rows."""
        shape, length = self.shapes[index], self.shard_range(index, rank).length
        if not shape:
            return shape if length else (0,)
        if self.is_cut_inside_rows(index):
            return (length,)
        row = row_length(shape)
        return (length // row if row else shape[0], *shape[1:])

    def describe(self) -> str:
        """One line: sizes, padding, and how shards are cut."""
        sizes = f"{self.num_elements} elements over {self.size} ranks, {self.shard_length} each"
        percent = 100 * self.padding / max(1, self.length)
        num_cut = sum(map(self.is_cut_inside_rows, range(len(self.shapes))))
        inside = f"inside rows of {num_cut} parameters: at rows takes too much padding"
        cut = inside if num_cut else "at rows"
        return f"{sizes}, padding {self.padding} ({percent:.1f} %), cut {cut}"


# Shard lengths tried for each unit that a shard length may be a multiple of.
_TRIES = 64


def plan_flat_layout(
    shapes: Sequence[Sequence[int]], size: int, *, alignment: int = 1, max_padding: float = 0.1
) -> FlatLayout:
    """The layout with the smallest shards, among a few orders of the parameters.

    Args:
        shapes: Shape of each parameter.
        size: Number of ranks.
        alignment: Every parameter begins at a multiple of so many elements, and so does each shard.
        max_padding: Largest fraction of the buffer that may be padding for the sake of rows; what
            the alignment alone costs does not count. Beyond it shards are cut inside rows.
    """
    known = tuple(tuple(shape) for shape in shapes)
    numels = [math.prod(shape) for shape in known]
    packed, end = _packed(numels, alignment)
    least = _round_up(-(-end // size), alignment)
    if size > 1:
        # Also where no parameter has an element: what is cut has a length.
        least = max(least, alignment)
    else:
        return FlatLayout(known, packed, least, 1, True)
    rows = [max(1, row_length(shape)) for shape in known]
    limit = max(least, math.floor(least / (1 - max_padding)))
    best: tuple[int, list[int]] | None = None
    for order in _orders(rows, numels):
        for shard_length in _candidates(rows, least, limit, alignment):
            if best is not None and shard_length >= best[0]:
                break
            offsets = _place(order, rows, numels, shard_length, size, alignment)
            if offsets is not None:
                best = shard_length, offsets
                break
    if best is None:
        return FlatLayout(known, packed, least, size, all(row == 1 for row in rows))
    return FlatLayout(known, tuple(best[1]), best[0], size, True)


def row_length(shape: Sequence[int]) -> int:
    """Elements behind one index of the first dimension."""
    return math.prod(shape[1:])


def _packed(numels: Sequence[int], alignment: int) -> tuple[tuple[int, ...], int]:
    """Offsets with no more between parameters than the alignment asks for, and where they end."""
    offsets, end = [], 0
    for numel in numels:
        offsets.append(_round_up(end, alignment))
        end = offsets[-1] + numel
    return tuple(offsets), end


def _orders(rows: Sequence[int], numels: Sequence[int]) -> Iterable[list[int]]:
    given = list(range(len(rows)))
    yield given
    # Long rows first: short rows fill what is left of a shard.
    yield sorted(given, key=lambda i: (-rows[i], i))
    yield sorted(given, key=lambda i: (rows[i], i))
    yield sorted(given, key=lambda i: (-numels[i], i))


def _candidates(rows: Sequence[int], least: int, limit: int, alignment: int) -> list[int]:
    """Shard lengths to try, ascending: a parameter cut twice needs a shard of whole rows of it."""
    units, multiple = {alignment}, alignment
    for row in sorted(set(rows)):
        units.add(math.lcm(row, alignment))
        multiple = math.lcm(multiple, row)
        units.add(multiple)
    lengths: set[int] = {least}
    for unit in units:
        lengths.update(islice(range(_round_up(least, unit), limit + 1, unit), _TRIES))
    return sorted(lengths)


def _place(
    order: Sequence[int],
    rows: Sequence[int],
    numels: Sequence[int],
    shard_length: int,
    size: int,
    alignment: int,
) -> list[int] | None:
    """Offsets by parameter, each as early as it can be; None if they do not fit.

    Earlier is never worse: whatever follows a parameter may stay where it is.
    """
    offsets = [0] * len(order)
    end = 0
    for index in order:
        start = _first_fit(
            _round_up(end, alignment), rows[index], numels[index], shard_length, alignment
        )
        if start is None:
            return None
        offsets[index], end = start, start + numels[index]
        if end > shard_length * size:
            return None
    return offsets


def _first_fit(start: int, row: int, numel: int, shard_length: int, alignment: int) -> int | None:
    """The first aligned place from `start` where the ends of shards meet boundaries of rows."""
    # From a boundary of shards on everything repeats, so one more period tells all.
    period = math.lcm(row, alignment) // alignment
    boundary = _round_up(start, shard_length)
    for first in (start,) if start == boundary else (start, boundary):
        for begin in islice(range(first, first + shard_length, alignment), period):
            first_end = (begin // shard_length + 1) * shard_length
            num_ends = max(0, -(-(begin + numel) // shard_length) - begin // shard_length - 1)
            meets = (first_end - begin) % row == 0
            if num_ends == 0 or (meets and (num_ends == 1 or shard_length % row == 0)):
                return begin
            if num_ends > 1 and shard_length % row:
                # The second end inside misses a boundary of rows, and later begins have it too.
                break
    return None


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
