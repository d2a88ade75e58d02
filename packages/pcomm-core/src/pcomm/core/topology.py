"""Ranks as points on named axes: pure integers, no torch, no communication.

A rank is a number written in mixed radix, one digit an axis. `order` lists the axes from the
fastest digit to the slowest, so with `order=("tp", "dp")` neighbouring ranks differ in `tp`.
Every axis then has a *stride*: the distance between two ranks that differ by one on it. All
questions (which ranks are in my group, do two groups have the same members) are answered from
sizes and strides, never by writing out all groups, so they stay cheap at 100,000 ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from pcomm.core.errors import TopologyError, near_misses

__all__ = ["Topology"]


@dataclass(frozen=True, slots=True)
class _Digit:
    """One axis, or several that lie side by side: `size` ranks, `stride` apart."""

    size: int
    stride: int


@dataclass(frozen=True)
class Topology:
    """Coordinates of `world_size` ranks on named axes, with other views of the same ranks.

    Args:
        axes: Size of each axis by name, such as `{"pp": 1, "dp": 2, "cp": 1, "tp": 2}`.
        order: Axis names from the fastest to the slowest digit of the rank; by default the
            reverse of `axes`, so that the last axis written is the fastest, as in a C array.
        offset: The first rank. Ranks run from `offset` to `offset + world_size - 1`.
        failed: Ranks that are gone. They keep their coordinates and are left out of members.
        views: Further factorisations of the same ranks by name, which `view` makes.

    Raises:
        TopologyError: A size below one, a name with `_` or `.` (they join names in keys), an
            order that is not a permutation of the axes, or a failed rank outside the range.
    """

    axes: Mapping[str, int]
    order: tuple[str, ...] = ()
    offset: int = 0
    failed: frozenset[int] = frozenset()
    views: Mapping[str, Topology] = field(default_factory=lambda: MappingProxyType({}))
    _digits: Mapping[str, _Digit] = field(init=False, repr=False, compare=False)

    def __init__(
        self,
        axes: Mapping[str, int],
        order: Sequence[str] = (),
        *,
        offset: int = 0,
        failed: Iterable[int] = (),
        views: Mapping[str, Topology] | None = None,
    ) -> None:
        chosen = tuple(order) or tuple(reversed(tuple(axes)))
        _check_axes(axes, chosen, offset)
        digits, stride = {}, 1
        for axis in chosen:
            digits[axis] = _Digit(axes[axis], stride)
            stride *= axes[axis]
        # The dataclass is frozen, so its own constructor has to write around that.
        for name, value in {
            "axes": MappingProxyType(dict(axes)),
            "order": chosen,
            "offset": offset,
            "failed": frozenset(failed),
            "views": MappingProxyType(dict(views or {})),
            "_digits": MappingProxyType(digits),
        }.items():
            object.__setattr__(self, name, value)
        for rank in sorted(self.failed):
            self._check_rank("failed", rank)

    def __reduce__(self) -> tuple[object, ...]:
        # Mapping proxies do not pickle, and a topology crosses process boundaries.
        keywords = {"offset": self.offset, "failed": self.failed, "views": dict(self.views)}
        return _rebuild, (dict(self.axes), self.order, keywords)

    def __hash__(self) -> int:
        # Mappings are equal in whatever order they were filled.
        axes = frozenset(self.axes.items())
        return hash((axes, self.order, self.offset, self.failed, frozenset(self.views)))

    # -- the ranks -----------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """Number of ranks, failed ones included."""
        return math.prod(self.axes.values())

    @property
    def ranks(self) -> range:
        """All ranks, failed ones included, ascending."""
        return range(self.offset, self.offset + self.world_size)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of `rank` on every axis."""
        self._check_rank("coordinates", rank)
        position = rank - self.offset
        return {a: position // d.stride % d.size for a, d in self._digits.items()}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank at `coordinates`, which names every axis once."""
        if set(coordinates) != set(self.axes):
            raise TopologyError(
                "Topology.rank",
                found=f"coordinates for {sorted(coordinates)}, axes are {sorted(self.axes)}",
                why="One number per axis is needed to name one rank.",
                fix="Give every axis exactly once; an axis of size 1 has coordinate 0.",
            )
        for axis, value in coordinates.items():
            if not 0 <= value < self.axes[axis]:
                raise TopologyError(
                    f"Topology.rank: {axis}={value}",
                    found=f"axis {axis!r} has size {self.axes[axis]}",
                    why="A coordinate counts from 0 to the size of its axis less one.",
                    fix=f"Use 0 to {self.axes[axis] - 1}.",
                )
        return self.offset + sum(coordinates[a] * d.stride for a, d in self._digits.items())

    # -- groups of ranks -----------------------------------------------------------------

    def members(self, rank: int, axes: str | Iterable[str]) -> tuple[int, ...]:
        """Ranks that differ from `rank` only on `axes`, ascending, failed ones left out.

        Args:
            rank: Any rank of this topology.
            axes: Axis names, or one string that joins them by `_` such as `"dp_cp"`; a prefix
                such as `"expert.edp"` looks in that view.
        """
        self._check_rank("members", rank)
        topology, names = self._resolve(axes)
        lowest = rank
        position = rank - topology.offset
        for name in names:
            digit = topology._digits[name]
            lowest -= position // digit.stride % digit.size * digit.stride
        found = topology._spread(lowest, names)
        return tuple(r for r in found if r not in self.failed) if self.failed else tuple(found)

    def groups(self, axes: str | Iterable[str]) -> Iterator[tuple[int, ...]]:
        """Members of every group along `axes`, one group at a time, by lowest rank.

        A group whose ranks have all failed is left out.
        """
        topology, names = self._resolve(axes)
        others = [name for name in topology.order if name not in names]
        for lowest in topology._spread(topology.offset, others):
            group = topology._spread(lowest, names)
            alive = tuple(r for r in group if r not in self.failed)
            if alive:
                yield alive

    def group_size(self, axes: str | Iterable[str]) -> int:
        """Number of ranks in a group along `axes`, failed ones included."""
        topology, names = self._resolve(axes)
        return math.prod(topology.axes[name] for name in names)

    def have_same_members(self, one: str | Iterable[str], other: str | Iterable[str]) -> bool:
        """Whether the groups along `one` and along `other` are the same sets of ranks.

        Decided from strides: digits that lie side by side merge into one, and two sets of axes
        give the same groups exactly when the merged digits are equal. This is what proves that
        `dp_cp` of the dense view and `edp_ep` of the expert view cover the same ranks.
        """
        return self._merged(one) == self._merged(other)

    # -- derived topologies --------------------------------------------------------------

    def view(
        self,
        name: str,
        axes: Mapping[str, int],
        order: Sequence[str] = (),
        *,
        shared: Iterable[str] | None = None,
    ) -> Topology:
        """This topology with one more factorisation of the same ranks, such as for experts.

        Args:
            name: Prefix under which the view's axes are found: `"expert"` for `"expert.ep"`.
            axes: Size of each axis; the product must be the world size.
            order: Fastest axis first, as for `Topology`.
            shared: Axes that must have the same members in both; by default every axis name
                that occurs in both.

        Raises:
            TopologyError: The product differs, or a shared axis has other members; the message
                names the first rank whose members differ.
        """
        if name in self.views or not name.isidentifier():
            raise TopologyError(
                f"Topology.view: name {name!r}",
                found=f"views {sorted(self.views)}",
                why="A view needs a fresh name that is an identifier: keys are 'view.axis'.",
                fix="Choose another name.",
            )
        view = Topology(axes, order, offset=self.offset, failed=self.failed)
        if view.world_size != self.world_size:
            raise TopologyError(
                f"Topology.view {name!r}: {_product(axes)} = {view.world_size} ranks",
                found=f"the topology has {_product(self.axes)} = {self.world_size} ranks",
                why="A view factorises the same ranks in another way, so the products are equal.",
                fix=f"Change the sizes of {name!r} so that they multiply to {self.world_size}.",
            )
        grown = Topology(
            self.axes,
            self.order,
            offset=self.offset,
            failed=self.failed,
            views={**self.views, name: view},
        )
        for axis in sorted(set(self.axes) & set(axes) if shared is None else set(shared)):
            grown._prove_shared(name, axis)
        return grown

    def with_failed(self, ranks: Iterable[int]) -> Topology:
        """This topology and its views without `ranks`, which keep their coordinates."""
        gone = self.failed | frozenset(ranks)
        views = {
            name: Topology(view.axes, view.order, offset=view.offset, failed=gone)
            for name, view in self.views.items()
        }
        return Topology(self.axes, self.order, offset=self.offset, failed=gone, views=views)

    def describe(self) -> str:
        """One line of sizes in `order`, offset, views and failed ranks; equal if topologies are."""
        parts = ["x".join(f"{a}{self.axes[a]}" for a in self.order)]
        if self.offset:
            parts.append(f"offset {self.offset}")
        parts += [f"{name}: {view.describe()}" for name, view in sorted(self.views.items())]
        if self.failed:
            parts.append(f"failed {sorted(self.failed)}")
        return ", ".join(parts)

    def canonical_name(self, axes: str | Iterable[str]) -> str:
        """The key under which the group along `axes` is known: view prefix, axes fastest last."""
        prefix, _, names = axes.rpartition(".") if isinstance(axes, str) else ("", "", axes)
        topology, found = self._resolve(axes if isinstance(axes, str) else "_".join(names))
        ordered = "_".join(name for name in reversed(topology.order) if name in found)
        return f"{prefix}.{ordered}" if prefix else ordered

    # -- how it is done ------------------------------------------------------------------

    def _resolve(self, axes: str | Iterable[str]) -> tuple[Topology, tuple[str, ...]]:
        """The view that `axes` names and the axis names in it."""
        topology: Topology = self
        names = axes
        if isinstance(axes, str):
            prefix, _, rest = axes.rpartition(".")
            if prefix:
                if prefix not in self.views:
                    raise TopologyError(
                        f"Topology: view {prefix!r} in {axes!r}",
                        found=f"views {sorted(self.views)}",
                        why="Axes behind a dot are looked up in a view of that name.",
                        fix=near_misses(prefix, self.views),
                    )
                topology = self.views[prefix]
            names = rest.split("_")
        chosen = tuple(names)
        for name in chosen:
            if name not in topology.axes:
                raise TopologyError(
                    f"Topology: axis {name!r} in {axes!r}",
                    found=f"axes {sorted(topology.axes)}",
                    why="A group runs along named axes of the topology.",
                    fix=near_misses(name, topology.axes),
                )
        if len(set(chosen)) != len(chosen):
            raise TopologyError(
                f"Topology: axes {axes!r}",
                found="the same axis twice",
                why="Each axis is one digit of the rank and can vary only once.",
                fix="Name each axis once.",
            )
        return topology, tuple(name for name in topology.order if name in chosen)

    def _spread(self, lowest: int, names: Sequence[str]) -> list[int]:
        """Ascending ranks from `lowest` along `names`, which stand fastest first."""
        ranks = [lowest]
        for name in names:
            digit = self._digits[name]
            ranks = [r + i * digit.stride for i in range(digit.size) for r in ranks]
        return ranks

    def _merged(self, axes: str | Iterable[str]) -> list[_Digit]:
        topology, names = self._resolve(axes)
        merged: list[_Digit] = []
        for name in names:
            digit = topology._digits[name]
            if digit.size == 1:
                continue
            if merged and merged[-1].size * merged[-1].stride == digit.stride:
                merged[-1] = _Digit(merged[-1].size * digit.size, merged[-1].stride)
            else:
                merged.append(digit)
        return merged

    def _prove_shared(self, view: str, axis: str) -> None:
        if axis in self.axes and axis in self.views[view].axes:
            key = f"{view}.{axis}"
            if self.have_same_members(axis, key):
                return
            # The members of the first rank always differ: both groups start there, and they
            # are {offset + i * stride} with another stride or another number of ranks.
            here = Topology(self.axes, self.order, offset=self.offset).members(self.offset, axis)
            view_topology = self.views[view]
            there = Topology(view_topology.axes, view_topology.order, offset=self.offset)
            found = (
                f"rank {self.offset} has members {_shorten(here)} in the topology and "
                f"{_shorten(there.members(self.offset, axis))} in the view"
            )
        else:
            found = f"axes {sorted(self.axes)} and {sorted(self.views[view].axes)}"
        raise TopologyError(
            f"Topology.view {view!r}: shared axis {axis!r}",
            found=found,
            why="A shared axis must mean the same groups of ranks in both, or peers disagree.",
            fix="Give the axis one size and one place in both orders, or another name in the view.",
        )

    def _check_rank(self, asked: str, rank: int) -> None:
        if rank not in self.ranks:
            raise TopologyError(
                f"Topology.{asked}: rank {rank}",
                found=f"ranks {self.offset} to {self.offset + self.world_size - 1}",
                why=f"{_product(self.axes)} = {self.world_size} ranks from offset {self.offset}.",
                fix="Use a rank of this topology, or correct its sizes or offset.",
            )


def _rebuild(axes: dict[str, int], order: tuple[str, ...], keywords: dict[str, object]) -> Topology:
    return Topology(axes, order, **keywords)  # type: ignore[arg-type]


def _check_axes(axes: Mapping[str, int], order: tuple[str, ...], offset: int) -> None:
    for axis, size in axes.items():
        if not axis.isalnum() or size < 1:
            raise TopologyError(
                f"Topology: axis {axis!r} of size {size}",
                found=_product(axes),
                why="An axis has a name of letters and digits ('_', '.' join names), a size >= 1.",
                fix="Rename the axis or correct its size.",
            )
    if sorted(order) != sorted(axes):
        raise TopologyError(
            f"Topology: order {order}",
            found=f"axes {tuple(axes)}",
            why="The order decides which ranks are neighbours, so it names each axis exactly once.",
            fix="List every axis once, fastest first.",
        )
    if offset < 0:
        raise TopologyError(
            f"Topology: offset {offset}",
            found="a negative first rank",
            why="Ranks count from 0.",
            fix="Use an offset >= 0.",
        )


def _product(axes: Mapping[str, int]) -> str:
    return " x ".join(f"{name}={size}" for name, size in axes.items())


def _shorten(ranks: Sequence[int]) -> str:
    text = ", ".join(str(rank) for rank in ranks[:8])
    return f"[{text}{', ...' if len(ranks) > 8 else ''}]"
