"""How many drafts were right."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["count_accepted"]


def count_accepted(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """Number of drafts that are the tokens which were sampled in their place.

    Noise of a token depends on seed and position alone, so each sampled token is the one that would
    follow its predecessors without drafts: up to the first draft that differs, and that one's place
    included, the text is exactly that of an engine without speculation.

    Args:
        drafts: Guessed tokens.
        sampled: Tokens sampled behind the known text and behind each draft, one more than drafts.
    """
    for number, (draft, token) in enumerate(zip(drafts, sampled, strict=False)):
        if draft != token:
            return number
    return len(drafts)
