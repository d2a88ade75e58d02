"""What `make_plan` is given, as a plan needs it: a place in a group, and integers of the host."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import Tensor

from pcomm.core.collectives.protocol import Collectives
from pcomm.core.errors import ConfigError, LayoutError
from pcomm.core.group import Group
from pcomm.gdn_cp.specs import Spec
from pcomm.gdn_cp.tokens import LayoutName, Tokens

__all__ = ["GroupLike", "all_specs", "members", "pack_of"]

GroupLike = Group | Collectives | tuple[int, int]


def members(group: GroupLike) -> tuple[int, int, Collectives | None]:
    """Rank, size, and what carries a plan out; nothing for a pair of numbers.

    Raises:
        ConfigError: A rank outside its group.
    """
    if isinstance(group, tuple):
        rank, size = group
        if not 0 <= rank < size:
            raise ConfigError(
                f"make_plan: group={group}",
                found=f"rank {rank} of {size}",
                why="A rank is a place in its group, counted from 0.",
                fix="Pass (rank, size), or the group itself.",
            )
        return rank, size, None
    collectives = group.collectives if isinstance(group, Group) else group
    return collectives.rank, collectives.size, collectives


def all_specs(specs: Spec | Sequence[Spec]) -> tuple[Spec, ...]:
    """The mixers, at least one.

    Raises:
        ConfigError: None.
    """
    found = (specs,) if isinstance(specs, Spec) else tuple(specs)
    if not found:
        raise ConfigError(
            "make_plan: specs",
            found="no mixer",
            why="What travels depends on the projections of a mixer.",
            fix="Pass a GdnSpec, Mamba2Spec or AttentionSpec, or several.",
        )
    return found


def pack_of(
    cu_seqlens: Sequence[int] | Tensor, size: int, layout: LayoutName, num_tokens: int | None
) -> Tokens:
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
    tokens = Tokens(offsets, size, layout)
    if num_tokens is not None and num_tokens != tokens.num_tokens:
        raise LayoutError(
            f"make_plan: a buffer of {num_tokens} tokens",
            found=f"cu_seqlens ends at {tokens.num_tokens}",
            why="A token outside all sequences has no state to meet, and no place on a rank.",
            fix="Cut the buffer, or give its tail an offset of its own.",
        )
    return tokens
