"""The collectives of a group of one rank: every operation returns its input."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pcomm.core.collectives.call import Call, Reduction
from pcomm.core.collectives.out import check_out, deliver, not_over
from pcomm.core.collectives.protocol import Collectives, Pending
from pcomm.core.collectives.shapes import gather_sizes, scatter_sizes, transfer_sizes

__all__ = ["IdentityCollectives"]


class IdentityCollectives(Collectives):
    """The `Collectives` of a group of one: no communicator, no autograd function, no copy.

    With `out` the input is copied there, without its gradient, unless they are the same tensor.
    Layers that can leave a call out altogether should do so when they are built: `size` is 1.

    Raises:
        LayoutError: Sizes that are given, or `out`, do not fit, as on several ranks.
    """

    rank = 0
    size = 1

    def run(self, call: Call) -> Tensor:
        """The input, or `out` with a copy of it."""
        if call.sizes is not None or call.receive_sizes is not None:
            match call.operation:
                case "all_gather":
                    gather_sizes(call, 0, 1)
                case "reduce_scatter":
                    scatter_sizes(call, 1)
                case "all_to_all":
                    transfer_sizes(call, 0, 1)
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
        if out is None and (sizes is None or _is_whole(x, dim, sizes)):
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
        if out is None and (sizes is None or _is_whole(x, dim, sizes)):
            return x
        return self.run(Call("reduce_scatter", x, out, dim, sizes))

    def all_reduce(self, x: Tensor, *, op: Reduction = "sum", out: Tensor | None = None) -> Tensor:
        """`x`."""
        return x if out is None else self.run(Call("all_reduce", x, out))

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
        if out is None and (
            (send_sizes is None and receive_sizes is None)
            or (_is_whole(x, dim, send_sizes) and _is_whole(x, dim, receive_sizes))
        ):
            return x
        return self.run(Call("all_to_all", x, out, dim, send_sizes, receive_sizes))

    def broadcast(self, x: Tensor, *, source: int = 0, out: Tensor | None = None) -> Tensor:
        """`x`."""
        return x if out is None else self.run(Call("broadcast", x, out))


def _is_whole(x: Tensor, dim: int, sizes: Sequence[int] | None) -> bool:
    """Whether `sizes` are those of one rank that has all of `dim`."""
    return sizes is not None and len(sizes) == 1 and sizes[0] == x.shape[dim]
