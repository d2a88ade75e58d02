"""One rank of many without the others: its groups, whose operations answer at once.

A result has the shape and the memory that the real one has. Its values say nothing, but for host
integers, by which ranks plan together: the other ranks answer what this one has sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from pcomm.core import Collectives, Group, Groups, GroupSpec, Topology
from pcomm.core.collectives import Call, Pending, gather_sizes, scatter_sizes, transfer_sizes
from pcomm.core.control import Control
from pcomm.core.process import World

__all__ = ["LoneCollectives", "Sent", "lone_groups", "lone_world"]


class Sent(NamedTuple):
    """A collective that the rank has entered."""

    group: Group
    """Its group."""

    operation: str
    """Name of the operation."""

    num_bytes: int
    """Bytes of this rank's input."""

    sent_bytes: int
    """Least bytes that this rank sends; see `Call.sent_bytes`."""


Tell = Callable[[Sent], Callable[[], None]]
"""Told of a collective when it is issued; what it returns is called when the rank waits for it."""


def lone_world(num_ranks: int) -> World:
    """The first of so many processes, alone, on the CPU. Local."""
    return World(0, num_ranks, torch.device("cpu"), None)


def lone_groups(
    topology: Topology, specs: Sequence[str | tuple[str, str] | GroupSpec], tell: Tell
) -> Groups:
    """The groups that `open_groups` opens on rank 0, without other ranks. Local.

    Args:
        topology: All ranks.
        specs: Groups, as `open_groups` takes them.
        tell: Told of every collective.
    """
    found = []
    for spec in specs:
        if not isinstance(spec, GroupSpec):
            spec = GroupSpec(spec) if isinstance(spec, str) else GroupSpec(*spec)
        groups = topology.groups(spec.axes) if spec.ranks is None else [spec.ranks]
        ranks = next((tuple(ranks) for ranks in groups if 0 in ranks), None)
        if ranks is None:
            continue
        control = _EchoedControl(_EchoingStore(len(ranks)), ranks, 0)
        group = Group(spec.axes, ranks, None, role=spec.role, control=control)
        if group.size > 1:
            group = group.with_collectives(LoneCollectives(group, tell))
        found.append(group)
    return Groups(found, topology=topology)


class LoneCollectives(Collectives):
    """The collectives of one rank of a group whose other ranks are not there.

    Args:
        group: The group.
        tell: Told of every collective.
        rank: Place of the rank in the group.
    """

    def __init__(self, group: Group, tell: Tell, rank: int = 0) -> None:
        self.rank, self.size = rank, group.size
        self._group, self._tell = group, tell

    def run(self, call: Call) -> Tensor:
        """A result at once, for which the rank has waited."""
        return self.start(call).wait()

    def start(self, call: Call) -> Pending:
        """A result, of which the wait is told."""
        sent = call.sent_bytes(self.rank, self.size)
        waited = self._tell(Sent(self._group, call.operation, call.x.nbytes, sent))
        result = self._answer(call)

        def finish() -> Tensor:
            waited()
            return result

        return Pending(finish)

    def _answer(self, call: Call) -> Tensor:
        x, shape = call.x, list(call.x.shape)
        if call.operation == "all_gather":
            shape[call.dim] = gather_sizes(call, self.rank, self.size)[0]
        elif call.operation == "reduce_scatter":
            shape[call.dim] = scatter_sizes(call, self.rank, self.size)[0]
        elif call.operation == "all_to_all":
            length, _, received = transfer_sizes(call, self.rank, self.size)
            shape[call.dim] = length if received is None else sum(received)
        if call.out is not None:
            return call.out
        if isinstance(x, FakeTensor) or list(x.shape) != shape:
            return x.new_empty(shape) if isinstance(x, FakeTensor) else x.new_zeros(shape)
        return x.clone()


class _EchoingStore(dist.HashStore):
    """A store in which every rank of a group adds what this one adds."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self._num_ranks = num_ranks

    def add(self, key: str, amount: int) -> int:
        return super().add(key, amount * self._num_ranks)


class _EchoedControl(Control):
    """A control whose other ranks agree to everything."""

    def agree(
        self,
        topic: str,
        lines: Sequence[str] | None = None,
        *,
        error: Exception | None = None,
        timeout_s: float | None = None,
    ) -> str:
        if error is not None:
            raise error
        return f"{self.prefix}/{topic}"
