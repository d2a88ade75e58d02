"""Each operation made of torch operations and core's collectives: the fallback and the oracle.

Operations stand in the order in which they build on each other; what they compute is written at the
operations of the same names in `pcomm.nvls`. The order of a sum and its roundings are those of the
backend. With `deterministic` they are those of the kernels that read from peers, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from pcomm.core.collectives.checks import deliver
from pcomm.core.collectives.protocol import Collectives

__all__ = [
    "LARGEST_E4M3",
    "NormedRows",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_v",
    "all_reduce",
    "all_reduce_add_rmsnorm",
    "fp8_rows",
    "gather_to_rank",
    "reduce_scatter_add_rmsnorm_all_gather",
    "reduce_scatter_tensor",
    "reduce_scatter_v",
    "rms_norm",
    "sum_in_rank_order",
]


_T = TypeVar("_T", Tensor, Tensor | None)


def _as_bytes(x: _T) -> _T:
    """The same memory as uint8 where it holds floats of 8 bits; others, and None, as they are."""
    if x is not None and x.is_floating_point() and x.itemsize == 1:
        return x.view(torch.uint8)
    return x


def _as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The same memory in the dtype that it had before `_as_bytes`."""
    # Torch refuses to view what is negated or conjugated, also in the dtype that it has.
    return x if x.dtype == dtype else x.view(dtype)


def all_gather_into_tensor(
    x: Tensor, *, out: Tensor | None = None, collectives: Collectives, dim: int = 0
) -> Tensor:
    """See `pcomm.nvls.all_gather_into_tensor`. Collective."""
    found = collectives.all_gather(_as_bytes(x), dim=dim, out=_as_bytes(out))
    return _as_dtype(found, x.dtype) if out is None else out


def all_gather_coalesced(
    xs: Sequence[Tensor], *, outs: Sequence[Tensor | None] | None = None, collectives: Collectives
) -> list[Tensor]:
    """See `pcomm.nvls.all_gather_coalesced`. Collective: one operation a tensor."""
    pairs = zip(outs or [None] * len(xs), xs, strict=True)
    return [all_gather_into_tensor(x, out=out, collectives=collectives) for out, x in pairs]


def gather_to_rank(
    x: Tensor,
    *,
    out: Tensor | None = None,
    collectives: Collectives,
    destination: int = 0,
    dim: int = 0,
) -> Tensor | None:
    """See `pcomm.nvls.gather_to_rank`. Collective: an all-to-all that is empty but for one rank."""
    size, length = collectives.size, x.shape[dim]
    is_here = collectives.rank == destination
    send_sizes = [length * (rank == destination) for rank in range(size)]
    receive_sizes = [length * is_here] * size
    parts = collectives.all_to_all(
        _as_bytes(x),
        send_sizes=send_sizes,
        receive_sizes=receive_sizes,
        dim=dim,
        out=_as_bytes(out) if is_here else None,
    )
    if not is_here:
        return None
    return _as_dtype(parts, x.dtype) if out is None else out


_SUMMED_IN_FP32 = (torch.bfloat16, torch.float16, torch.float32)


def sum_in_rank_order(parts: Sequence[Tensor]) -> Tensor:
    """The sum of one tensor from each rank, of their shape and dtype.

    bf16, fp16 and fp32 are added in fp32 and rounded once; other types in themselves. Kernels begin
    with zero, too, so that they return the same bits.
    """
    dtype = parts[0].dtype
    total = torch.zeros_like(parts[0], dtype=torch.float32 if dtype in _SUMMED_IN_FP32 else dtype)
    for part in parts:
        total += part
    return total.to(dtype)


def all_reduce(
    x: Tensor, *, out: Tensor | None = None, collectives: Collectives, deterministic: bool = False
) -> Tensor:
    """See `pcomm.nvls.all_reduce`. Collective.

    With `deterministic` each rank adds its range of the numbers.
    """
    if not deterministic:
        return collectives.all_reduce(x, out=out)
    size, rank = collectives.size, collectives.rank
    lengths = [part.numel() for part in x.flatten().tensor_split(size)]
    own = [lengths[rank]] * size
    parts = collectives.all_to_all(x.flatten(), send_sizes=lengths, receive_sizes=own)
    total = sum_in_rank_order(parts.split(own))
    whole = collectives.all_gather(total, sizes=lengths).view(x.shape)
    return deliver(whole, out)


