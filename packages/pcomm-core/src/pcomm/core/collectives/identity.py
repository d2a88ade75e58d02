"""Communication with nobody: on one rank every operation returns its input."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pcomm.core.collectives.out import check_out, deliver, not_over
from pcomm.core.collectives.protocol import Pending, Reduction
from pcomm.core.collectives.shapes import gather_sizes, scatter_sizes, transfer_sizes

__all__ = ["IdentityCollectives"]


class IdentityCollectives:
    """The `Collectives` of a group of one: no communicator, no autograd function, no copy.

    With `out` the input is copied there, without its gradient, unless they are the same tensor.
    Layers that can leave a call out altogether should do so when they are built: `size` is 1.

    Raises:
        LayoutError: Sizes that are given, or `out`, do not fit, as on several ranks.
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
        if sizes is not None:
            gather_sizes(x, dim, sizes, 0, 1)
        return x if out is None else _into("all_gather", out, x)

    def all_gather_async(
        self,
        x: Tensor,
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Pending:
        """`x`, at once."""
        return Pending.ready(self.all_gather(x, dim=dim, sizes=sizes, out=out))

    def reduce_scatter(
        self,
        x: Tensor,
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """`x`."""
        if sizes is not None:
            scatter_sizes(x, dim, sizes, 1)
        return x if out is None else _into("reduce_scatter", out, x)

    def reduce_scatter_async(
        self,
        x: Tensor,
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Pending:
        """`x`, at once."""
        return Pending.ready(self.reduce_scatter(x, dim=dim, sizes=sizes, out=out))

    def all_reduce(self, x: Tensor, *, op: Reduction = "sum", out: Tensor | None = None) -> Tensor:
        """`x`."""
        return x if out is None else _into("all_reduce", out, x)

    def all_reduce_async(
        self, x: Tensor, *, op: Reduction = "sum", out: Tensor | None = None
    ) -> Pending:
        """`x`, at once."""
        return Pending.ready(self.all_reduce(x, op=op, out=out))

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
        if send_sizes is not None or receive_sizes is not None:
            transfer_sizes(x, dim, send_sizes, receive_sizes, 0, 1)
        return x if out is None else _into("all_to_all", out, x)

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
        return Pending.ready(
            self.all_to_all(x, send_sizes=send_sizes, receive_sizes=receive_sizes, dim=dim, out=out)
        )

    def broadcast(self, x: Tensor, *, source: int = 0, out: Tensor | None = None) -> Tensor:
        """`x`."""
        return x if out is None else _into("broadcast", out, x)

    def broadcast_async(self, x: Tensor, *, source: int = 0, out: Tensor | None = None) -> Pending:
        """`x`, at once."""
        return Pending.ready(self.broadcast(x, source=source, out=out))


def _into(name: str, out: Tensor, x: Tensor) -> Tensor:
    check_out(name, x, x.shape, out)
    return out if out is x else deliver(not_over(x, out), out)
