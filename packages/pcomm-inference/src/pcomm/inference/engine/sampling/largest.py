"""The place of the largest number in each row of logits."""

# Shape suffixes: R rows, V token ids, P parts of a row, W ids of a part.

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["place_of_largest"]

# Ids of a part. torch's argmax on a CPU compares one number after another, in bf16 after a
# conversion of each; amax takes a vector at a time.
_PART = 256

# Numbers up to which one call of argmax takes less time than several of others.
_FEW = 1 << 13


def place_of_largest(numbers_RV: Tensor) -> Tensor:
    """What `numbers_RV.argmax(-1, keepdim=True)` gives, on a CPU in a fraction of the time. Local.

    Args:
        numbers_RV: Floating-point numbers.

    Returns:
        `[R, 1]`, int64: of equal numbers the first, and a NaN before every number.
    """
    num_parts, rest = divmod(numbers_RV.shape[-1], _PART)
    if numbers_RV.device.type != "cpu" or num_parts < 2 or numbers_RV.numel() <= _FEW:
        return numbers_RV.argmax(-1, keepdim=True)
    whole_RV = numbers_RV[:, : num_parts * _PART] if rest else numbers_RV
    parts_RPW: Tensor = whole_RV.unflatten(-1, (num_parts, _PART))
    part_R1 = parts_RPW.amax(-1).argmax(-1, keepdim=True)
    best_RW = parts_RPW.gather(1, part_R1[:, :, None].expand(-1, 1, _PART))[:, 0]
    place_R1: Tensor = part_R1 * _PART + best_RW.argmax(-1, keepdim=True)
    if not rest:
        return place_R1
    last_R1 = numbers_RV[:, -rest:].argmax(-1, keepdim=True) + num_parts * _PART
    found_R1, at_end_R1 = numbers_RV.gather(-1, place_R1), numbers_RV.gather(-1, last_R1)
    is_last_R1 = (at_end_R1 > found_R1) | (at_end_R1.isnan() & ~found_R1.isnan())
    return torch.where(is_last_R1, last_R1, place_R1)
