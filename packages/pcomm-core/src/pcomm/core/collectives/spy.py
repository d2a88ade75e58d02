"""Collectives that note what passes through them, for tests and reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from pcomm.core.collectives.protocol import Collectives, Pending, Reduction

__all__ = ["Call", "SpyCollectives"]


@dataclass(frozen=True)
class Call:
    """One operation: its name, what entered it, and what it costs on the wire at best.

    Args:
        operation: Name without `_async`.
        input_shape: Shape of the tensor that went in.
        input_bytes: Its size.
        sent_bytes: Least number of bytes that this rank must send: for N ranks and an input of
            b bytes (N-1)b for a gather, (N-1)/N b for a reduce-scatter, 2(N-1)/N b for an
            all-reduce, everything but its own part for an all-to-all, b from the source of a
            broadcast (every other rank must get it; a tree sends it on).
        is_async: Whether it was started and waited for separately.
    """

    operation: str
    input_shape: tuple[int, ...]
    input_bytes: int
    sent_bytes: int
    is_async: bool


@dataclass
class SpyCollectives:
    """Passes everything on to `inner` and keeps a list of calls.

    Put it under the differentiable ones to see backward too:
    `DifferentiableCollectives(SpyCollectives(group.collectives))`.
    """

    inner: Collectives
    calls: list[Call] = field(default_factory=list)

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        return self.inner.rank

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return self.inner.size

    @property
    def counts(self) -> dict[str, int]:
        """Number of calls by operation."""
        return dict(Counter(call.operation for call in self.calls))

    @property
    def sent_bytes(self) -> int:
        """Bytes this rank had to send, summed over all calls."""
        return sum(call.sent_bytes for call in self.calls)

    def clear(self) -> None:
        """Forget all calls."""
        self.calls.clear()

    def all_gather(
        self,
        x: Tensor,
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Note and pass on."""
        self._note("all_gather", x, (self.size - 1) * _bytes(x), False)
        return self.inner.all_gather(x, dim=dim, sizes=sizes, out=out)

    def all_gather_async(
        self,
        x: Tensor,
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Pending:
        """Note and pass on."""
        self._note("all_gather", x, (self.size - 1) * _bytes(x), True)
        return self.inner.all_gather_async(x, dim=dim, sizes=sizes, out=out)

    def reduce_scatter(
        self,
        x: Tensor,
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Note and pass on."""
        self._note("reduce_scatter", x, self._others(x, dim, sizes), False)
        return self.inner.reduce_scatter(x, dim=dim, sizes=sizes, out=out)

    def reduce_scatter_async(
        self,
        x: Tensor,
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Pending:
        """Note and pass on."""
        self._note("reduce_scatter", x, self._others(x, dim, sizes), True)
        return self.inner.reduce_scatter_async(x, dim=dim, sizes=sizes, out=out)

    def all_reduce(self, x: Tensor, *, op: Reduction = "sum", out: Tensor | None = None) -> Tensor:
        """Note and pass on."""
        self._note("all_reduce", x, 2 * self._others(x, 0, None), False)
        return self.inner.all_reduce(x, op=op, out=out)

    def all_reduce_async(
        self, x: Tensor, *, op: Reduction = "sum", out: Tensor | None = None
    ) -> Pending:
        """Note and pass on."""
        self._note("all_reduce", x, 2 * self._others(x, 0, None), True)
        return self.inner.all_reduce_async(x, op=op, out=out)

    def all_to_all(
        self,
        x: Tensor,
        *,
        send_sizes: Sequence[int] | None = None,
        receive_sizes: Sequence[int] | None = None,
        dim: int = 0,
        out: Tensor | None = None,
    ) -> Tensor:
        """Note and pass on."""
        self._note("all_to_all", x, self._others(x, dim, send_sizes), False)
        return self.inner.all_to_all(
            x, send_sizes=send_sizes, receive_sizes=receive_sizes, dim=dim, out=out
        )

    def all_to_all_async(
        self,
        x: Tensor,
        *,
        send_sizes: Sequence[int] | None = None,
        receive_sizes: Sequence[int] | None = None,
        dim: int = 0,
        out: Tensor | None = None,
    ) -> Pending:
        """Note and pass on."""
        self._note("all_to_all", x, self._others(x, dim, send_sizes), True)
        return self.inner.all_to_all_async(
            x, send_sizes=send_sizes, receive_sizes=receive_sizes, dim=dim, out=out
        )

    def broadcast(self, x: Tensor, *, source: int = 0, out: Tensor | None = None) -> Tensor:
        """Note and pass on."""
        self._note("broadcast", x, _bytes(x) if self.rank == source else 0, False)
        return self.inner.broadcast(x, source=source, out=out)

    def broadcast_async(self, x: Tensor, *, source: int = 0, out: Tensor | None = None) -> Pending:
        """Note and pass on."""
        self._note("broadcast", x, _bytes(x) if self.rank == source else 0, True)
        return self.inner.broadcast_async(x, source=source, out=out)

    def _others(self, x: Tensor, dim: int, sizes: Sequence[int] | None) -> int:
        """Bytes of `x` that belong to other ranks."""
        if sizes is None or not x.shape[dim]:
            return _bytes(x) * (self.size - 1) // self.size
        return _bytes(x) * (sum(sizes) - sizes[self.rank]) // x.shape[dim]

    def _note(self, operation: str, x: Tensor, sent_bytes: int, is_async: bool) -> None:
        self.calls.append(Call(operation, tuple(x.shape), _bytes(x), sent_bytes, is_async))


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
