"""Baseline: sequence by sequence and section by section, 7 all-to-alls for each sequence.

Six there (q, k, v, z, b, a) and one back, and as many in backward. This is what Megatron-LM did
for packed sequences before its pull request 4913. There sequences are slices of the pack, and the
backward of each slice writes a whole pack of zeros; with `split` in place of `slices` that is one
copy for all of them, and nothing but the loop is slow.
"""

# t tokens of this rank, s of one sequence here, S on all ranks, R ranks, C columns

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from pcomm.core.collectives.protocol import Collectives
from pcomm.gdn_cp.bench.exchange_case import WIDTHS

__all__ = ["Cut", "sequence_loop", "slices", "split"]

Cut = Callable[[Tensor, list[int]], Sequence[Tensor]]


def slices(pack: Tensor, lengths: list[int]) -> list[Tensor]:
    """The sequences of these lengths, a slice for each."""
    return [pack[start:stop] for start, stop in pairwise(accumulate(lengths, initial=0))]


def split(pack: Tensor, lengths: list[int]) -> Sequence[Tensor]:
    """The same with one backward for all."""
    parts: Sequence[Tensor] = pack.split(lengths)
    return parts


def sequence_loop(
    sections_tW: Tensor,
    output_TV: Tensor,
    cu_seqlens: tuple[int, ...],
    cut: Cut,
    collectives: Collectives,
) -> tuple[tuple[Tensor, ...], Tensor]:
    """The core's parts (q, k, v side by side, then z, b, a), and its output back at my tokens.

    Args:
        sections_tW: `[t, W]`, all sections of my tokens.
        output_TV: `[T, V / R]`, what the core returns for my heads.
        cu_seqlens: Offsets of the sequences.
        cut: Splits them into sections.
        collectives: Differentiable collectives.
    """
    size = collectives.size
    lengths = [stop - start for start, stop in pairwise(cu_seqlens)]
    local = [length // size for length in lengths]
    whole = [_to_heads(x_sW, collectives) for x_sW in cut(sections_tW, local)]
    widths = [width // size for width in WIDTHS]
    parts = torch.cat(whole).split([sum(widths[:3]), *widths[3:]], -1)
    back = [_from_heads(y_SC, collectives) for y_SC in cut(output_TV, lengths)]
    return parts, torch.cat(back)


def _to_heads(x_sW: Tensor, collectives: Collectives) -> Tensor:
    """`[S, W / R]`: one sequence with my heads, in its own order."""
    size, parts = collectives.size, []
    for section in x_sW.split(WIDTHS, -1):
        message_RsC = section.unflatten(-1, (size, -1)).transpose(0, 1)
        parts.append(collectives.all_to_all(message_RsC))
    received_RsW = torch.cat(parts, -1)
    # Rank r sent its chunk r, then the r-th last.
    early, late = received_RsW.chunk(2, 1)
    return torch.cat([early, late.flip(0)]).flatten(0, 1)


def _from_heads(y_SC: Tensor, collectives: Collectives) -> Tensor:
    """`[s, V]`: my tokens of one sequence, with all heads."""
    early, late = y_SC.unflatten(0, (2 * collectives.size, -1)).chunk(2)
    received_RsC = collectives.all_to_all(torch.cat([early, late.flip(0)], 1))
    return received_RsC.transpose(0, 1).flatten(1)
