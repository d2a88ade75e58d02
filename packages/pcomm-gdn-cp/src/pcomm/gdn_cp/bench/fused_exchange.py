"""Baseline: one all-to-all each way for all sequences, as in pull request 4913 of Megatron-LM.

Written from a description of it: columns are brought into the order of the ranks by `index_select`
along the last dimension, z travels with the others, the rows are put into the order of the pack by
an index that every layer call computes anew, and backward is that of `index_select`, which adds
into zeros. The permutation of columns is made once, as there.
"""

# t tokens of this rank, T of all, R ranks, W columns

from __future__ import annotations

import torch
from torch import Tensor

from pcomm.core.collectives.protocol import Collectives
from pcomm.gdn_cp.bench.exchange_case import WIDTHS

__all__ = ["column_order", "fused_exchange"]


def column_order(size: int) -> Tensor:
    """`[W]`: the columns by the rank that gets them, and for each rank section by section."""
    columns = torch.arange(sum(WIDTHS)).split(WIDTHS)
    return torch.cat([section.view(size, -1) for section in columns], -1).flatten()


def fused_exchange(
    sections_tW: Tensor,
    output_TV: Tensor,
    cu_seqlens_N: Tensor,
    columns_W: Tensor,
    collectives: Collectives,
) -> tuple[tuple[Tensor, ...], Tensor]:
    """The core's parts (q, k, v side by side, then z, b, a), and its output back at my tokens.

    Args:
        sections_tW: `[t, W]`, all sections of my tokens.
        output_TV: `[T, V / R]`, what the core returns for my heads.
        cu_seqlens_N: Offsets of the sequences.
        columns_W: `column_order`.
        collectives: Differentiable collectives.
    """
    size = collectives.size
    rows_T, back_T = _row_order(cu_seqlens_N, size)
    by_rank = sections_tW.index_select(-1, columns_W)
    message = torch.cat(by_rank.split(by_rank.shape[-1] // size, -1))
    pack_TW = collectives.all_to_all(message).index_select(0, rows_T)
    widths = [width // size for width in WIDTHS]
    parts = pack_TW.split([sum(widths[:3]), *widths[3:]], -1)
    received = collectives.all_to_all(output_TV.index_select(0, back_T))
    return parts, torch.cat(received.chunk(size), -1)


def _row_order(cu_seqlens_N: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """For each token of the pack its row among those received, and the inverse of that."""
    token_T = torch.arange(int(cu_seqlens_N[-1]))
    sequence_T = torch.bucketize(token_T, cu_seqlens_N[1:], right=True)
    start_T = cu_seqlens_N[sequence_T]
    width_T = (cu_seqlens_N[sequence_T + 1] - start_T) // (2 * size)
    place_T = token_T - start_T
    chunk_T = place_T // width_T
    # Chunks in the order in which the ranks hold them, two for each.
    slot_T = torch.where(chunk_T < size, 2 * chunk_T, 4 * size - 2 * chunk_T - 1)
    local = len(token_T) // size
    rows_T = slot_T // 2 * local + start_T // size + slot_T % 2 * width_T + place_T % width_T
    back_T = torch.empty_like(rows_T)
    back_T[rows_T] = token_T
    return rows_T, back_T