def reduce_scatter_tensor(
    x: Tensor,
    *,
    out: Tensor | None = None,
    collectives: Collectives,
    dim: int = 0,
    deterministic: bool = False,
) -> Tensor:
    """See `pcomm.nvls.reduce_scatter_tensor`. Collective.

    With `deterministic` `x` is exchanged as it is, and added here.
    """
    if not deterministic:
        return collectives.reduce_scatter(x, dim=dim, out=out)
    parts = collectives.all_to_all(x, dim=dim).chunk(collectives.size, dim)
    total = sum_in_rank_order(parts)
    return deliver(total, out)


def _bounds_of(counts: Tensor, most_rows: int, total_rows: int) -> Tensor:
    """Row at which each rank begins, and the last ends: int64 `[size + 1]`.

    Args:
        counts: Rows of each rank, `[size]`; cut off below 0 and above `most_rows`.
        most_rows: Most rows of a rank.
        total_rows: Row at which all are cut off.
    """
    ends = counts.long().clamp(0, most_rows).cumsum(0).clamp(max=total_rows)
    return torch.cat([ends.new_zeros(1), ends])


def _pack_rows(padded: Tensor, bounds: Tensor, out: Tensor) -> Tensor:
    """Write the rows of each rank one after another to `out`; leave what is behind as it is.

    Args:
        padded: `[size, most_rows, ...]`, each rank's rows from the first one on.
        bounds: Bounds of the ranks' rows in `out`.
        out: Tensor `[total_rows, ...]`.
    """
    if not padded.numel() or not out.numel():
        return out
    size, most_rows = padded.shape[:2]
    row = torch.arange(len(out), device=out.device)
    owner = torch.searchsorted(bounds[1:], row, right=True).clamp(max=size - 1)
    source = owner * most_rows + (row - bounds[owner]).clamp(max=most_rows - 1)
    is_there = _column(row < bounds[-1], out)
    return deliver(torch.where(is_there, padded.flatten(0, 1)[source], out), out)


def _unpack_rows(packed: Tensor, bounds: Tensor, most_rows: int) -> Tensor:
    """The rows of each rank from the first one on, zeros behind: `[size, most_rows, ...]`.

    Args:
        packed: `[total_rows, ...]`, each rank's rows behind those of the rank before.
        bounds: Bounds of the ranks' rows in `packed`.
        most_rows: Most rows of a rank.
    """
    padded = packed.new_zeros(len(bounds) - 1, most_rows, *packed.shape[1:])
    if not padded.numel() or not packed.numel():
        return padded
    source = bounds[:-1, None] + torch.arange(most_rows, device=packed.device)
    is_there = (source < bounds[1:, None]).view(-1)
    rows = packed[source.view(-1).clamp(max=len(packed) - 1)]
    return torch.where(_column(is_there, rows), rows, 0).view_as(padded)


def _column(mask: Tensor, like: Tensor) -> Tensor:
    return mask.view(-1, *[1] * (like.dim() - 1))


def all_gather_v(
    x: Tensor,
    counts: Tensor | Sequence[int],
    *,
    out: Tensor | None = None,
    collectives: Collectives,
) -> Tensor:
    """See `pcomm.nvls.all_gather_v`. Collective.

    With counts on the device every rank sends as many rows as `x` has place for, so that the host
    need not know them.
    """
    raw = _as_bytes(x)
    if raw is not x:
        found = all_gather_v(raw, counts, out=_as_bytes(out), collectives=collectives)
        return found.view(x.dtype) if out is None else out
    if not isinstance(counts, Tensor):
        return collectives.all_gather(x, sizes=list(counts), out=out)
    most_rows, size = x.shape[0], collectives.size
    padded = collectives.all_gather(x).view(size, most_rows, *x.shape[1:])
    if out is None:
        out = x.new_zeros(size * most_rows, *x.shape[1:])
    return _pack_rows(padded, _bounds_of(counts, most_rows, len(out)), out)


