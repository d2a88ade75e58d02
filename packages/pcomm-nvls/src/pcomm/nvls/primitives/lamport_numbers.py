"""The numbers of the barrier-free operations, without Triton."""

from __future__ import annotations

__all__ = ["LAMPORT_SLOTS", "NOTHING_HERE", "OPERATION_NUMBERS", "is_spread", "sent_bytes"]

NOTHING_HERE = 0x80000000
"""Word of 32 bits of memory that nothing has arrived in: -0.0 in fp32."""

LAMPORT_SLOTS = 3
"""Slots that take turns: one is used, one is cleared, one may be stored to by a faster rank."""

OPERATION_NUMBERS = LAMPORT_SLOTS << 28
"""Number of operations after which counting begins again: a multiple of the slots.

A device does the 2^31 operations that a word could count in a few hours.
"""

# Numbers whose zero with a sign is equal to the one without. All others may have any bits, such as
# float64, whose lower words are no numbers. Names, so that a choice can be made without torch.
_SENT_AS_THEY_ARE = {
    "torch.bfloat16",
    "torch.float16",
    "torch.float32",
    "torch.float8_e4m3fn",
    "torch.float8_e5m2",
}


def is_spread(dtype: object) -> bool:
    """True if elements of this type are sent in twice their size, since they may have any bits."""
    return str(dtype) not in _SENT_AS_THEY_ARE


def sent_bytes(num_bytes: int, dtype: object) -> int:
    """Size of `num_bytes` bytes of elements of this type as they are sent."""
    return num_bytes * 2 if is_spread(dtype) else num_bytes
