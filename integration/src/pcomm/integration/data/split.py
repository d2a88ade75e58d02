"""Which documents are held out from training: decided by what they are, not by their order."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["cut_text", "held_out_mask"]


def held_out_mask(keys: Sequence[str], share: float) -> NDArray[np.bool_]:
    """Whether each document is held out.

    A document's key decides: adding or removing others does not move it to the other side. Where
    the share would leave one side empty, that side gets the document that is nearest to it.

    Args:
        keys: The `Document.key` of all documents, at least two; equal ones are on one side where
            there are others.
        share: Share of the documents to hold out, in [0, 1). 0 holds out none.

    Returns:
        `[len(keys)]`, true where the document is held out.
    """
    places = np.array([_place(key) for key in keys], dtype=np.float64)
    mask = places < share
    if share == 0:
        return mask
    if not mask.any():
        mask[_all_but_every(places == places.min())] = True
    if mask.all():
        mask[_all_but_every(places == places.max())] = False
    return mask


def cut_text(text: str, share: float) -> tuple[str, str] | None:
    """The only document of a corpus as two: the text to learn, and its end, which is held out.

    The cut is at the end of a line where one is near, else of a word, else anywhere.

    Args:
        text: The whole text.
        share: Share of its characters to hold out, in (0, 1).

    Returns:
        Two parts with more than white space in each, which together are the text; None if there
        are no two visible characters.
    """
    # Any cut in this range leaves something visible on both sides.
    first = len(text) - len(text.lstrip()) + 1
    last = len(text.rstrip()) - 1
    if first > last:
        return None
    wanted = min(max(round(len(text) * (1 - share)), first), last)
    # What is held out may become twice as long, so that a line stays whole.
    earliest = max(first, 2 * wanted - len(text))
    for boundary in ("\n", " "):
        found = text.rfind(boundary, earliest - 1, wanted)
        if found >= 0:
            return text[: found + 1], text[found + 1 :]
    return text[:wanted], text[wanted:]


def _all_but_every(chosen: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """`chosen`, or its first alone where that is everything."""
    if not chosen.all():
        return chosen
    first = np.zeros_like(chosen)
    first[0] = True
    return first


def _place(key: str) -> float:
    digest = hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    # 53 bits, which a float holds exactly.
    return (int.from_bytes(digest, "big") >> 11) / 2**53