def reduce_scatter_v(
    x: Tensor,
    counts: Tensor | Sequence[int],
    *,
    out: Tensor | None = None,
    collectives: Collectives,
    deterministic: bool = False,
) -> Tensor:
    """See `pcomm.nvls.reduce_scatter_v`. Collective.

    With counts on the device every rank sends as many rows as `out` has place for, so that the host
    need not know them. The sum is that of `reduce_scatter_tensor`.
    """
    size, rank = collectives.size, collectives.rank
    if isinstance(counts, Tensor):
        if out is None:
            out = x.new_zeros(x.shape)
        bounds = _bounds_of(counts, len(out), len(x))
        padded = _unpack_rows(x, bounds, len(out)).flatten(0, 1)
        own = reduce_scatter_tensor(padded, collectives=collectives, deterministic=deterministic)
        return _pack_rows(own[None], bounds[rank : rank + 2] - bounds[rank], out)
    sizes = list(counts)
    if not deterministic:
        return collectives.reduce_scatter(x, sizes=sizes, out=out)
    own_sizes = [sizes[rank]] * size
    parts = collectives.all_to_all(x, send_sizes=sizes, receive_sizes=own_sizes)
    total = sum_in_rank_order(parts.split(own_sizes))
    return deliver(total, out)


LARGEST_E4M3 = 448.0
"""The largest number of `torch.float8_e4m3fn`."""

_SMALLEST_SCALE = 2.0**-64


class NormedRows(NamedTuple):
    """What a fused operation returns.

    Attributes:
        rows: Normed rows `[tokens, hidden]`, in the dtype of the input or `torch.float8_e4m3fn`.
        residual: Sum of the addends of all ranks and the residual, in the dtype of the input.
        scales: fp32 scale of each row, `[tokens]`; a row is its fp8 numbers times its scale. None
            without them, or where the scale was given.
    """

    rows: Tensor
    residual: Tensor
    scales: Tensor | None = None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / rms(x) * weight` over the last dimension, in fp32 and rounded once. Local.

    That of `torch.nn.functional.rms_norm`, with a root that is rounded as IEEE 754 says on every
    device, as in the kernels. The mean is the sum times the reciprocal of the length, as in torch's
    kernels for GPUs. Only the order in which squares are added may differ from ours.
    """
    wide = x.float()
    mean = wide.square().sum(-1, keepdim=True) * (1 / max(1, x.shape[-1]))
    # Torch's root of fp32 on a CPU may be off by one digit; through fp64 it is not.
    inverse = (mean + eps).double().sqrt().float().reciprocal()
    return (wide * inverse * weight.float()).to(x.dtype)


def fp8_rows(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The rows as `torch.float8_e4m3fn`, and the scales that they are to be multiplied by. Local.

    Args:
        x: Rows `[tokens, hidden]`.
        scale: Scale of all rows, fp32, one number; None for one for each row, by which its largest
            magnitude becomes 448.

    Returns:
        Numbers times the reciprocal of their scale, cut off at 448, and the scales, fp32
        `[tokens]` or `scale`.
    """
    wide = x.float()
    if scale is None:
        largest = wide.abs().amax(-1)
        # Not the maximum: that of a row with NaN would be NaN.
        scales = torch.fmax(largest / LARGEST_E4M3, largest.new_tensor(_SMALLEST_SCALE))
        factor = scales.reciprocal()[:, None]
    else:
        scales, factor = scale, scale.reciprocal()
    cut = (wide * factor).clamp(-LARGEST_E4M3, LARGEST_E4M3)
    return cut.to(torch.float8_e4m3fn), scales


def all_reduce_add_rmsnorm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    collectives: Collectives,
    deterministic: bool = False,
) -> NormedRows:
    """See `pcomm.nvls.all_reduce_add_rmsnorm`. Collective; returns new tensors."""
    total = all_reduce(x, collectives=collectives, deterministic=deterministic)
    stream = total + residual
    return NormedRows(rms_norm(stream, weight, eps), stream)


def reduce_scatter_add_rmsnorm_all_gather(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    collectives: Collectives,
    fp8: Literal["rows"] | Tensor | None = None,
    deterministic: bool = False,
) -> NormedRows:
    """See `pcomm.nvls.reduce_scatter_add_rmsnorm_all_gather`. Collective; new tensors."""
    total = reduce_scatter_tensor(x, collectives=collectives, deterministic=deterministic)
    stream = total + residual
    normed = rms_norm(stream, weight, eps)
    if fp8 is None:
        return NormedRows(collectives.all_gather(normed), stream)
    rows, scales = fp8_rows(normed, fp8 if isinstance(fp8, Tensor) else None)
    # Backends know no 8-bit floats; these are moved as bytes.
    gathered = collectives.all_gather(rows.view(torch.uint8)).view(torch.float8_e4m3fn)
    if isinstance(fp8, Tensor):
        return NormedRows(gathered, stream)
    return NormedRows(gathered, stream, collectives.all_gather(scales))
