"""The arguments of `make_plan`, checked: a place in a group, and integers of the host."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from pcomm.core.collectives.protocol import Collectives
from pcomm.core.errors import ConfigError, LayoutError
from pcomm.core.groups.group import Group
from pcomm.gdn_cp.specs import Spec, check_spec, is_integer, is_spec
from pcomm.gdn_cp.strategies.choice import Link
from pcomm.gdn_cp.token_layout import LayoutName, TokenLayout

__all__ = ["GroupLike", "all_specs", "link_of", "pack_of", "place_in"]

GroupLike = Group | Collectives | dist.ProcessGroup | DeviceMesh | tuple[int, int]


@dataclass(frozen=True)
class GroupPlace:
    """This rank's place among those that share a plan.

    Args:
        rank: Counted from 0.
        size: Number of ranks.
        group: The group, through whose store ranks can agree; None if only collectives are known.
        collectives: The group's collectives; None for a pair of numbers.
    """

    rank: int
    size: int
    group: Group | None = None
    collectives: Collectives | None = None


def place_in(group: GroupLike) -> GroupPlace:
    """This rank's place in whatever `make_plan` takes as a group. Local.

    Raises:
        ConfigError: Not a group, a rank outside its group, or a mesh of several dimensions.
    """
    if isinstance(group, tuple):
        return _numbers(group)
    if isinstance(group, DeviceMesh):
        group = _only_dimension(group)
    if isinstance(group, dist.ProcessGroup):
        group = Group.from_process_group("cp", group)
    if isinstance(group, Group):
        return GroupPlace(group.rank, group.size, group, group.collectives)
    if all(hasattr(group, name) for name in ("rank", "size", "all_to_all", "reduce_scatter")):
        return GroupPlace(group.rank, group.size, None, group)
    why = "A plan is made for one place in a group of ranks."
    if group is None:
        why = "For torch None is the default group, for others it is a process alone."
    raise ConfigError(
        "make_plan: group",
        found=f"{group!r:.80}, of type {type(group).__name__}",
        why=why,
        fix="Pass a Group, a ProcessGroup such as dist.group.WORLD, a DeviceMesh of one dimension, "
        "or (0, 1) for a process alone. torch.distributed.new_group returns no group on ranks that "
        "do not belong to it: these make no plan.",
    )


def _numbers(pair: tuple[int, ...]) -> GroupPlace:
    if len(pair) == 2 and all(is_integer(number) for number in pair):
        rank, size = pair
        if 0 <= rank < size:
            return GroupPlace(rank, size)
        found = f"rank {rank} of {size}"
    else:
        found = f"a tuple of {', '.join(type(number).__name__ for number in pair) or 'nothing'}"
    raise ConfigError(
        f"make_plan: group={pair}",
        found=found,
        why="A rank is a place in its group, counted from 0.",
        fix="Pass (rank, size), or the group itself.",
    )


def _only_dimension(mesh: DeviceMesh) -> dist.ProcessGroup:
    names = mesh.mesh_dim_names or ()
    if mesh.ndim != 1 or mesh.get_coordinate() is None:
        several = mesh.ndim != 1
        raise ConfigError(
            "make_plan: group is a DeviceMesh",
            found=f"dimensions {names or mesh.ndim}" if several else "this rank is not in it",
            why="The ranks that share a sequence are those along one dimension, this one included.",
            fix=f"Pass mesh[{(names or ('cp',))[-1]!r}]." if several else "Leave this rank out.",
        )
    return mesh.get_group()


def all_specs(specs: Spec | Sequence[Spec]) -> tuple[Spec, ...]:
    """The mixers, at least one.

    Raises:
        ConfigError: None, or one that is no specification or contradicts itself.
    """
    found = tuple(specs) if isinstance(specs, Iterable) else (specs,)
    strange = [spec for spec in found if not is_spec(spec)]
    if strange or not found:
        raise ConfigError(
            "make_plan: specs",
            found=f"{strange[0]!r:.80}, of type {type(strange[0]).__name__}"
            if strange
            else "no mixer",
            why="What travels depends on the projections of a mixer.",
            fix="Pass a GdnSpec, Mamba2Spec or AttentionSpec, or another object with the facts of "
            "Spec; or several.",
        )
    for spec in found:
        check_spec(spec)
    return found


def link_of(link: Link | None) -> Link:
    """The link that strategies are weighed with; the default is a guess.

    Raises:
        ConfigError: Not a link.
    """
    if link is not None and not isinstance(link, Link):
        raise ConfigError(
            "make_plan: link",
            found=f"{link!r:.80}, of type {type(link).__name__}",
            why="The model of costs has a time for each collective and one for each byte.",
            fix="Pass Link(latency_us=..., gb_per_s=...).",
        )
    return link or Link()


def pack_of(
    cu_seqlens: Sequence[int] | Tensor, size: int, layout: LayoutName, num_tokens: int | None
) -> TokenLayout:
    """The pack, whose last offset is the length of the buffer where that is given.

    Raises:
        ConfigError: Offsets that are not integers of the host, or no such layout.
        LayoutError: Offsets or lengths that do not fit, or a buffer of another length.
    """
    where = cu_seqlens.device.type if isinstance(cu_seqlens, Tensor) else "cpu"
    try:
        if where != "cpu":
            raise TypeError(f"a tensor on {where}")
        offsets = tuple(map(operator.index, cu_seqlens))
    except TypeError as problem:
        raise ConfigError(
            "make_plan: cu_seqlens",
            found=str(problem),
            why="A plan is made from integers of the host: reading a device would wait for it.",
            fix="Keep the offsets on the host where the pack is made, as a tuple of integers.",
        ) from None
    tokens = TokenLayout(offsets, size, layout)
    if num_tokens is not None and num_tokens != tokens.num_tokens:
        raise LayoutError(
            f"make_plan: a buffer of {num_tokens} tokens",
            found=f"cu_seqlens ends at {tokens.num_tokens}",
            why="A token outside all sequences has no state to meet, and no place on a rank.",
            fix="Cut the buffer, or give its tail an offset of its own.",
        )
    return tokens
