"""The error of a request whose logits are no numbers."""

from __future__ import annotations

from pcomm.core.errors import PcommError

__all__ = ["NotFiniteError", "not_finite"]


class NotFiniteError(PcommError):
    """The model gave logits that are no numbers; what it kept of the tokens may be none either."""


def not_finite(largest: float) -> NotFiniteError:
    """The error for a row of logits. Local.

    Args:
        largest: Largest logit of the row.
    """
    return NotFiniteError(
        "Engine.step: logits of the model",
        found=f"the logits of a row are not numbers: the largest is {largest}",
        why="No token can be chosen among them, and none has a probability. A model gives such "
        "logits when its weights or sums leave the range of its dtype.",
        fix="Check the weights, and load the model in bfloat16 or float32 rather than float16.",
    )
