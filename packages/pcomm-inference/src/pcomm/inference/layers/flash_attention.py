"""Torch's flash attention of packed sequences: where it is, and which heads it takes.

An engine gives it the chunks of its prompts, training packs of documents. Nothing of this has run
on a GPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch

__all__ = ["varlen_call"]

_DTYPES = frozenset((torch.bfloat16, torch.float16))
# Widest head, and what widths are multiples of.
_MOST_WIDTH, _WIDTHS_OF = 256, 8


def varlen_call(
    name: Literal["varlen_attn", "varlen_attn_out"],
    device: torch.device,
    dtype: torch.dtype,
    width: int,
) -> Callable[..., Any] | None:
    """A function of `torch.nn.attention.varlen`, with windows and grouped heads. Local.

    Args:
        name: Name of the function; the one that ends in `out` writes to a given place, and is not
            in all releases that have the other.
        device: Device of queries, keys and values.
        dtype: Dtype of these.
        width: Width of a head, the same for all three.

    Returns:
        The function. None where it does not take such heads, on a CPU, on a GPU before Ampere, and
        where torch has none, or the one of torch 2.10, which takes as many key heads as query
        heads.
    """
    is_taken = dtype in _DTYPES and 0 < width <= _MOST_WIDTH and width % _WIDTHS_OF == 0
    return _found(name, device) if is_taken else None


@cache
def _found(name: str, device: torch.device) -> Callable[..., Any] | None:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return None
    try:
        import torch.nn.attention.varlen as varlen
    except ImportError:
        return None
    found: Callable[..., Any] | None = getattr(varlen, name, None)
    if found is None:
        return None
    known = inspect.signature(found).parameters
    return found if "window_size" in known and "enable_gqa" in known else None
