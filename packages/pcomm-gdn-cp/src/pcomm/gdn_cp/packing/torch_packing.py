"""Packing by torch: the reference for the kernels, and what runs on the CPU.

Each function writes its result once, a strided copy or a row gather for each section, whatever
the number of sequences. None of them is differentiable; each is the gradient of another one.
"""

# t tokens of this rank, T of all, R ranks, W columns of a rank in all sections, C of a section

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from pcomm.gdn_cp.strategies.head_share import SectionShare

__all__ = ["pack_sections", "take_rows", "unpack_sections"]


def pack_sections(
    sections_tC: Sequence[Tensor], shares: Sequence[SectionShare], num_ranks: int
) -> Tensor:
    """`[R * t, W]`: for each rank in turn its heads of all sections; see `Packing`."""
    widths = [share.width for share in shares]
    num_tokens = len(sections_tC[0])
    message_RtW = sections_tC[0].new_empty(num_ranks, num_tokens, sum(widths))
    places = message_RtW.split(widths, -1)
    for place_RtW, section, share in zip(places, sections_tC, shares, strict=True):
        if share.copies > 1:
            heads = section.unflatten(-1, (share.section.num_heads, share.section.head_width))
            section = heads.repeat_interleave(share.copies, 1).flatten(1)
        place_RtW.copy_(section.unflatten(-1, (num_ranks, share.width)).transpose(0, 1))
    return message_RtW.flatten(0, 1)


def take_rows(parts: Sequence[Tensor], order_T: Tensor | None) -> Tensor:
    """`[T, W]`: the parts side by side, their rows in the order of `order_T`; see `Packing`."""
    if order_T is None:
        return torch.cat(list(parts), -1)
    if len(parts) == 1:
        return parts[0].index_select(0, order_T)
    widths = [part.shape[1] for part in parts]
    rows_TW = parts[0].new_empty(len(order_T), sum(widths))
    for place, part in zip(rows_TW.split(widths, -1), parts, strict=True):
        torch.index_select(part, 0, order_T, out=place)
    return rows_TW


def unpack_sections(
    message_TW: Tensor, shares: Sequence[SectionShare], num_ranks: int
) -> tuple[Tensor, ...]:
    """`[t, C]` of each section, copies of a head added up; see `Packing`."""
    message_RtW = message_TW.unflatten(0, (num_ranks, len(message_TW) // num_ranks))
    ends = accumulate(share.width for share in shares)
    sections = []
    for share, end in zip(shares, ends, strict=True):
        part_RtW = message_RtW[:, :, end - share.width : end]
        section = part_RtW.transpose(0, 1).flatten(1)
        if share.copies > 1:
            split = (share.section.num_heads, share.copies, share.section.head_width)
            section = section.unflatten(-1, split).sum(2).flatten(1)
        sections.append(section)
    return tuple(sections)
