"""Drafts by look-up: what followed the last tokens when the text had them before."""

from __future__ import annotations

from array import array

__all__ = ["draft_tokens"]

_LONGEST, _SHORTEST = 4, 2


def draft_tokens(tokens: array[int], most: int) -> tuple[int, ...]:
    """Guess how a text goes on.

    Args:
        tokens: Prompt and text so far.
        most: Largest number of tokens to guess.

    Returns:
        What followed the latest earlier occurrence of the last four, three or two tokens, the
        longest of these that occurs; empty if none does.
    """
    if most < 1:
        return ()
    size = tokens.itemsize
    text = tokens.tobytes()
    for length in range(min(_LONGEST, len(tokens) - 1), _SHORTEST - 1, -1):
        wanted = text[-length * size :]
        # The last token is not part of an earlier occurrence.
        place = text.rfind(wanted, 0, len(text) - size)
        while place > 0 and place % size:
            place = text.rfind(wanted, 0, place + len(wanted) - 1)
        if place >= 0 and place % size == 0:
            first = place // size + length
            return tuple(tokens[first : first + most])
    return ()
