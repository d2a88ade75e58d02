"""Names of blocks by their content: each hash covers all tokens from the first one on."""

from __future__ import annotations

from array import array
from hashlib import blake2b

__all__ = ["extend_hashes"]


def extend_hashes(hashes: list[bytes], tokens: array[int], *, block_size: int, count: int) -> None:
    """Append the hashes of full blocks until there are `count`.

    A hash takes in the one before it, so two requests with equal hashes have equal tokens up to
    there; 16 bytes of BLAKE2 have no collisions that could be found.

    Args:
        hashes: Hashes of the first blocks, extended in place.
        tokens: Tokens of the request, at least `count` blocks.
        block_size: Tokens of a block.
        count: Number of hashes that are wanted.
    """
    for number in range(len(hashes), count):
        before = hashes[-1] if hashes else b""
        content = tokens[number * block_size : (number + 1) * block_size].tobytes()
        hashes.append(blake2b(before + content, digest_size=16).digest())
