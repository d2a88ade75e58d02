"""Which state slots are free, used by requests, or hold snapshots of the prefix cache."""

from __future__ import annotations

__all__ = ["StateSlots"]


class StateSlots:
    """Ids of the slots 1 to `num_slots`; slot 0 belongs to no request.

    Args:
        num_slots: Number of slots for requests and snapshots together.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_cached = 0
        # The lowest is taken first, so few requests touch few pages of the pool.
        self._free = list(range(num_slots, 0, -1))

    @property
    def num_free(self) -> int:
        """Number of slots that hold nothing."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Number of slots that requests have."""
        return self.num_slots - len(self._free) - self.num_cached

    def take(self) -> int:
        """A free slot, which is used from now on; there has to be one."""
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        """Make a used slot free."""
        self._free.append(slot)

    def to_cache(self) -> None:
        """Note that a used slot holds a snapshot now, and belongs to the prefix cache."""
        self.num_cached += 1

    def from_cache(self, slot: int) -> None:
        """Make the slot of a snapshot free."""
        self.num_cached -= 1
        self._free.append(slot)
