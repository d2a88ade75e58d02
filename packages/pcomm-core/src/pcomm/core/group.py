"""One group of ranks with a role."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from pcomm.core.collectives.choice import collectives_of
from pcomm.core.collectives.differentiable import differentiable
from pcomm.core.collectives.identity import IdentityCollectives
from pcomm.core.collectives.protocol import Collectives
from pcomm.core.errors import TopologyError

__all__ = ["Group"]


class Group:
    """An ordered set of ranks, what it is for, and how its ranks talk to each other.

    Made by `open_groups`, or from a plain process group. Read only.

    Attributes:
        name: Axes along which the group runs, such as `"dp_cp"`.
        role: What its communicator is for, such as `"gather"`; empty for the usual one.
        ranks: Global ranks, ascending.
        rank: This rank's place in `ranks`.
        size: Number of ranks.
        process_group: Torch's group; None for one rank, which needs no communicator.
        asked: Options that were asked for.
        granted: Options in force.
        refused: Options that are not in force, with the reason.
        collectives: Operations without gradients.
        differentiable: The same with gradients.
    """

    __slots__ = (
        "asked",
        "collectives",
        "differentiable",
        "granted",
        "name",
        "process_group",
        "rank",
        "ranks",
        "refused",
        "role",
        "size",
    )

    def __init__(
        self,
        name: str,
        ranks: tuple[int, ...],
        process_group: dist.ProcessGroup | None,
        *,
        role: str = "",
        rank: int = 0,
        asked: Mapping[str, Any] | None = None,
        granted: Mapping[str, Any] | None = None,
        refused: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.role, self.ranks, self.process_group = name, role, ranks, process_group
        self.rank, self.size = rank, len(ranks)
        self.asked, self.granted, self.refused = asked or {}, granted or {}, refused or {}
        self.collectives: Collectives = (
            IdentityCollectives() if process_group is None else collectives_of(process_group)
        )
        self.differentiable: Collectives = differentiable(self.collectives)

    @classmethod
    def from_process_group(cls, name: str, group: dist.ProcessGroup, *, role: str = "") -> Group:
        """A group around somebody else's communicator, which is not closed by us. Local.

        Raises:
            TopologyError: `group` is what torch hands to ranks that do not belong to it.
        """
        if not isinstance(group, dist.ProcessGroup):
            raise TopologyError(
                f"Group.from_process_group: {name!r}",
                found=f"{group!r}, which is no process group",
                why="torch.distributed.new_group returns such a value on ranks that do not belong.",
                fix="Leave the group out on those ranks.",
            )
        ranks = tuple(dist.get_process_group_ranks(group))
        if len(ranks) == 1:
            return cls(name, ranks, None, role=role)
        return cls(name, ranks, group, role=role, rank=group.rank())

    def with_collectives(self, collectives: Collectives) -> Group:
        """The same group, whose operations go through `collectives`. Local."""
        other = Group(
            self.name,
            self.ranks,
            self.process_group,
            role=self.role,
            rank=self.rank,
            asked=self.asked,
            granted=self.granted,
            refused=self.refused,
        )
        other.collectives, other.differentiable = collectives, differentiable(collectives)
        return other

    @property
    def is_identity(self) -> bool:
        """Whether this rank is alone, so that every collective returns its input."""
        return self.size == 1

    @property
    def key(self) -> str:
        """Name and role as one word, for messages: `dp_cp[gather]`."""
        return f"{self.name}[{self.role}]" if self.role else self.name

    def __repr__(self) -> str:
        return f"Group({self.key}, rank {self.rank} of {self.size})"
