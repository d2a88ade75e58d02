"""Data that show by themselves that they have come, so that no barrier is needed to read them.

Memory that nothing was stored to holds the word `NOTHING` everywhere. A rank stores its payload on
other ranks, and each of them reads until no word of it is `NOTHING` any more: one way through the
link, where a barrier takes a second one. Every word of 32 bits counts for itself, since a store of
16 bytes may arrive in parts.

`NOTHING` is -0.0 in fp32, and the pair 0.0, -0.0 in numbers of two bytes. Where a payload has such
a word, +0.0 is sent for it: an equal number, whose sign is lost. Bytes that are no such numbers are
spread over twice as many words, 16 bits in each, none of which can be `NOTHING`.

Three slots take turns. Operation e uses slot e % 3:

- The slot of e - 1, which is that of e + 2, is filled with `NOTHING` in operation e. This rank has
  read it. Another one stores there again in e + 2, after it has read what this rank stored in
  e + 1, in a kernel that began when this one had ended.
- The slot of e + 1 is left alone: a rank that has read all of e may have begun e + 1.

The argument for e - 1 holds only where **every rank needs data of every rank in every operation**.
All-gather, all-reduce and reduce-scatter do. A gather to one rank, a broadcast, counts of which one
may be zero and an empty tensor do not: a rank that waits for none can be any number of operations
ahead. Each operation is a kernel of its own that starts after the one before has ended: with
programmatic dependent launch the clear would have to be finished before the next stores.

The state is three words on the device, so a replayed graph goes on counting, and any sequence of
sizes and grids is right: the number of the operation, a ticket counter by which the last block of a
launch knows that it is the last, and the length that the last operation stored.
"""

from __future__ import annotations

from typing import Any

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from pcomm.nvls.primitives.access import add_words, get, put, words_of, zero_floats
from pcomm.nvls.primitives.emulation import EMULATED, wait_for_payload
from pcomm.nvls.primitives.lamport_numbers import LAMPORT_SLOTS, NOTHING_HERE, OPERATION_NUMBERS

__all__ = [
    "NOTHING",
    "NUMBERS",
    "SLOTS",
    "advance",
    "arrived",
    "clear_previous",
    "joined",
    "looked_at",
    "payload_of",
    "slot_of",
    "spread",
    "summed",
]

NOTHING = tl.constexpr(NOTHING_HERE)
SLOTS = tl.constexpr(LAMPORT_SLOTS)
NUMBERS = tl.constexpr(OPERATION_NUMBERS)

# $0-$3 words, $4 address, $5-$8 words that were read there, $9 mask, $10 rank that stores there,
# $11 word of the failure on the device, $12 the same for the host, $13 limit in ns.
_ARRIVED = tl.constexpr("""{
    .reg .pred %missing, %idle, %early;
    .reg .b32 %seen;
    .reg .b64 %now, %end;
    mov.b32 $0, $5; mov.b32 $1, $6; mov.b32 $2, $7; mov.b32 $3, $8;
    setp.eq.s32 %idle, $9, 0;
    @%idle bra DONE;
    setp.eq.u32 %missing, $0, 0x80000000;
    setp.eq.or.u32 %missing, $1, 0x80000000, %missing;
    setp.eq.or.u32 %missing, $2, 0x80000000, %missing;
    setp.eq.or.u32 %missing, $3, 0x80000000, %missing;
    @!%missing bra DONE;
    ld.relaxed.gpu.global.b32 %seen, [$11];
    setp.ne.u32 %idle, %seen, 0;
    @%idle bra DONE;
    mov.u64 %end, %globaltimer;
    add.u64 %end, %end, $13;
WAIT:
    ld.relaxed.sys.global.v4.b32 {$0, $1, $2, $3}, [$4];
    setp.eq.u32 %missing, $0, 0x80000000;
    setp.eq.or.u32 %missing, $1, 0x80000000, %missing;
    setp.eq.or.u32 %missing, $2, 0x80000000, %missing;
    setp.eq.or.u32 %missing, $3, 0x80000000, %missing;
    @!%missing bra DONE;
    mov.u64 %now, %globaltimer;
    setp.lt.u64 %early, %now, %end;
    @%early bra WAIT;
    add.u32 %seen, $10, 1;
    st.relaxed.gpu.global.b32 [$11], %seen;
    st.relaxed.sys.global.b32 [$12], %seen;
DONE:
}""")
_OPERANDS = tl.constexpr("=&r,=&r,=&r,=&r,l,r,r,r,r,r,r,l,l,l")


