"""Collectives that let somebody watch every operation: the base of spies, traces and ledgers.

One class passes all ten operations on, so that whoever wants to watch writes two methods.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from pcomm.core.collectives.handle import Handle
from pcomm.core.collectives.protocol import Collectives, Pending, Reduction

__all__ = ["InstrumentedCollectives", "Operation"]


@dataclass(frozen=True, eq=False)
class Operation:
    """One call, as it was made on this rank.

    Args:
        name: Name without `_async`.
        x: The tensor that goes in; not to be kept.
        sent_bytes: Least number of bytes that this rank must send: for N ranks and an input of
            b bytes (N-1)b for a gather, (N-1)/N b for a reduce-scatter, 2(N-1)/N b for an
            all-reduce, everything but its own part for an all-to-all, b from the source of a
            broadcast (every other rank must get it; a tree sends it on).
        dim: Dimension along which shards lie; None where there are none.
        sizes: Of a gather or reduce-scatter, if given: the same on every rank.
        is_sized: Whether the sizes of an all-to-all were given; they differ from rank to rank.
        detail: The reduction, or the source of a broadcast.
    """

    name: str
    x: Tensor
    sent_bytes: int
    dim: int | None = None
    sizes: tuple[int, ...] | None = None
    is_sized: bool = False
    detail: str = ""

    @property
    def agreed(self) -> str:
        """What must be the same on every rank, as one line."""
        shape: list[str] = [str(n) for n in self.x.shape]
        parts = [self.name, self.detail, str(self.x.dtype).removeprefix("torch.")]
        if self.dim is not None:
            dim = self.dim % max(1, self.x.dim())
            # These lengths differ between ranks; where they must fit together, sizes says how.
            if self.is_sized or (self.sizes is not None and self.name == "all_gather"):
                shape[dim : dim + 1] = ["*"]
            parts.append(f"dim {dim}")
        parts.append(f"[{', '.join(shape)}]")
        if self.sizes is not None:
            parts.append(f"sizes {list(self.sizes)}")
        return " ".join(part for part in parts if part)


class InstrumentedCollectives(Handle):
    """Passes everything on to `inner`; a subclass says what happens around a call.

    Args:
        inner: The collectives that move the tensors.
    """

    def __init__(self, inner: Collectives) -> None:
        self.inner = inner

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        return self.inner.rank

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return self.inner.size

    def blocking(
        self, operation: Operation, run: Callable[[], Tensor], start: Callable[[], Pending]
    ) -> Tensor:
        """Around a call that blocks: `run` it, or `start` its twin and wait for that."""
        return run()

    def started(self, operation: Operation, start: Callable[[], Pending]) -> Pending:
        """Around a call that returns at once."""
        return start()

    def all_gather(
        self,
        x: Tensor,
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Observe and pass on."""
        return self.blocking(
            self._gather(x, dim, sizes),
            lambda: self.inner.all_gather(x, dim=dim, sizes=sizes, out=out),
            lambda: self.inner.all_gather_async(x, dim=dim, sizes=sizes, out=out),
        )

    def all_gather_async(
        self,
        x: Tensor,
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Pending:
        """Observe and pass on."""
        return self.started(
            self._gather(x, dim, sizes),
            lambda: self.inner.all_gather_async(x, dim=dim, sizes=sizes, out=out),
        )

    def reduce_scatter(
        self,
        x: Tensor,
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Observe and pass on."""
        return self.blocking(
            self._scatter(x, dim, sizes),
            lambda: self.inner.reduce_scatter(x, dim=dim, sizes=sizes, out=out),
            lambda: self.inner.reduce_scatter_async(x, dim=dim, sizes=sizes, out=out),
        )

    def reduce_scatter_async(
        self,
        x: Tensor,
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Pending:
        """Observe and pass on."""
        return self.started(
            self._scatter(x, dim, sizes),
            lambda: self.inner.reduce_scatter_async(x, dim=dim, sizes=sizes, out=out),
        )

    def all_reduce(self, x: Tensor, *, op: Reduction = "sum", out: Tensor | None = None) -> Tensor:
        """Observe and pass on."""
        return self.blocking(
            self._reduce(x, op),
            lambda: self.inner.all_reduce(x, op=op, out=out),
            lambda: self.inner.all_reduce_async(x, op=op, out=out),
        )

    def all_reduce_async(
        self, x: Tensor, *, op: Reduction = "sum", out: Tensor | None = None
    ) -> Pending:
        """Observe and pass on."""
        return self.started(
            self._reduce(x, op), lambda: self.inner.all_reduce_async(x, op=op, out=out)
        )

    def all_to_all(
        self,
        x: Tensor,
        *,
        send_sizes: Sequence[int] | None = None,
        receive_sizes: Sequence[int] | None = None,
        dim: int = 0,
        out: Tensor | None = None,
    ) -> Tensor:
        """Observe and pass on."""
        return self.blocking(
            self._exchange(x, send_sizes, dim),
            lambda: self.inner.all_to_all(
                x, send_sizes=send_sizes, receive_sizes=receive_sizes, dim=dim, out=out
            ),
            lambda: self.inner.all_to_all_async(
                x, send_sizes=send_sizes, receive_sizes=receive_sizes, dim=dim, out=out
            ),
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
        """Observe and pass on."""
        return self.started(
            self._exchange(x, send_sizes, dim),
            lambda: self.inner.all_to_all_async(
                x, send_sizes=send_sizes, receive_sizes=receive_sizes, dim=dim, out=out
            ),
        )

    def broadcast(self, x: Tensor, *, source: int = 0, out: Tensor | None = None) -> Tensor:
        """Observe and pass on."""
        return self.blocking(
            self._spread(x, source),
            lambda: self.inner.broadcast(x, source=source, out=out),
            lambda: self.inner.broadcast_async(x, source=source, out=out),
        )

    def broadcast_async(self, x: Tensor, *, source: int = 0, out: Tensor | None = None) -> Pending:
        """Observe and pass on."""
        return self.started(
            self._spread(x, source),
            lambda: self.inner.broadcast_async(x, source=source, out=out),
        )

    def _gather(self, x: Tensor, dim: int, sizes: Sequence[int] | None) -> Operation:
        return Operation("all_gather", x, (self.size - 1) * x.nbytes, dim, _frozen(sizes))

    def _scatter(self, x: Tensor, dim: int, sizes: Sequence[int] | None) -> Operation:
        return Operation(
            "reduce_scatter", x, self._others(x, dim, sizes), dim, _frozen(sizes), detail="sum"
        )

    def _reduce(self, x: Tensor, op: Reduction) -> Operation:
        return Operation("all_reduce", x, 2 * self._others(x, 0, None), detail=op)

    def _exchange(self, x: Tensor, sizes: Sequence[int] | None, dim: int) -> Operation:
        sent_bytes = self._others(x, dim, sizes)
        return Operation("all_to_all", x, sent_bytes, dim, is_sized=sizes is not None)

    def _spread(self, x: Tensor, source: int) -> Operation:
        sent_bytes = x.nbytes if self.rank == source else 0
        return Operation("broadcast", x, sent_bytes, detail=f"from {source}")

    def _others(self, x: Tensor, dim: int, sizes: Sequence[int] | None) -> int:
        """Bytes of `x` that belong to other ranks."""
        if sizes is None or not x.shape[dim]:
            return x.nbytes * (self.size - 1) // self.size
        return x.nbytes * (sum(sizes) - sizes[self.rank]) // x.shape[dim]


def _frozen(sizes: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if sizes is None else tuple(sizes)
