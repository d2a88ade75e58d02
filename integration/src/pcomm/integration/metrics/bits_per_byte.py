"""The quality of a model on text, in a unit that does not depend on the tokenizer."""

from __future__ import annotations

import math

__all__ = ["bits_per_byte"]


def bits_per_byte(nats: float, num_bytes: int) -> float:
    """A sum of losses in nats as bits per byte of the text: comparable between tokenizers.

    NaN where the targets stand for no byte.
    """
    return nats / math.log(2) / num_bytes if num_bytes else math.nan