@triton.jit  # type: ignore[untyped-decorator]
def payload_of(w0: tl.tensor, w1: tl.tensor, w2: tl.tensor, w3: tl.tensor) -> Any:
    """The words of numbers as they are sent: none is `NOTHING`."""
    w0 = tl.where(w0 == NOTHING, 0, w0)
    w1 = tl.where(w1 == NOTHING, 0, w1)
    w2 = tl.where(w2 == NOTHING, 0, w2)
    w3 = tl.where(w3 == NOTHING, 0, w3)
    return w0, w1, w2, w3


@triton.jit  # type: ignore[untyped-decorator]
def spread(w0: tl.tensor, w1: tl.tensor) -> Any:
    """Two words of any bits as four that are sent, none of which is `NOTHING`."""
    return w0 & 0xFFFF, w0 >> 16, w1 & 0xFFFF, w1 >> 16


@triton.jit  # type: ignore[untyped-decorator]
def joined(s0: tl.tensor, s1: tl.tensor, s2: tl.tensor, s3: tl.tensor) -> Any:
    """The two words that were `spread`."""
    return s0 | (s1 << 16), s2 | (s3 << 16)


@triton.jit  # type: ignore[untyped-decorator]
def looked_at(address: tl.tensor, mask: tl.tensor) -> Any:
    """Four words at each address in this rank's buffer, which may not have arrived yet."""
    if EMULATED:
        # `arrived` reads them.
        w0, w1, w2, w3 = mask, mask, mask, mask
    else:
        w0, w1, w2, w3 = get(address, mask)
    return w0, w1, w2, w3


@triton.jit  # type: ignore[untyped-decorator]
def arrived(
    address: tl.tensor,
    w0: tl.tensor,
    w1: tl.tensor,
    w2: tl.tensor,
    w3: tl.tensor,
    peer: tl.tensor,
    mask: tl.tensor,
    epochs: tl.tensor,
    failure: tl.tensor,
    limit_ns: tl.tensor,
) -> Any:
    """Four words at each address after another rank has stored there; waits for it.

    Args:
        address: Addresses in this rank's buffer.
        w0: First word at each address, `looked_at` before: so a block reads many addresses before
            it waits for the first.
        w1: Second word.
        w2: Third word.
        w3: Fourth word.
        peer: Place of the rank that stores at each address.
        mask: True where there is something to wait for; elsewhere the words are returned.
        epochs: Words of this rank, the first of which is that of a failure. With a failure there,
            or after `limit_ns`, the four words are returned as they are.
        failure: Address of a word for the host: place of the missing rank, plus 1.
        limit_ns: Longest wait, in ns.
    """
    if EMULATED:
        wait_for_payload(address, mask, limit_ns, failure, peer)
        w0, w1, w2, w3 = get(address, mask)
    else:
        w0, w1, w2, w3 = tl.inline_asm_elementwise(
            _ARRIVED,
            _OPERANDS,
            [
                address,
                w0,
                w1,
                w2,
                w3,
                mask.to(tl.int32),
                peer,
                epochs.to(tl.int64),
                failure.to(tl.int64),
                limit_ns.to(tl.int64),
            ],
            dtype=(tl.uint32, tl.uint32, tl.uint32, tl.uint32),
            is_pure=False,
            pack=1,
        )
    return w0, w1, w2, w3


@triton.jit  # type: ignore[untyped-decorator]
def slot_of(number: tl.tensor, region: tl.tensor, slot_bytes: tl.tensor) -> Any:
    """Byte offset of the slot of an operation in a buffer."""
    return region.to(tl.int64) + (number % SLOTS).to(tl.int64) * slot_bytes


