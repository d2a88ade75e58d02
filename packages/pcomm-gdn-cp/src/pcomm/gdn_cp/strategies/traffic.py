"""What one rank sends for one mixer in one layer."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Traffic"]


@dataclass(frozen=True)
class Traffic:
    """The collectives of one mixer in one layer, and the bytes that one rank sends in them.

    Args:
        forward: Names of the collectives of forward, in order.
        backward: Names of the collectives of backward, in order.
        forward_bytes: Bytes that this rank has to send to others in forward.
        backward_bytes: Bytes that this rank has to send to others in backward.
    """

    forward: tuple[str, ...] = ()
    backward: tuple[str, ...] = ()
    forward_bytes: int = 0
    backward_bytes: int = 0

    @property
    def num_collectives(self) -> int:
        """Number of collectives, forward and backward."""
        return len(self.forward) + len(self.backward)

    @property
    def sent_bytes(self) -> int:
        """Bytes, forward and backward."""
        return self.forward_bytes + self.backward_bytes
