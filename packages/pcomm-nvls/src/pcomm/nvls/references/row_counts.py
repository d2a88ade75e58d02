"""Rows that are counted on the device, moved by torch without a word to the host."""

from __future__ import annotations

import torch
from torch import Tensor

from pcomm.core.collectives.out import deliver

__all__ = ["bounds_of", "pack_rows", "unpack_rows"]


def bounds_of(counts: Tensor, most_rows: int, total_rows: int) -> Tensor:
    """Row at which each rank begins, and the last ends: int64 `[size + 1]`.

    Args:
        counts: Rows of each rank, `[size]`; cut off below 0 and above `most_rows`.
        most_rows: Most rows of a rank.
        total_rows: Row at which all are cut off.
    """
    ends = counts.long().clamp(0, most_rows).cumsum(0).clamp(max=total_rows)
    return torch.cat([ends.new_zeros(1), ends])


def pack_rows(padded: Tensor, bounds: Tensor, out: Tensor) -> Tensor:
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


def unpack_rows(packed: Tensor, bounds: Tensor, most_rows: int) -> Tensor:
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
