"""A sum over the ranks, the residual and its norm in one kernel: two fused operations.

Every rank has the whole residual, or its share of the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from pcomm.core.collectives.checks import not_over
from pcomm.core.errors import LayoutError
from pcomm.nvls import references
from pcomm.nvls.collectives.call import (
    VECTOR_BYTES,
    barrier_launch,
    check_input,
    check_inputs_outside,
    check_result,
    deliver,
    dense,
    kind_of,
    result_in,
    way_of,
)
from pcomm.nvls.policy.choose import Choice, CollectiveRequest, is_one_shot
from pcomm.nvls.policy.table import Algorithm
from pcomm.nvls.references import NormedRows
from pcomm.nvls.workspace.launch import Launch
from pcomm.nvls.workspace.workspace import Workspace

__all__ = [
    "ResidualTensors",
    "RowThreads",
    "all_reduce_add_rmsnorm",
    "all_reduce_add_rmsnorm_launch",
    "reduce_scatter_add_rmsnorm_all_gather",
    "reduce_scatter_add_rmsnorm_all_gather_launch",
    "row_threads",
]

_WHOLE, _DIVIDED = "all_reduce_add_rmsnorm", "reduce_scatter_add_rmsnorm_all_gather"

_MOST_NUMBERS = 16384
"""Longest row of the kernels, in numbers: what a thread has of it stays in its registers."""

# A block has at least as many threads as there may be ranks, and what one has of a row is short.
_FEWEST_WARPS, _MOST_WARPS = 4, 16
# Of a processor.
_REGISTERS = 65536


def all_reduce_add_rmsnorm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    workspace: Workspace,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
    algo: Algorithm | Literal["auto"] = "auto",
    strict: bool = False,
) -> NormedRows:
    """The sum of `x` over all ranks and the residual, and its norm. Collective.

    It does not synchronise with the device. It is what a model without fused operations computes,
    rounded in the same places: `stream = all_reduce(x) + residual` and
    `rms_norm(stream, weight, eps)`. The sum over the ranks is rounded as that of `all_reduce`.

    Args:
        x: This rank's addends `[tokens, hidden]`, of any strides; bf16, fp16 and fp32 have kernels.
            Where it is what `workspace.empty` returned last, it is not copied, but written over.
        residual: Residual `[tokens, hidden]`, the same on all ranks.
        weight: Weight of the norm, `[hidden]`; for a norm that adds 1 to it, that sum.
        eps: Number that is added to the mean square.
        workspace: Workspace of the group.
        out: Tensor for the normed rows; None for a new one. It may be `x`.
        residual_out: Tensor for the new residual; None for a new one. It may be `residual`.
        algo: "multimem", "p2p", "dist", or "auto" for the choice of the table.
        strict: True raises where only torch.distributed can be used.

    Returns:
        Normed rows and new residual, both `[tokens, hidden]` in the dtype of `x`.

    Raises:
        UnsupportedError: Gradients are recorded, or `algo` or `strict` cannot be met.
        LayoutError: Shapes, dtypes or devices do not fit, or rows are too long for `algo`.
        ConfigError: A result, `residual` or `weight` lies in the workspace, or `x` in a part of it
            that is in use.
        PeerTimeoutError: A rank did not come; see `Workspace.check`.
    """
    _check_rows(_WHOLE, x, residual, weight, 1, workspace)
    eps = float(eps)
    threads = row_threads(x.shape[1], x.itemsize)
    choice = _choose_for_rows(_WHOLE, x, x.nbytes, threads, workspace, algo, strict, eps)
    shape = (len(x), x.shape[1])
    rows = _new_or(_WHOLE, out, shape, x, workspace)
    stream = _new_or(_WHOLE, residual_out, shape, x, workspace)
    check_inputs_outside(_WHOLE, residual, weight, workspace=workspace)
    if choice.algorithm == "dist":
        workspace.release(x)
        ordered = workspace.deterministic
        given = workspace.group.collectives
        normed = references.all_reduce_add_rmsnorm(
            x, residual, weight, eps, collectives=given, deterministic=ordered
        )
        return NormedRows(deliver(normed.rows, out), deliver(normed.residual, residual_out))
    if x.numel():
        assert threads is not None
        tensors = ResidualTensors.of(x, residual, weight, rows, stream, row_by_row=True)
        workspace.run(all_reduce_add_rmsnorm_launch(workspace, choice, threads, tensors, eps))
    return NormedRows(deliver(rows, out), deliver(stream, residual_out))


def all_reduce_add_rmsnorm_launch(
    workspace: Workspace, choice: Choice, threads: RowThreads, tensors: ResidualTensors, eps: float
) -> Launch:
    """The launch that a choice asks for. Takes a turn of the workspace."""
    from pcomm.nvls.kernels.fused_rmsnorm import all_reduce_add_rmsnorm_kernel

    architecture, size = workspace.capability.architecture, workspace.group.size
    one_shot = is_one_shot(tensors.x.nbytes, size, way_of(choice), architecture)
    arguments = {"num_rows": len(tensors.x), "TWO_SHOT": not one_shot}
    kernel = all_reduce_add_rmsnorm_kernel
    return _row_launch(kernel, workspace, choice, threads, tensors, eps, arguments)


def reduce_scatter_add_rmsnorm_all_gather(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    workspace: Workspace,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
    fp8: Literal["rows"] | Tensor | None = None,
    algo: Algorithm | Literal["auto"] = "auto",
    strict: bool = False,
) -> NormedRows:
    """The normed rows of all ranks, of which each adds its share of the tokens. Collective.

    It does not synchronise with the device. It is what a model without fused operations computes,
    rounded in the same places: `stream = reduce_scatter(x) + residual` and
    `all_gather(rms_norm(stream, weight, eps))`. The sum over the ranks is rounded as that of
    `reduce_scatter_tensor`, and 8-bit floats are made of the rounded norm.

    Args:
        x: This rank's addends `[tokens, hidden]`, of any strides; bf16, fp16 and fp32 have kernels.
            The tokens are a multiple of the ranks. Where it is what `workspace.empty` returned
            last, it is not copied, but written over.
        residual: This rank's share of the residual, `[tokens / size, hidden]`.
        weight: Weight of the norm, `[hidden]`; for a norm that adds 1 to it, that sum.
        eps: Number that is added to the mean square.
        workspace: Workspace of the group.
        out: Tensor for the normed rows; None for a new one. It may be `x`.
        residual_out: Tensor for the new residual; None for a new one. It may be `residual`.
        fp8: None for rows in the dtype of `x`. For `torch.float8_e4m3fn`, which are gathered with
            half as many bytes: "rows" for a scale for each row, or one fp32 number `[1]` on the
            device, the scale of all rows. Then `x` has two bytes a number, and a row 16 numbers or
            a multiple.
        algo: "multimem", "p2p", "dist", or "auto" for the choice of the table.
        strict: True raises where only torch.distributed can be used.

    Returns:
        Normed rows `[tokens, hidden]`, this rank's share of the new residual in the dtype of `x`,
        and with "rows" the scales, fp32 `[tokens]`.

    Raises:
        UnsupportedError: Gradients are recorded, or `algo` or `strict` cannot be met.
        LayoutError: Shapes, dtypes or devices do not fit, or rows are too long for `algo`.
        ConfigError: A result, `residual` or `weight` lies in the workspace, or `x` in a part of it
            that is in use.
        PeerTimeoutError: A rank did not come; see `Workspace.check`.
    """
    size = workspace.group.size
    _check_rows(_DIVIDED, x, residual, weight, size, workspace)
    eps = float(eps)
    _check_fp8(x, fp8)
    threads = row_threads(x.shape[1], x.itemsize, halves=fp8 is not None)
    told = (eps, "one scale" if isinstance(fp8, Tensor) else fp8)
    choice = _choose_for_rows(_DIVIDED, x, x.nbytes // size, threads, workspace, algo, strict, told)
    like = x if fp8 is None else x.new_empty((), dtype=torch.float8_e4m3fn)
    rows = _new_or(_DIVIDED, out, (len(x), x.shape[1]), like, workspace)
    stream = _new_or(_DIVIDED, residual_out, (len(residual), x.shape[1]), x, workspace)
    check_inputs_outside(_DIVIDED, residual, weight, workspace=workspace)
    if choice.algorithm == "dist":
        workspace.release(x)
        normed = references.reduce_scatter_add_rmsnorm_all_gather(
            x,
            residual,
            weight,
            eps,
            collectives=workspace.group.collectives,
            fp8=fp8,
            deterministic=workspace.deterministic,
        )
        return NormedRows(
            deliver(normed.rows, out), deliver(normed.residual, residual_out), normed.scales
        )
    scales = x.new_empty(len(x), dtype=torch.float32) if fp8 == "rows" else None
    if x.numel():
        assert threads is not None
        tensors = ResidualTensors.of(x, residual, weight, rows, stream, row_by_row=False)
        known = fp8 if isinstance(fp8, Tensor) else scales
        launch = reduce_scatter_add_rmsnorm_all_gather_launch(
            workspace, choice, threads, tensors, eps, known, is_given=scales is None
        )
        workspace.run(launch)
    return NormedRows(deliver(rows, out), deliver(stream, residual_out), scales)


def reduce_scatter_add_rmsnorm_all_gather_launch(
    workspace: Workspace,
    choice: Choice,
    threads: RowThreads,
    tensors: ResidualTensors,
    eps: float,
    scales: Tensor | None = None,
    *,
    is_given: bool = False,
) -> Launch:
    """The launch that a choice asks for. Takes a turn of the workspace.

    Args:
        workspace: Workspace of the group.
        choice: Algorithm and number of blocks.
        threads: Threads of a block.
        tensors: Tensors of the call; `out` may be of 8-bit floats.
        eps: Number that is added to the mean square.
        scales: fp32 scales of 8-bit floats; None without these.
        is_given: True where `scales` is the one scale of all rows.
    """
    from pcomm.nvls.kernels.fused_rmsnorm import reduce_scatter_add_rmsnorm_all_gather_kernel

    arguments = {
        "scales": tensors.x.data_ptr() if scales is None else scales,
        "num_rows": len(tensors.residual),
        "FP8": "no" if scales is None else "given" if is_given else "rows",
    }
    kernel = reduce_scatter_add_rmsnorm_all_gather_kernel
    return _row_launch(kernel, workspace, choice, threads, tensors, eps, arguments)


def _check_fp8(x: Tensor, fp8: Literal["rows"] | Tensor | None) -> None:
    """Refuse 8-bit floats that cannot be made, and a scale that is none. Local."""
    if fp8 is None:
        return
    if isinstance(fp8, Tensor):
        is_known = fp8.dtype is torch.float32 and fp8.numel() == 1
        is_known &= fp8.device.type == x.device.type
        found = f"fp8 of shape {tuple(fp8.shape)}, {fp8.dtype} on {fp8.device}"
    else:
        is_known, found = fp8 == "rows", f"fp8={fp8!r}"
    if is_known and x.itemsize == 2 and not x.shape[1] % 16:
        return
    raise LayoutError(
        f"{_DIVIDED}: {found}",
        found=f"x of shape {tuple(x.shape)}, {x.dtype} on {x.device}",
        why="Sixteen numbers of two bytes become 16 bytes, with a scale for each row, or one.",
        fix='Pass fp8="rows" or one fp32 number on the device of x, and hidden as a multiple of '
        "16; or fp8=None, and convert the result.",
    )


def _check_rows(
    operation: str, x: Tensor, residual: Tensor, weight: Tensor, shares: int, workspace: Workspace
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


def _choose_for_rows(
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
    question = CollectiveRequest(
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
class ResidualTensors:
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
    ) -> ResidualTensors:
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


def _new_or(
    operation: str, out: Tensor | None, shape: tuple[int, ...], like: Tensor, workspace: Workspace
) -> Tensor:
    """The memory that a kernel writes rows to; see `check_result` and `result_in`. Local."""
    check_result(operation, out, shape, like, workspace)
    return result_in(out, shape, like)


def _row_launch(
    kernel: Any,
    workspace: Workspace,
    choice: Choice,
    threads: RowThreads,
    tensors: ResidualTensors,
    eps: float,
    arguments: dict[str, Any],
) -> Launch:
    """The launch of a kernel whose blocks hold one row each. Takes a turn of the workspace."""
    lease, x = workspace.turn(), tensors.x
    every = {
        "x": x.data_ptr(),
        "residual": tensors.residual.data_ptr(),
        "weight": tensors.weight.data_ptr(),
        "new_residual": tensors.new_residual.data_ptr(),
        "out": tensors.out.data_ptr(),
        "row_vectors": x.shape[1] * x.itemsize // VECTOR_BYTES,
        "inverse_hidden": 1 / x.shape[1],
        "eps": eps,
        "KIND": kind_of(x.dtype),
        "IN_PLACE": workspace.is_in_slot(x, lease),
        **arguments,
        "BLOCK": threads.block,
    }
    launch = barrier_launch(kernel, workspace, choice, lease, every, tensors.all)
    return replace(launch, num_warps=threads.num_warps, max_registers=threads.max_registers)
