"""All edits of single logits in one launch on a GPU; see `filters.edit_logits`, the reference.

Importing this file imports Triton. A program has one row, and makes the edits of one kind after
those of the kind before.
"""

# Shape suffixes: R rows, V vocabulary, E edits of all kinds.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from pcomm.core.kernel_launch import KernelLaunch
from pcomm.inference.sampling.filters import logit_edits
from pcomm.inference.sampling.params import SamplingRow

__all__ = ["edit", "told_of_edits"]

# Edits of a turn.
_TILE = 256


def edit(edited_RV: Tensor, logits_RV: Tensor, told: Tensor) -> None:
    """What `edit_logits` does. Local.

    Args:
        edited_RV: Copy of the logits, fp32 and contiguous, which is changed.
        logits_RV: The logits.
        told: int64 on the device, from `told_of_edits` of these rows.
    """
    num_rows, vocabulary = edited_RV.shape
    arguments = {
        "edited": edited_RV,
        "logits": logits_RV,
        "row_stride": logits_RV.stride(0),
        "told": told,
        "num_rows": num_rows,
        "num_edits": (len(told) - 4 * (num_rows + 1)) // 2,
        "VOCABULARY": vocabulary,
        "TILE": _TILE,
    }
    KernelLaunch(edit_kernel, (num_rows,), arguments, logits_RV.device).run()


def told_of_edits(rows: Sequence[SamplingRow], vocabulary: int) -> Tensor:
    """What the kernel is told: int64 on the host, one dimension. Local.

    Where the edits of each kind and row begin; places; and values as bits of fp64.

    Args:
        rows: The settings of each row, in the order of the logits.
        vocabulary: Number of logits of a row.
    """
    kinds = logit_edits(rows, vocabulary)
    ends_of_rows = torch.arange(len(rows) + 1) * vocabulary
    begin, begins = 0, []
    for edits in kinds:
        begins.append(begin + torch.searchsorted(edits.places_E, ends_of_rows))
        begin += len(edits.places_E)
    values = torch.cat([edits.values_E for edits in kinds]).double()
    places = [edits.places_E for edits in kinds]
    return torch.cat([*begins, *places, values.view(torch.int64)])


@triton.jit  # type: ignore[untyped-decorator]
def edit_kernel(
    edited: tl.tensor,
    logits: tl.tensor,
    row_stride: tl.tensor,
    told: tl.tensor,
    num_rows: tl.tensor,
    num_edits: tl.tensor,
    VOCABULARY: tl.constexpr,
    TILE: tl.constexpr,
) -> Any:
    """The edits of one row."""
    row = tl.program_id(0).to(tl.int64)
    places = told + 4 * (num_rows + 1)
    for kind in tl.static_range(4):
        begin = tl.load(told + kind * (num_rows + 1) + row)
        end = tl.load(told + kind * (num_rows + 1) + row + 1)
        for start in range(begin, end, TILE):
            at = start + tl.arange(0, TILE)
            is_one = at < end
            place = tl.load(places + at, mask=is_one, other=0)
            value = tl.load(places + num_edits + at, mask=is_one, other=0)
            value = value.to(tl.float64, bitcast=True).to(tl.float32)
            if kind == 0:
                # A place may occur twice, so what was edited is not read.
                own = logits + row * row_stride + (place - row * VOCABULARY)
                found = tl.load(own, mask=is_one, other=0.0).to(tl.float32)
                safe = tl.where(is_one, value, 1.0)
                found = tl.where(found > 0, tl.div_rn(found, safe), found * value)
            else:
                found = tl.load(edited + place, mask=is_one, other=0.0)
                if kind == 1:
                    found -= value
                elif kind == 2:
                    found += value
                else:
                    found = tl.full([TILE], -float("inf"), tl.float32)
            tl.store(edited + place, found, mask=is_one)
        # All threads of the program read it in the next round.
        tl.debug_barrier()
