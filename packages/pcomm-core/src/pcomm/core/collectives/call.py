"""One call of a collective operation as data: what is asked of the ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from pcomm.core.errors import LayoutError

__all__ = ["Call", "OperationName", "Reduction"]

OperationName = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"]
Reduction = Literal["sum", "max"]


# Not frozen: that makes an object seven times as slow to create, and one is made for each call.
@dataclass(slots=True, eq=False)
class Call:
    """One call of an operation, as it was made on this rank; not changed once it is made.

    It refers to tensors, so an object that outlives the call keeps the fields it needs and not
    the call.

    Args:
        operation: Name of the operation.
        x: Input tensor, of any strides.
        out: Tensor for the result; None for a new tensor.
        dim: Dimension along which shards lie, negative counted from the end. An all-reduce and a
            broadcast have none.
        sizes: Length along `dim` of each rank's shard, or of the part that an all-to-all sends to
            each rank. None where all are equal.
        receive_sizes: Length of the part received from each rank, for an all-to-all.
        op: Reduction that combines the inputs of an all-reduce.
        source: Place in the group of the rank whose input a broadcast sends.
    """

    operation: OperationName
    x: Tensor
    out: Tensor | None = None
    dim: int = 0
    sizes: Sequence[int] | None = None
    receive_sizes: Sequence[int] | None = None
    op: Reduction = "sum"
    source: int = 0

    @property
    def length(self) -> int:
        """Length of the input along `dim`. Local.

        Raises:
            LayoutError: The input has no such dimension.
        """
        try:
            return self.x.shape[self.dim]
        except IndexError:
            raise LayoutError(
                f"{self.operation}: dim={self.dim}",
                found=f"a tensor of shape {tuple(self.x.shape)}",
                why="Shards lie along a dimension of the tensor.",
                fix="Name a dimension that it has; give a single number one by x.view(1).",
            ) from None

    def with_input(self, x: Tensor) -> Call:
        """The same call of another input tensor. Local."""
        sizes = self.sizes, self.receive_sizes
        return Call(self.operation, x, self.out, self.dim, *sizes, self.op, self.source)

    def sent_bytes(self, rank: int, size: int) -> int:
        """Least number of bytes that a rank must send. Local.

        For N ranks and an input of b bytes these are (N-1)b for a gather, (N-1)/N b for a
        reduce-scatter, 2(N-1)/N b for an all-reduce, all parts but its own for an all-to-all, and
        b from the source of a broadcast (every other rank must get it; a tree sends it on).

        Args:
            rank: Place in the group of the rank that made this call.
            size: Number of ranks in the group.
        """
        x, sizes = self.x, self.sizes
        if self.operation == "all_gather":
            return (size - 1) * x.nbytes
        if self.operation == "broadcast":
            return x.nbytes if rank == self.source else 0
        # A call whose sizes are not one for each rank is refused before it sends anything.
        if sizes is None or len(sizes) != size or not self.length:
            others = x.nbytes * (size - 1) // size
        else:
            others = x.nbytes * (sum(sizes) - sizes[rank]) // self.length
        return 2 * others if self.operation == "all_reduce" else others

    @property
    def agreed(self) -> str:
        """One line of text with all that must be the same on every rank of the group."""
        shape: list[str] = [str(n) for n in self.x.shape]
        parts: list[str] = [self.operation]
        match self.operation:
            case "all_reduce":
                parts.append(self.op)
            case "reduce_scatter":
                parts.append("sum")
            case "broadcast":
                parts.append(f"from {self.source}")
        parts.append(str(self.x.dtype).removeprefix("torch."))
        if self.operation not in ("all_reduce", "broadcast"):
            dim = self.dim % max(1, self.x.dim())
            # These lengths differ between ranks; where they must fit together, sizes says how.
            if self.sizes is not None and self.operation != "reduce_scatter":
                shape[dim : dim + 1] = ["*"]
            parts.append(f"dim {dim}")
        parts.append(f"[{', '.join(shape)}]")
        if self.sizes is not None and self.operation != "all_to_all":
            parts.append(f"sizes {list(self.sizes)}")
        return " ".join(parts)
