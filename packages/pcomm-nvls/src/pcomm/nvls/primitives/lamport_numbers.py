"""The numbers of the barrier-free operations, without Triton."""

from __future__ import annotations

__all__ = ["LAMPORT_SLOTS", "NOTHING_HERE", "OPERATION_NUMBERS"]

NOTHING_HERE = 0x80000000
"""Word of 32 bits of memory that nothing has arrived in: -0.0 in fp32."""

LAMPORT_SLOTS = 3
"""Slots that take turns: one is used, one is cleared, one may be stored to by a faster rank."""

OPERATION_NUMBERS = LAMPORT_SLOTS << 28
"""Number of operations after which counting begins again: a multiple of the slots.

A device does the 2^31 operations that a word could count in a few hours.
"""
