"""Ranks that are threads of one process: no start-up, for property tests of plans."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from pcomm.core.collectives.checks import (
    check_out,
    check_reduction,
    check_source,
    deliver,
    gather_sizes,
    scatter_sizes,
    transfer_sizes,
)
from pcomm.core.collectives.protocol import Call, Collectives, Handle, Pending
from pcomm.core.testing.programs import PATIENCE_S, scaled_s

__all__ = ["VirtualCollectives", "run_threads", "run_virtual"]


class VirtualCollectives(Handle, Collectives):
    """`Collectives` of one of several threads that hand tensors to each other.

    Written apart from the distributed ones, in the plainest way, so that one checks the other.
    """

    def __init__(self, rank: int, size: int, table: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, size
        self._table, self._barrier = table, barrier

    def run(self, call: Call) -> Tensor:
        """The result of an operation, computed from the inputs of all threads."""
        match call.operation:
            case "all_gather":
                result = self._gathered(call)
            case "reduce_scatter":
                result = self._reduced(call)
            case "all_reduce":
                check_reduction(call.op)
                stacked = torch.stack(self._all(call.x))
                result = stacked.sum(0) if call.op == "sum" else stacked.amax(0)
            case "all_to_all":
                result = self._exchanged(call)
            case "broadcast":
                check_source(call, self.size)
                result = self._all(call.x)[call.source].clone()
        check_out(call, result.shape[call.dim] if result.dim() else None)
        return result if call.out is None else deliver(result, call.out)

    def start(self, call: Call) -> Pending:
        """The result of `run`, at once."""
        return Pending.ready(self.run(call))

    def _gathered(self, call: Call) -> Tensor:
        gather_sizes(call, self.rank, self.size)
        return torch.cat(self._all(call.x), call.dim)

    def _reduced(self, call: Call) -> Tensor:
        length, _ = scatter_sizes(call, self.rank, self.size)
        lengths = list(call.sizes) if call.sizes else [length] * self.size
        total = torch.stack(self._all(call.x)).sum(0)
        shard: Tensor = total.split(lengths, call.dim)[self.rank].clone()
        return shard

    def _exchanged(self, call: Call) -> Tensor:
        length, sent, received = transfer_sizes(call, self.rank, self.size)
        equal = [length // self.size] * self.size
        parts = [peer[self.rank] for peer in self._all(call.x.split(sent or equal, call.dim))]
        found = [part.shape[call.dim] for part in parts]
        expected = received or equal
        assert found == expected, f"rank {self.rank} was sent {found}, expected {expected}"
        return torch.cat(parts, call.dim)

    def _all(self, mine: Any) -> list[Any]:
        """The pieces of all ranks, in rank order."""
        self._table[self.rank] = mine
        self._barrier.wait()
        # Copies: a rank that goes on may write over its own piece, by `out` for example.
        everything = [_copied(piece) for piece in self._table]
        # The next piece must not be put down before all ranks have copied this one.
        self._barrier.wait()
        return everything


def run_virtual(function: Callable[[VirtualCollectives], Any], size: int) -> list[Any]:
    """What `function` returns on each of `size` threads that form a group.

    The first error of a rank is raised here; the others are released from their waits.
    """
    barrier = threading.Barrier(size, timeout=scaled_s(PATIENCE_S))
    table: list[Any] = [None] * size
    found = run_threads(
        lambda rank: function(VirtualCollectives(rank, size, table, barrier)),
        range(size),
        [barrier],
    )
    return [found[rank] for rank in range(size)]


def run_threads(
    function: Callable[[int], Any], ranks: Iterable[int], barriers: Collection[threading.Barrier]
) -> dict[int, Any]:
    """What `function(rank)` returns on a thread for each rank.

    Args:
        function: Task of a rank.
        ranks: The ranks.
        barriers: Barriers of the threads; an error of one thread releases the others from them.

    Raises:
        Exception: The first error of a rank that is not a consequence of another one's.
    """
    results: dict[int, Any] = {}
    causes: list[BaseException] = []
    consequences: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = function(rank)
        except threading.BrokenBarrierError as problem:
            consequences.append(problem)
        except BaseException as problem:  # handed to the caller's thread below
            causes.append(problem)
            for barrier in barriers:
                barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in causes + consequences:
        raise error
    return results


def _copied(piece: Any) -> Any:
    return [x.clone() for x in piece] if isinstance(piece, tuple) else piece.detach().clone()