@triton.jit  # type: ignore[untyped-decorator]
def clear_previous(
    own: tl.tensor,
    state: tl.tensor,
    number: tl.tensor,
    region: tl.tensor,
    slot_bytes: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Put `NOTHING` wherever the operation before stored something; the blocks share the work.

    Args:
        own: Address of this rank's buffer.
        state: Address of the three words of this rank: number, ticket, length.
        number: Number of this operation.
        region: Byte offset of the slots in a buffer.
        slot_bytes: Size of a slot, in bytes.
        BLOCK: Vectors of 16 bytes that a block clears at a time.
    """
    place = own + slot_of(number + (SLOTS - 1), region, slot_bytes)
    length = tl.load(state + 2)
    lanes = tl.arange(0, BLOCK)
    nothing = tl.full((BLOCK,), NOTHING, tl.uint32)
    step = tl.num_programs(0) * BLOCK
    for start in range(tl.program_id(0) * BLOCK, length, step):
        index = start + lanes
        put(place + index.to(tl.int64) * 16, nothing, nothing, nothing, nothing, index < length)


@triton.jit  # type: ignore[untyped-decorator]
def advance(state: tl.tensor, number: tl.tensor, length: tl.tensor) -> None:
    """End the operation: the last block to come here counts it.

    Args:
        state: Address of the three words of this rank: number, ticket, length.
        number: Number of this operation.
        length: Vectors of 16 bytes that it stored in its slot, from the beginning on.
    """
    # All threads have read the number and the length.
    tl.debug_barrier()
    # Relaxed: no block reads here what another one wrote, and a fence takes as long as a store.
    ticket = tl.atomic_add(state + 1, 1, sem="relaxed", scope="gpu")
    is_last = ticket == tl.num_programs(0) - 1
    tl.store(state + 1, 0, mask=is_last)
    tl.store(state + 2, length, mask=is_last)
    tl.store(state, tl.where(number == NUMBERS - 1, 0, number + 1), mask=is_last)


@triton.jit  # type: ignore[untyped-decorator]
def summed(
    place: tl.tensor,
    num_vectors: tl.tensor,
    inside: tl.tensor,
    epochs: tl.tensor,
    failure: tl.tensor,
    limit_ns: tl.tensor,
    WORLD: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
) -> Any:
    """Four words of each segment, waited for, added in rank order in fp32 and rounded once.

    Args:
        place: Addresses in segment 0 of this rank's slot.
        num_vectors: Length of a segment, in 16 bytes.
        inside: True where there is something to add.
        epochs: Words of this rank, the first of which is that of a failure.
        failure: Address of a word for the host: place of the missing rank, plus 1.
        limit_ns: Longest wait, in ns.
        WORLD: Number of segments.
        KIND: "bf16", "fp16" or "fp32".
        BLOCK: Number of addresses.
    """
    stride = num_vectors.to(tl.int64) * 16
    a0, a1, a2, a3, a4, a5, a6, a7 = zero_floats(BLOCK)
    # Four at a time, so that the first wait is not in the way of the other loads.
    for first in range(0, WORLD, 4):
        p = place + first * stride
        q, r, s = p + stride, p + 2 * stride, p + 3 * stride
        in_q, in_r = inside & (first + 1 < WORLD), inside & (first + 2 < WORLD)
        in_s = inside & (first + 3 < WORLD)
        p0, p1, p2, p3 = looked_at(p, inside)
        if WORLD > 1:
            q0, q1, q2, q3 = looked_at(q, in_q)
        if WORLD > 2:
            r0, r1, r2, r3 = looked_at(r, in_r)
        if WORLD > 3:
            s0, s1, s2, s3 = looked_at(s, in_s)
        v0, v1, v2, v3 = arrived(p, p0, p1, p2, p3, first, inside, epochs, failure, limit_ns)
        a0, a1, a2, a3, a4, a5, a6, a7 = add_words(
            a0, a1, a2, a3, a4, a5, a6, a7, v0, v1, v2, v3, KIND
        )
        if WORLD > 1:
            v0, v1, v2, v3 = arrived(q, q0, q1, q2, q3, first + 1, in_q, epochs, failure, limit_ns)
            a0, a1, a2, a3, a4, a5, a6, a7 = add_words(
                a0, a1, a2, a3, a4, a5, a6, a7, v0, v1, v2, v3, KIND
            )
        if WORLD > 2:
            v0, v1, v2, v3 = arrived(r, r0, r1, r2, r3, first + 2, in_r, epochs, failure, limit_ns)
            a0, a1, a2, a3, a4, a5, a6, a7 = add_words(
                a0, a1, a2, a3, a4, a5, a6, a7, v0, v1, v2, v3, KIND
            )
        if WORLD > 3:
            v0, v1, v2, v3 = arrived(s, s0, s1, s2, s3, first + 3, in_s, epochs, failure, limit_ns)
            a0, a1, a2, a3, a4, a5, a6, a7 = add_words(
                a0, a1, a2, a3, a4, a5, a6, a7, v0, v1, v2, v3, KIND
            )
    return words_of(a0, a1, a2, a3, a4, a5, a6, a7, KIND)
