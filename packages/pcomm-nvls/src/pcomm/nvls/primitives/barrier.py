"""The barrier between the same block of every rank: numbered signals, a limit on the wait.

Each rank has a row of signals for every block, one word for each rank. A barrier writes its number
into this rank's word of every row, and waits until all words of its own row have that number or a
later one. So nothing is reset, a replayed graph goes on counting, the number of ranks is
any, and a wait that is too long names the rank that is missing.

The numbers are counted on the device, in words that are private to this rank.

Source of the ordering: PTX ISA, memory consistency model. What all threads of the block wrote is
ordered before the signal by the barrier of the block and the release, and what they read after it
by the acquire and the second barrier of the block.

Stores by a multicast address are read by the address of a rank here, and the other way round. Two
addresses of one memory are two proxies to that model: within a kernel it orders what goes through
both only along a path that has a `fence.proxy.alias`, and between kernels without one. The way
"fenced multicast" has it on both sides of the signal and behind the wait. "multicast" leaves it
out, as torch's kernels and NCCL's do between a release and an acquire of the system. Neither has
run on a GPU.
"""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from pcomm.nvls.primitives.emulation import EMULATED, wait_for_signal

__all__ = ["barrier", "wait_for_all_kernel"]


# $1 table of buffers, $2 multicast address, $3 offset of the row, $4 rank, $5 ranks, $6 number,
# $7 word of the failure on the device, $8 the same for the host, $9 limit in ns, $10 what the first
# word was. Thread t of the block signals rank t, and waits for it.
_HEAD = """{
    .reg .pred %idle, %there, %early;
    .reg .b32 %peer, %seen, %ahead;
    .reg .b64 %place, %other, %now, %end;
    mov.u32 %peer, %tid.x;
    mov.b32 $0, 0;
    setp.ge.u32 %idle, %peer, $5;
    @%idle bra DONE;
    setp.ne.u32 %idle, $10, 0;
    @%idle bra DONE;
    mul.wide.u32 %other, $4, 4;
"""
_SIGNAL_EACH = """
    mul.wide.u32 %place, %peer, 8;
    add.u64 %place, %place, $1;
    ld.global.u64 %place, [%place];
    add.u64 %place, %place, $3;
    add.u64 %place, %place, %other;
    st.release.sys.global.u32 [%place], $6;
"""
_SIGNAL_ALL = """
    setp.ne.u32 %idle, %peer, 0;
    add.u64 %place, $2, $3;
    add.u64 %place, %place, %other;
    @!%idle multimem.st.release.sys.global.u32 [%place], $6;
"""
_WAIT = """
    mul.wide.u32 %place, $4, 8;
    add.u64 %place, %place, $1;
    ld.global.u64 %place, [%place];
    mul.wide.u32 %other, %peer, 4;
    add.u64 %place, %place, $3;
    add.u64 %place, %place, %other;
    mov.u64 %end, %globaltimer;
    add.u64 %end, %end, $9;
WAIT:
    ld.acquire.sys.global.u32 %seen, [%place];
    sub.u32 %ahead, %seen, $6;
    setp.ge.s32 %there, %ahead, 0;
    @%there bra SEEN;
    mov.u64 %now, %globaltimer;
    setp.lt.u64 %early, %now, %end;
    @%early bra WAIT;
    add.u32 %peer, %peer, 1;
    st.relaxed.gpu.global.u32 [$7], %peer;
    st.release.sys.global.u32 [$8], %peer;
SEEN:
"""
_FENCE = "    fence.proxy.alias;\n"
_END = "DONE:\n}"
_EACH = tl.constexpr(_HEAD + _SIGNAL_EACH + _WAIT + _END)
_ALL = tl.constexpr(_HEAD + _SIGNAL_ALL + _WAIT + _END)
_ALL_FENCED = tl.constexpr(_HEAD + _FENCE + _SIGNAL_ALL + _FENCE + _WAIT + _FENCE + _END)
_OPERANDS = tl.constexpr("=&r,l,l,l,r,r,r,l,l,l,r")


@triton.jit  # type: ignore[untyped-decorator]
def barrier(
    buffers: tl.tensor,
    multicast: tl.tensor,
    epochs: tl.tensor,
    failure: tl.tensor,
    signals: tl.tensor,
    limit_ns: tl.tensor,
    rank: tl.tensor,
    block: tl.tensor,
    WORLD: tl.constexpr,
    WAY: tl.constexpr,
) -> None:
    """Wait until this block of every rank has come here.

    Args:
        buffers: Table of the addresses of the ranks' buffers.
        multicast: Multicast address of the buffers; any number where `WAY` is "peers".
        epochs: Words of this rank alone: that of a failure, then one a block.
        failure: Address of a word for the host: place of the missing rank, plus 1.
        signals: Byte offset of the signals in a buffer.
        limit_ns: Longest wait.
        rank: Place of this rank.
        block: Place of this block.
        WORLD: Number of ranks, at most the threads of a block.
        WAY: "multicast", "fenced multicast" or "peers".
    """
    row = (signals + block * (WORLD * 4)).to(tl.int64)
    number = tl.load(epochs + 1 + block) + 1
    # Beside the number, so that no signal waits for a second load. Other blocks write it.
    failed = tl.load(epochs, volatile=True)
    # All threads have read the number, and finished what is to be seen after the barrier.
    tl.debug_barrier()
    if EMULATED:
        # As on the device: a rank that has gone on without another one signals nothing any more,
        # or that one would take what it finds for summed.
        failed = tl.load(failure.to(tl.pointer_type(tl.int32)))
        for peer in range(WORLD):
            place = tl.load(buffers + peer) + row + rank * 4
            tl.store(place.to(tl.pointer_type(tl.int32)), number, mask=failed == 0)
        own = tl.load(buffers + rank) + row
        for peer in range(WORLD):
            wait_for_signal(own + peer * 4, number, limit_ns, failure, peer)
    else:
        by_multicast: tl.constexpr = _ALL if WAY == "multicast" else _ALL_FENCED
        signal_and_wait: tl.constexpr = _EACH if WAY == "peers" else by_multicast
        tl.inline_asm_elementwise(
            signal_and_wait,
            _OPERANDS,
            [
                buffers.to(tl.int64),
                multicast.to(tl.int64),
                row,
                rank,
                WORLD,
                number,
                epochs.to(tl.int64),
                failure.to(tl.int64),
                limit_ns.to(tl.int64),
                failed,
            ],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    # Before the threads part: each of them reads the number again in the next barrier.
    tl.store(epochs + 1 + block, number)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["rank"])  # type: ignore[untyped-decorator]
def wait_for_all_kernel(
    buffers: tl.tensor,
    multicast: tl.tensor,
    epochs: tl.tensor,
    failure: tl.tensor,
    limit_ns: tl.tensor,
    rank: tl.tensor,
    WORLD: tl.constexpr,
    WAY: tl.constexpr,
) -> None:
    """Have one block wait until all ranks have come; see `barrier` for the arguments."""
    block = tl.program_id(0)
    barrier(buffers, multicast, epochs, failure, 0, limit_ns, rank, block, WORLD, WAY)
