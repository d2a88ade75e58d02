"""The next token from the logits of the last one."""

# Shape suffixes: V vocabulary.

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["sample"]


def sample(logits_V: Tensor, temperature: float, generator: torch.Generator) -> int:
    """The likeliest token at temperature 0, else one drawn from `softmax(logits / temperature)`.

    Args:
        logits_V: `[V]`, on the device of `generator`.
        temperature: Divisor of the logits, at least 0.
        generator: Source of random numbers; the same state gives the same token.
    """
    if temperature == 0:
        return int(logits_V.argmax())
    # The largest becomes 0, which stays 0 however small the temperature is; the others become at
    # worst minus infinity. In fp64, which holds every temperature that Python can name.
    below_V = logits_V.double() - logits_V.max()
    probabilities_V = torch.softmax(below_V / temperature, -1)
    return int(torch.multinomial(probabilities_V, 1, generator=generator))
