"""Which KV blocks are free, used or cached, and which free ones a request gets."""

from __future__ import annotations

__all__ = ["BlockManager"]

_FREE, _CLAIMED, _TAKEN = 0, 1, 2
# As the search for free blocks sees them when claims are ignored.
_WITHOUT_CLAIMS = bytes([_FREE, _FREE, _TAKEN, _TAKEN])


class BlockManager:
    """Ids and reference counts of the blocks 1 to `num_blocks`; block 0 belongs to no request.

    A block is used while a request refers to it. After that it is free, or cached if the prefix
    cache has published it; the cache says by `unpublish` when it gives one up.

    Keys and values of a request whose blocks are neighbours in ascending order are one slice of
    memory, which attention reads fastest. So a request gets neighbours where there are some, and
    claims as many behind them as it may grow into; others take claimed blocks last.

    Args:
        num_blocks: Number of blocks that requests can have.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.num_cached = 0
        # One byte a block, so that neighbours are found by a search for zeros.
        self._states = bytearray(num_blocks + 1)
        self._states[0] = _TAKEN
        self._references = [0] * (num_blocks + 1)
        self._published = bytearray(num_blocks + 1)

    @property
    def num_used(self) -> int:
        """Number of blocks that requests refer to."""
        return self.num_blocks - self.num_free - self.num_cached

    def allocate(self, count: int, *, after: int = 0, claim: tuple[int, int] = (0, 0)) -> list[int]:
        """Take free blocks, each with one reference.

        Args:
            count: Number of blocks, at most `num_free`.
            after: The last block of the request, whose neighbours come first; 0 for none.
            claim: The claim of the request.

        Returns:
            Ids of the blocks, in the order in which the request uses them.
        """
        found = self._run_from(after + 1, count, claim) if after else []
        if not found and (first := self._states.find(_CLAIMED, *claim)) > 0:
            found = self._run_from(first, count, claim)
        for block in found:
            self._take(block)
        while len(found) < count:
            start, length = self._longest_run(count - len(found))
            for block in range(start, start + length):
                self._take(block)
                found.append(block)
        return found

    def claim(self, count: int) -> tuple[int, int]:
        """Keep `count` neighbours for one request, as long as others find free ones elsewhere.

        Returns:
            First and end of the claim; `(0, 0)` if there are not as many free neighbours.
        """
        start = self._states.find(bytes(count)) if count else -1
        if start < 0:
            return (0, 0)
        for block in range(start, start + count):
            self._states[block] |= _CLAIMED
        return (start, start + count)

    def unclaim(self, claim: tuple[int, int]) -> None:
        """End a claim; blocks that were taken of it stay taken."""
        for block in range(*claim):
            self._states[block] &= _TAKEN

    def retain(self, block: int) -> None:
        """Add a reference to a block that is used or cached."""
        if not self._references[block]:
            self.num_cached -= 1
        self._references[block] += 1

    def release(self, block: int) -> bool:
        """Take one reference away.

        Returns:
            True if the block has become cached by that, so that the prefix cache may give it up.
        """
        self._references[block] -= 1
        if self._references[block]:
            return False
        if self._published[block]:
            self.num_cached += 1
            return True
        self._free(block)
        return False

    def is_cached(self, block: int) -> bool:
        """True for a published block that no request refers to."""
        return bool(self._published[block]) and not self._references[block]

    def publish(self, block: int) -> None:
        """Note that the prefix cache knows a used block."""
        self._published[block] = 1

    def unpublish(self, block: int) -> None:
        """Note that the prefix cache has given a block up; a cached one becomes free."""
        self._published[block] = 0
        if not self._references[block]:
            self.num_cached -= 1
            self._free(block)

    def _run_from(self, first: int, count: int, claim: tuple[int, int]) -> list[int]:
        """Up to `count` neighbours from `first` on that are free and that no other claims."""
        found: list[int] = []
        for block in range(first, min(first + count, self.num_blocks + 1)):
            state = self._states[block]
            is_mine = claim[0] <= block < claim[1]
            if state & _TAKEN or (state & _CLAIMED and not is_mine):
                break
            found.append(block)
        return found

    def _take(self, block: int) -> None:
        self._states[block] |= _TAKEN
        self._references[block] = 1
        self.num_free -= 1

    def _free(self, block: int) -> None:
        self._states[block] &= _CLAIMED
        self.num_free += 1

    def _longest_run(self, count: int) -> tuple[int, int]:
        """Start and length of `count` free neighbours, or of fewer where there are not as many."""
        for states in (self._states, self._states.translate(_TRANSLATION)):
            if (start := states.find(bytes(count))) >= 0:
                return start, count
        free = self._states.translate(_TRANSLATION)
        length = count
        while (start := free.find(bytes(length))) < 0:
            length = (length + 1) // 2
        return start, length


_TRANSLATION = _WITHOUT_CLAIMS + bytes(range(len(_WITHOUT_CLAIMS), 256))
