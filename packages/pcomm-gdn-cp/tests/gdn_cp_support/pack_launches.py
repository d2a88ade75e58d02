"""Launches that pack messages, with the shapes of Qwen3-Next."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pcomm.gdn_cp import GdnSpec, HeadShare

__all__ = ["CASES", "launch_of"]

SPEC = GdnSpec(16, 32, 128, 128)
CASES = ["pack", "pack of columns first", "take rows", "take rows of parts", "unpack"]


def launch_of(case: str, size: int, *, tokens: int = 256, device: str = "cpu") -> Any:
    """The launch of a case on one of `size` ranks, which has so many tokens. Local."""
    # Where Triton interprets, it is decided by the import of the kernels.
    from pcomm.gdn_cp import triton_packing as packing

    shares = HeadShare(SPEC, size, 0).sections
    columns = packing.columns_of([share.columns for share in shares])

    def empty(rows: int, width: int) -> Tensor:
        return torch.empty(rows, width, dtype=torch.bfloat16, device=device)

    sections = [empty(tokens, share.section.width) for share in shares]
    message = empty(size * tokens, sum(share.width for share in shares))
    if case == "unpack":
        return packing.unpack_launch(message, columns, sections)
    if case == "pack":
        return packing.pack_launch(sections, columns, message, None, size)
    if case == "pack of columns first":
        sections = [x.t().contiguous().t() for x in sections]
        return packing.pack_launch(sections, columns, message, None, size)
    widths = [share.width for share in shares] if case == "take rows of parts" else [
        message.shape[1]
    ]  # fmt: skip
    parts = [empty(len(message), width) for width in widths]
    order = torch.arange(len(message), device=device)
    return packing.pack_launch(parts, packing.side_by_side(widths), message, order, 1)
