"""The collectives of a group of one rank: every operation returns its input."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pcomm.core.collectives.checks import (
    check_out,
    check_reduction,
    check_source,
    deliver,
    gather_sizes,
    not_over,
    scatter_sizes,
    transfer_sizes,
)
from pcomm.core.collectives.protocol import Call, Collectives, Pending, Reduction

__all__ = ["IdentityCollectives"]


class IdentityCollectives(Collectives):
    """The `Collectives` of a group of one: no communicator, no autograd function, no copy.

    With `out` the input is copied there, without its gradient, unless they are the same tensor.
    Layers that can leave a call out altogether should do so when they are built: `size` is 1.

    What is refused on several ranks is refused here.
    """

    rank = 0
    size = 1

    def run(self, call: Call) -> Tensor:
        """The input, or `out` with a copy of it."""
        match call.operation:
            case "all_gather":
                gather_sizes(call, 0, 1)
            case "reduce_scatter":
                scatter_sizes(call, 0, 1)
            case "all_to_all":
                transfer_sizes(call, 0, 1)
            case "all_reduce":
                check_reduction(call.op)
            case "broadcast":
                check_source(call, 1)
        x, out = call.x, call.out
        if out is None:
            return x
        check_out(call)
        return out if out is x else deliver(not_over(x, out), out)

    def start(self, call: Call) -> Pending:
        """The result of `run`, at once."""
        return Pending.ready(self.run(call))

    # The named methods once more, so that the usual call on one rank creates no object.

    def all_gather(
        self,
        x: Tensor,
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """`x`."""
        if out is None and sizes is None and -dim <= x.dim() > dim:
            return x
        return self.run(Call("all_gather", x, out, dim, sizes))

    def reduce_scatter(
        self,
        x: Tensor,
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """`x`."""
        if out is None and sizes is None and -dim <= x.dim() > dim:
            return x
        return self.run(Call("reduce_scatter", x, out, dim, sizes))

    def all_reduce(self, x: Tensor, *, op: Reduction = "sum", out: Tensor | None = None) -> Tensor:
        """`x`."""
        if out is None and op == "sum":
            return x
        return self.run(Call("all_reduce", x, out, op=op))

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
        is_even = send_sizes is None and receive_sizes is None
        if out is None and is_even and -dim <= x.dim() > dim:
            return x
        return self.run(Call("all_to_all", x, out, dim, send_sizes, receive_sizes))

    def broadcast(self, x: Tensor, *, source: int = 0, out: Tensor | None = None) -> Tensor:
        """`x`."""
        if out is None and source == 0:
            return x
        return self.run(Call("broadcast", x, out, source=source))
