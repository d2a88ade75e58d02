"""Communication with nobody: on one rank every operation returns its input."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pcomm.core.collectives.protocol import Pending, Reduction

__all__ = ["IdentityCollectives"]


class IdentityCollectives:
    """The `Collectives` of a group of one: no communicator, no autograd function, no copy.

    With `out` the input is copied there, unless they are the same tensor. Layers that can leave
    a call out altogether should do so when they are built: `size` is 1.
    """

    rank = 0
    size = 1

    def all_gather(
        self,
        x: Tensor,
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """`x`."""
        return x if out is None else _into(out, x)

    def all_gather_async(
        self,
        x: Tensor,
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Pending:
        """`x`, at once."""
        return _ready(x, out)

    def reduce_scatter(
        self,
        x: Tensor,
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """`x`."""
        return x if out is None else _into(out, x)

    def reduce_scatter_async(
        self,
        x: Tensor,
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Pending:
        """`x`, at once."""
        return _ready(x, out)

    def all_reduce(self, x: Tensor, *, op: Reduction = "sum", out: Tensor | None = None) -> Tensor:
        """`x`."""
        return x if out is None else _into(out, x)

    def all_reduce_async(
        self, x: Tensor, *, op: Reduction = "sum", out: Tensor | None = None
    ) -> Pending:
        """`x`, at once."""
        return _ready(x, out)

    def all_to_all(
        self,
        x: Tensor,
        *,
        send_sizes: Sequence[int] | None = None,
        receive_sizes: Sequence[int] | None = None,
        dim: int = 0,
        out: Tensor | None = None,
    ) -> Tensor:
        """`x`."""
        return x if out is None else _into(out, x)

    def all_to_all_async(
        self,
        x: Tensor,
        *,
        send_sizes: Sequence[int] | None = None,
        receive_sizes: Sequence[int] | None = None,
        dim: int = 0,
        out: Tensor | None = None,
    ) -> Pending:
        """`x`, at once."""
        return _ready(x, out)

    def broadcast(self, x: Tensor, *, source: int = 0, out: Tensor | None = None) -> Tensor:
        """`x`."""
        return x if out is None else _into(out, x)

    def broadcast_async(self, x: Tensor, *, source: int = 0, out: Tensor | None = None) -> Pending:
        """`x`, at once."""
        return _ready(x, out)


def _into(out: Tensor, x: Tensor) -> Tensor:
    return out if out is x else out.copy_(x)


def _ready(x: Tensor, out: Tensor | None) -> Pending:
    return Pending.ready(x if out is None else _into(out, x))
