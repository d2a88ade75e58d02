"""Which documents are held out from training: decided by their names, not by their order."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pcomm.core.errors import ConfigError

__all__ = ["held_out_mask"]


def held_out_mask(names: Sequence[str], share: float) -> NDArray[np.bool_]:
    """Whether each document is held out.

    A document's name decides: adding or removing others does not move it to the other side. Where
    the share would leave one side empty, that side gets the document that is nearest to it.

    Args:
        names: The names of all documents.
        share: Share of the documents to hold out, in [0, 1). 0 holds out none.

    Returns:
        `[len(names)]`, true where the document is held out.

    Raises:
        ConfigError: There is one document only, which cannot be on both sides.
    """
    places = np.array([_place(name) for name in names], dtype=np.float64)
    mask = places < share
    if share == 0:
        return mask
    if len(names) == 1:
        raise ConfigError(
            "data.held_out",
            found=f"one document, {names[0]!r}, and the share {share}",
            why="Documents are held out as a whole, so nothing would be left to train on.",
            fix="Split the text in several files, write it as .jsonl with a document a line, or "
            "set data.held_out = 0 to train without an evaluation.",
        )
    if not mask.any():
        mask[np.argmin(places)] = True
    if mask.all():
        mask[np.argmax(places)] = False
    return mask


def _place(name: str) -> float:
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    # 53 bits, which a float holds exactly.
    return (int.from_bytes(digest, "big") >> 11) / 2**53
