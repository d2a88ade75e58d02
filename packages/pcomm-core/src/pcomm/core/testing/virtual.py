"""Ranks that are threads of one process: no start-up, for property tests of plans."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pcomm.core.collectives.handle import Handle
from pcomm.core.collectives.out import check_out, deliver
from pcomm.core.collectives.protocol import Pending, Reduction
from pcomm.core.collectives.shapes import gather_sizes, scatter_sizes, transfer_sizes
from pcomm.core.testing.patience import PATIENCE_S, scaled_s

__all__ = ["VirtualCollectives", "run_virtual"]


class VirtualCollectives(Handle):
    """`Collectives` of one of several threads that hand tensors to each other.

    Written apart from the distributed ones, in the plainest way, so that one checks the other.
    """

    def __init__(self, rank: int, size: int, table: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, size
        self._table, self._barrier = table, barrier

    def all_gather(
        self,
        x: Tensor,
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """The shards of all ranks."""
        gather_sizes(x, dim, sizes, self.rank, self.size)
        return _into("all_gather", x, out, torch.cat(self._all(x), dim))

    def reduce_scatter(
        self,
        x: Tensor,
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """This rank's shard of the sum."""
        scatter_sizes(x, dim, sizes, self.size)
        lengths = list(sizes) if sizes else [x.shape[dim] // self.size] * self.size
        total = torch.stack(self._all(x)).sum(0)
        return _into("reduce_scatter", x, out, total.split(lengths, dim)[self.rank].clone())

    def all_reduce(self, x: Tensor, *, op: Reduction = "sum", out: Tensor | None = None) -> Tensor:
        """The sum or maximum over all ranks."""
        stacked = torch.stack(self._all(x))
        return _into("all_reduce", x, out, stacked.sum(0) if op == "sum" else stacked.amax(0))

    def all_to_all(
        self,
        x: Tensor,
        *,
        send_sizes: Sequence[int] | None = None,
        receive_sizes: Sequence[int] | None = None,
        dim: int = 0,
        out: Tensor | None = None,
    ) -> Tensor:
        """The parts received, in rank order."""
        sent, received = transfer_sizes(x, dim, send_sizes, receive_sizes, self.rank, self.size)
        parts = [peer[self.rank] for peer in self._all(x.split(sent, dim))]
        found = [part.shape[dim] for part in parts]
        assert found == received, f"rank {self.rank} was sent {found}, expected {received}"
        return _into("all_to_all", x, out, torch.cat(parts, dim))

    def broadcast(self, x: Tensor, *, source: int = 0, out: Tensor | None = None) -> Tensor:
        """`x` of the rank at place `source`."""
        return _into("broadcast", x, out, self._all(x)[source].clone())

    def all_gather_async(self, x: Tensor, **options: Any) -> Pending:
        """`all_gather`, done at once."""
        return _done(self.all_gather(x, **options))

    def reduce_scatter_async(self, x: Tensor, **options: Any) -> Pending:
        """`reduce_scatter`, done at once."""
        return _done(self.reduce_scatter(x, **options))

    def all_reduce_async(self, x: Tensor, **options: Any) -> Pending:
        """`all_reduce`, done at once."""
        return _done(self.all_reduce(x, **options))

    def all_to_all_async(self, x: Tensor, **options: Any) -> Pending:
        """`all_to_all`, done at once."""
        return _done(self.all_to_all(x, **options))

    def broadcast_async(self, x: Tensor, **options: Any) -> Pending:
        """`broadcast`, done at once."""
        return _done(self.broadcast(x, **options))

    def _all(self, mine: Any) -> list[Any]:
        """What every rank put on the table."""
        self._table[self.rank] = mine
        self._barrier.wait()
        # Copies: a rank that goes on may write over its own piece, by `out` for example.
        everything = [_copied(piece) for piece in self._table]
        # Nobody may put down the next piece before all have taken this one.
        self._barrier.wait()
        return everything


def run_virtual(function: Callable[[VirtualCollectives], Any], size: int) -> list[Any]:
    """What `function` returns on each of `size` threads that form a group.

    The first error of a rank is raised here; the others are released from their waits.
    """
    barrier = threading.Barrier(size, timeout=scaled_s(PATIENCE_S))
    table: list[Any] = [None] * size
    results: list[Any] = [None] * size
    causes: list[BaseException] = []
    consequences: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = function(VirtualCollectives(rank, size, table, barrier))
        except threading.BrokenBarrierError as problem:
            consequences.append(problem)
        except BaseException as problem:  # handed to the caller's thread below
            causes.append(problem)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in causes + consequences:
        raise error
    return results


def _copied(piece: Any) -> Any:
    return [x.clone() for x in piece] if isinstance(piece, tuple) else piece.detach().clone()


def _into(name: str, x: Tensor, out: Tensor | None, result: Tensor) -> Tensor:
    check_out(name, x, result.shape, out)
    return result if out is None else deliver(result, out)


def _done(result: Tensor) -> Pending:
    return Pending.ready(result)
