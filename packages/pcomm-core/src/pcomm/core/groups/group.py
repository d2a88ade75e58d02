"""One group of ranks as this process sees it, and what it calls before it closes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from pcomm.core.collectives.autograd import differentiable
from pcomm.core.collectives.identity import IdentityCollectives
from pcomm.core.collectives.protocol import Collectives, Handle
from pcomm.core.control.control import Control
from pcomm.core.errors import TopologyError
from pcomm.core.groups.communicators import Communicator, communicator_of

__all__ = ["Closing", "Group"]


class Group(Handle):
    """An ordered set of ranks, its role, and the collectives between its ranks.

    Made by `open_groups`, or from a plain process group. Read only. It is data around a
    communicator, which it shares with all other groups around the same process group: their
    operations keep one order, whichever of them they are issued through.

    Attributes:
        name: Axes along which the group runs, such as `"dp_cp"`.
        role: Purpose of its communicator, such as `"gather"`; empty for the usual one.
        ranks: Global ranks, ascending.
        rank: Place of this rank in `ranks`.
        size: Number of ranks.
        asked: Options that were asked for.
        granted: Options in force.
        refused: Options that are not in force, with the reason.
        control: Control by which its ranks agree; None for a group around an existing process
            group, which agrees through the store of torch.distributed.
        collectives: Operations without gradients.
        differentiable: Operations with gradients.
    """

    __slots__ = (
        "_closing",
        "_communicator",
        "asked",
        "collectives",
        "control",
        "differentiable",
        "granted",
        "name",
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
        closing: Closing | None = None,
        control: Control | None = None,
    ) -> None:
        self.name, self.role, self.ranks = name, role, ranks
        self.rank, self.size = rank, len(ranks)
        self.asked, self.granted, self.refused = asked or {}, granted or {}, refused or {}
        self.control = control
        self._closing = Closing() if closing is None else closing
        self._communicator: Communicator | None = None
        self.collectives: Collectives
        self.differentiable: Collectives
        if process_group is None:
            self.collectives = self.differentiable = IdentityCollectives()
        else:
            self._communicator = communicator_of(process_group)
            self.collectives = self._communicator.collectives
            self.differentiable = self._communicator.differentiable

    @classmethod
    def from_process_group(
        cls,
        name: str,
        group: dist.ProcessGroup,
        *,
        role: str = "",
        closing: Closing | None = None,
    ) -> Group:
        """A group around an existing communicator, which its owner closes. Local.

        Args:
            name: Axes along which the group runs.
            group: Torch's group; its owner keeps it alive.
            role: Purpose of its communicator.
            closing: Calls before the collection that this group is a part of closes.

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
            return cls(name, ranks, None, role=role, closing=closing)
        return cls(name, ranks, group, role=role, rank=group.rank(), closing=closing)

    def with_collectives(self, collectives: Collectives) -> Group:
        """The same group, whose operations go through `collectives`. Local."""
        other = object.__new__(type(self))
        for name in Group.__slots__:
            setattr(other, name, getattr(self, name))
        other.collectives, other.differentiable = collectives, differentiable(collectives)
        return other

    def relabelled(self, name: str, ranks: tuple[int, ...]) -> Group:
        """The same group with another name and other numbers for its ranks. Local."""
        other = self.with_collectives(self.collectives)
        other.differentiable = self.differentiable
        other.name, other.ranks = name, ranks
        return other

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """Torch's group; None for one rank, which needs no communicator.

        Raises:
            ClosedError: It was closed.
        """
        return None if self._communicator is None else self._communicator.process_group

    def before_close(
        self, call: Callable[[], object], *, is_local: bool = False
    ) -> Callable[[], None]:
        """Have `call` called when the `Groups` that this group belongs to close. Local.

        See `Groups.before_close`. A group made by `from_process_group` alone is closed by the
        owner of the process group, and then `call` is not called.

        Returns:
            A function that takes `call` back; calling it again does nothing.
        """
        return self._closing.add(call, is_local=is_local)

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


class Closing:
    """Calls that are made once, when the groups that they depend on close."""

    def __init__(self) -> None:
        # By an object each, since two equal calls are two.
        self._calls: dict[object, Callable[[], object]] = {}
        self._local: set[object] = set()

    def add(self, call: Callable[[], object], *, is_local: bool = False) -> Callable[[], None]:
        """Have `call` called. Local.

        Args:
            call: Function without arguments. It is kept until then, with all that it refers to.
            is_local: True if it neither communicates nor waits for another rank, so that it can be
                called when the groups are abandoned.

        Returns:
            A function that takes `call` back; calling it again does nothing.
        """
        key = object()
        self._calls[key] = call
        if is_local:
            self._local.add(key)

        def take_back() -> None:
            self._calls.pop(key, None)
            self._local.discard(key)

        return take_back

    def take_all(self) -> list[Callable[[], object]]:
        """All calls in the order in which they were added; none of them is kept."""
        calls = list(self._calls.values())
        self._calls.clear()
        self._local.clear()
        return calls

    def take_local(self) -> tuple[list[Callable[[], object]], list[Callable[[], object]]]:
        """The calls that are local and those that are not, in order; none of them is kept."""
        local = [call for key, call in self._calls.items() if key in self._local]
        others = [call for key, call in self._calls.items() if key not in self._local]
        self.take_all()
        return local, others
