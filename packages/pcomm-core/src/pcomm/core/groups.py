"""All groups that a program uses, opened together and closed together.

Every rank first describes, line by line, the topology and the groups it is about to open, and
the ranks compare descriptions through the store. Only then are communicators made, in the order
of the list, each rank taking part in its own only. Nothing is kept outside the returned object.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

import torch.distributed as dist

from pcomm.core import env
from pcomm.core.agreement import agree_on_lines
from pcomm.core.errors import TopologyError, near_misses
from pcomm.core.group import Group
from pcomm.core.options import CommOptions, grant
from pcomm.core.topology import Topology

__all__ = ["GroupSpec", "Groups", "open_groups"]


@dataclass(frozen=True)
class GroupSpec:
    """A group to open: along which axes, in which role, with which options.

    Args:
        axes: Axis names joined by `_`, with a view prefix if needed: `"dp_cp"`, `"expert.ep"`.
        role: Groups over the same ranks with different roles have communicators of their own.
        options: Wishes for the communicator.
        backend: `"gloo"` or `"nccl"` for this group alone, such as gloo for the control plane of
            a job on GPUs; empty for that of `open_groups`.
    """

    axes: str
    role: str = ""
    options: CommOptions = CommOptions()
    backend: str = ""


class Groups(Mapping[str | tuple[str, str], Group]):
    """Groups by axes, or by axes and role: `groups["tp"]`, `groups["dp_cp", "gather"]`.

    A context manager that closes the communicators it owns, in reverse order. Groups whose ranks,
    role and options are all equal (such as `dp` and `dp_cp` when cp is 1) share a communicator.
    """

    def __init__(self, groups: Sequence[Group], *, owns_communicators: bool) -> None:
        self._groups: dict[str | tuple[str, str], Group] = {}
        for group in groups:
            self._groups[group.name, group.role] = group
            if not group.role:
                self._groups[group.name] = group
        self._owns_communicators = owns_communicators

    @classmethod
    def from_process_groups(
        cls, process_groups: Mapping[str | tuple[str, str], dist.ProcessGroup]
    ) -> Groups:
        """Groups around communicators that somebody else made and will close. Local.

        For a Megatron-style collection pass its attributes by the names wanted here:
        `Groups.from_process_groups({"tp": c.tp, ("dp_cp", "gather"): c.dp_cp_ag})`.
        """
        groups = []
        for key, process_group in process_groups.items():
            name, role = (key, "") if isinstance(key, str) else key
            groups.append(Group.from_process_group(name, process_group, role=role))
        return cls(groups, owns_communicators=False)

    def __getitem__(self, key: str | tuple[str, str]) -> Group:
        try:
            return self._groups[key]
        except KeyError:
            raise self._missing(key) from None

    def __iter__(self) -> Iterator[str | tuple[str, str]]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, key: object) -> bool:
        return key in self._groups

    def explain(self) -> str:
        """A table of this rank's groups: ranks, communicator, options asked and granted. Local."""
        rows = [("group", "role", "rank", "ranks", "communicator", "asked", "granted", "refused")]
        seen: dict[dist.ProcessGroup, str] = {}
        for group in self._distinct():
            communicator = "none (identity)"
            if group.process_group is not None:
                first = seen.setdefault(group.process_group, group.key)
                backend = dist.get_backend(group.process_group)
                communicator = backend if first == group.key else f"that of {first}"
            rows.append(
                (
                    group.name,
                    group.role or "-",
                    f"{group.rank} of {group.size}",
                    _shorten(group.ranks),
                    communicator,
                    _join(group.asked),
                    _join(group.granted),
                    _join(group.refused),
                )
            )
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ("  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) for r in rows)
        return "\n".join(line.rstrip() for line in lines)

    def close(self) -> None:
        """Close the communicators made by `open_groups`, last opened first. Collective.

        Calling it again does nothing. Communicators of others are left alone.
        """
        owned = self._distinct() if self._owns_communicators else []
        self._groups = {}
        closed: set[dist.ProcessGroup] = set()
        for group in reversed(owned):
            if group.process_group is not None and group.process_group not in closed:
                closed.add(group.process_group)
                dist.destroy_process_group(group.process_group)

    def __enter__(self) -> Groups:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _distinct(self) -> list[Group]:
        return [group for key, group in self._groups.items() if isinstance(key, tuple)]

    def _missing(self, key: str | tuple[str, str]) -> TopologyError:
        name, role = (key, "") if isinstance(key, str) else key
        known = [group.key for group in self._distinct()]
        return TopologyError(
            f"groups[{key!r}]",
            found=f"open groups {known}",
            why="Only groups named to open_groups have a communicator, and they are still open.",
            fix=near_misses(f"{name}[{role}]" if role else name, known),
        )


def open_groups(
    topology: Topology,
    specs: Sequence[str | tuple[str, str] | GroupSpec],
    *,
    backend: str = "gloo",
    store: dist.Store | None = None,
    timeout_s: float | None = None,
) -> Groups:
    """Open the groups that this rank belongs to. Collective: every rank of the topology calls it.

    With one rank nothing is initialised and nothing needs to be. With more, torch.distributed
    must be (see `pcomm.core.world.connect`).

    Args:
        topology: Axes, sizes and order; its world size must be that of torch.distributed.
        specs: Groups by axes, `(axes, role)`, or `GroupSpec`. The order is the creation order.
        backend: `"gloo"` or `"nccl"`.
        store: Where ranks compare what they ask for; by default the store of the default group.
        timeout_s: Seconds to wait for other ranks; by default `PCOMM_TIMEOUT_S`.

    Raises:
        TopologyError: Unknown axes, a group named twice, or another world size; on every rank.
        DivergenceError: Ranks ask for different groups; names the first difference, on every rank.
        UnsupportedError: An option of a strict `CommOptions` is not granted.
        PeerTimeoutError: A rank did not arrive.
    """
    env.check()
    wanted = [_normalised(topology, spec) for spec in specs]
    _check_distinct(wanted)
    rank = _own_rank(topology)
    granted = [grant(spec.options, spec.backend or backend, group=spec.axes) for spec in wanted]
    if topology.world_size > 1:
        agree_on_lines(
            store if store is not None else dist.distributed_c10d._get_default_store(),
            "open_groups",
            [f"topology {topology.describe()}", f"backend {backend}"]
            + [f"group {spec}" for spec in wanted],
            rank - topology.offset,
            topology.world_size,
            timeout_s=env.timeout_s() if timeout_s is None else timeout_s,
        )
    opened: list[Group] = []
    communicators: dict[tuple[object, ...], dist.ProcessGroup] = {}
    for spec, grants in zip(wanted, granted, strict=True):
        ranks = topology.members(rank, spec.axes)
        process_group = None
        if len(ranks) > 1:
            identity = (ranks, spec.role, spec.options, grants.backend)
            if identity not in communicators:
                # Only members create a group: at 100,000 ranks nobody can create all of them.
                communicators[identity] = dist.new_group(
                    list(ranks),
                    timeout=grants.timeout,
                    backend=grants.backend,
                    pg_options=grants.pg_options,
                    use_local_synchronization=True,
                    group_desc=f"pcomm:{spec.axes}:{spec.role}",
                )
            process_group = communicators[identity]
        opened.append(
            Group(
                spec.axes,
                ranks,
                process_group,
                role=spec.role,
                rank=ranks.index(rank),
                asked=spec.options.asked,
                granted=grants.fields if process_group is not None else {},
                refused=grants.refused if process_group is not None else {},
            )
        )
    return Groups(opened, owns_communicators=True)


def _normalised(topology: Topology, spec: str | tuple[str, str] | GroupSpec) -> GroupSpec:
    if isinstance(spec, str):
        spec = GroupSpec(spec)
    elif isinstance(spec, tuple):
        spec = GroupSpec(*spec)
    canonical = topology.canonical_name(spec.axes)
    if canonical != spec.axes:
        raise TopologyError(
            f"open_groups: group {spec.axes!r}",
            found=f"order {topology.order}, in which it is {canonical!r}",
            why="A group has one name, its axes from the slowest to the fastest.",
            fix=f"Ask for {canonical!r}.",
        )
    return spec


def _check_distinct(specs: Sequence[GroupSpec]) -> None:
    seen: dict[tuple[str, str], GroupSpec] = {}
    for spec in specs:
        other = seen.setdefault((spec.axes, spec.role), spec)
        if other is not spec:
            raise TopologyError(
                f"open_groups: group {spec.axes!r} with role {spec.role!r}",
                found=f"asked for twice, with {other.options.asked} and {spec.options.asked}",
                why="Axes and role are the key under which a group is found.",
                fix="Remove one, or give it a role of its own.",
            )


def _own_rank(topology: Topology) -> int:
    """This process's rank, after a check that the world is the one of the topology."""
    connected = dist.is_available() and dist.is_initialized()
    size = dist.get_world_size() if connected else 1
    rank = dist.get_rank() if connected else topology.offset
    if connected and size != topology.world_size and topology.offset == 0:
        found = f"torch.distributed has {size} ranks"
    elif not connected and topology.world_size > 1:
        found = "torch.distributed is not initialised, so there is one process"
    elif rank not in topology.ranks:
        found = f"this is rank {rank} of {size}"
    else:
        return rank
    raise TopologyError(
        f"open_groups: {topology.describe()}, ranks {topology.ranks[0]} to {topology.ranks[-1]}",
        found=found,
        why="Every rank of the topology is one process, and every process has a place in it.",
        fix="Start as many processes as the sizes multiply to (torchrun, or --ranks), "
        "or change the sizes.",
    )


def _shorten(ranks: tuple[int, ...]) -> str:
    text = ",".join(str(rank) for rank in ranks[:8])
    return text if len(ranks) <= 8 else f"{text},... ({len(ranks)})"


def _join(options: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items()) or "-"
