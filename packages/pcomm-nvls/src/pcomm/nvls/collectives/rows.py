"""What the operations with a norm share: checks of rows, and the threads that a row gets."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pcomm.core.collectives.out import not_over
from pcomm.core.errors import LayoutError
from pcomm.nvls.collectives.inputs import VECTOR_BYTES, check_input, dense
from pcomm.nvls.collectives.outputs import check_result, result_in
from pcomm.nvls.policy.choose import Choice
from pcomm.nvls.policy.facts import Question
from pcomm.nvls.policy.operations import Algorithm
from pcomm.nvls.workspace.workspace import Workspace

__all__ = [
    "RowThreads",
    "Stream",
    "check_rows",
    "choose_for_rows",
    "new_or",
    "row_threads",
]

_MOST_NUMBERS = 16384
"""Longest row of the kernels, in numbers: what a thread has of it stays in its registers."""

# A block has at least as many threads as there may be ranks, and what one has of a row is short.
_FEWEST_WARPS, _MOST_WARPS = 4, 16
# Of a processor.
_REGISTERS = 65536


@dataclass(frozen=True, slots=True)
class RowThreads:
    """How a block holds a row.

    Args:
        block: Vectors of 16 bytes that it has place for: a power of two.
        num_warps: Number of its warps.
    """

    block: int
    num_warps: int

    @property
    def max_registers(self) -> int:
        """Registers of a thread where one block is on a processor, at most 128."""
        return min(_REGISTERS // (32 * self.num_warps), 128)


def row_threads(hidden: int, itemsize: int, *, halves: bool = False) -> RowThreads | None:
    """The threads for rows of a length, or None where no kernel takes them.

    Args:
        hidden: Length of a row, in numbers.
        itemsize: Bytes of a number.
        halves: True where a row is also written with half as many bytes: each thread then has at
            least two vectors.
    """
    row_vectors = hidden * itemsize // VECTOR_BYTES
    if not row_vectors or hidden > _MOST_NUMBERS:
        return None
    per_thread = 2 if halves else 1
    block = max(1 << (row_vectors - 1).bit_length(), 32 * _FEWEST_WARPS * per_thread)
    return RowThreads(block, min(block // (32 * per_thread), _MOST_WARPS))


@dataclass(frozen=True, slots=True)
class Stream:
    """The tensors of a call, dense and apart from each other where they have to be.

    Args:
        x: Addends.
        residual: Residual.
        weight: Weight of the norm.
        out: Memory for the normed rows.
        new_residual: Memory for the new residual.
    """

    x: Tensor
    residual: Tensor
    weight: Tensor
    out: Tensor
    new_residual: Tensor

    @property
    def all(self) -> tuple[Tensor, ...]:
        """All of them."""
        return self.x, self.residual, self.weight, self.out, self.new_residual

    @classmethod
    def of(
        cls,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        out: Tensor,
        new_residual: Tensor,
        *,
        row_by_row: bool,
    ) -> Stream:
        """Copies where a kernel would write to what another block of it has yet to read. Local.

        Args:
            x: Addends.
            residual: Residual.
            weight: Weight of the norm.
            out: Memory for the normed rows.
            new_residual: Memory for the new residual.
            row_by_row: True where row i of everything is read before row i of anything is written,
                by one block.
        """
        # Rows of 8-bit floats do not lie where those of `x` do.
        same = 0 if out.dtype == x.dtype else None
        x, residual = not_over(dense(x), out, same), not_over(dense(residual), new_residual, 0)
        place = 0 if row_by_row else None
        x, residual = not_over(x, new_residual, place), not_over(residual, out, place)
        weight = not_over(not_over(dense(weight), out), new_residual)
        return cls(x, residual, weight, out, new_residual)


def check_rows(
    operation: str,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    shares: int,
    workspace: Workspace,
) -> None:
    """Refuse rows that do not fit together. Local.

    Args:
        operation: Name of the operation.
        x: Addends.
        residual: Residual.
        weight: Weight of the norm.
        shares: Number of ranks that the residual is divided among.
        workspace: Workspace of the group.

    Raises:
        UnsupportedError: Gradients are recorded for one of them.
        LayoutError: Shapes, dtypes or devices do not fit.
    """
    for tensor in (x, residual, weight):
        check_input(operation, tensor, workspace.device)
    if x.dim() == 2 and not len(x) % shares:
        wanted = (len(x) // shares, x.shape[1])
        fits = tuple(residual.shape) == wanted and tuple(weight.shape) == wanted[1:]
        if fits and x.is_floating_point() and x.dtype == residual.dtype == weight.dtype:
            return
    rows = "tokens" if shares == 1 else f"tokens / {shares}"
    raise LayoutError(
        f"{operation}: x of shape {tuple(x.shape)}, {x.dtype}",
        found=f"a residual of shape {tuple(residual.shape)}, {residual.dtype}, and a weight of "
        f"shape {tuple(weight.shape)}, {weight.dtype}",
        why=f"x is [tokens, hidden], the residual [{rows}, hidden], the weight [hidden], all "
        "floating-point numbers of one dtype.",
        fix="Flatten the tokens into one dimension, pad them to a multiple of the ranks where the "
        "residual is divided, and convert the weight once.",
    )


def choose_for_rows(
    operation: str,
    x: Tensor,
    num_bytes: int,
    threads: RowThreads | None,
    workspace: Workspace,
    algo: Algorithm | str,
    strict: bool,
    detail: object,
) -> Choice:
    """The choice for a call; torch.distributed for rows that no kernel takes. See `choose`.

    Raises:
        LayoutError: The rows are too long for the algorithm that is wanted.
    """
    row_bytes = x.shape[1] * x.itemsize
    question = Question(
        operation,
        num_bytes,
        x.dtype,
        row_bytes=row_bytes,
        deterministic=workspace.deterministic,
        algorithm=algo,  # type: ignore[arg-type]
    )
    is_short = threads is not None or not row_bytes or row_bytes % VECTOR_BYTES
    detail = (x.shape, detail)
    if is_short:
        return workspace.choose(question, strict=strict, detail=detail)
    is_refused = strict or algo not in ("auto", "dist")
    if is_refused and workspace.group.size > 1:
        raise LayoutError(
            f"{operation}: rows of {x.shape[1]} numbers, algo={algo!r}, strict={strict}",
            found=f"more than {_MOST_NUMBERS} numbers",
            why="A row stays in the registers of one block.",
            fix='Pass algo="dist", or "auto" without strict.',
        )
    return workspace.choose(question._replace(algorithm="dist"), strict=False, detail=detail)


def new_or(
    operation: str,
    out: Tensor | None,
    shape: tuple[int, ...],
    like: Tensor,
    workspace: Workspace,
) -> Tensor:
    """The memory that a kernel writes rows to; see `check_result` and `result_in`. Local."""
    check_result(operation, out, shape, like, workspace)
    return result_in(out, shape, like)
