"""Triton's interpreter: whether it runs the kernels, and how they wait there.

It knows no inline assembly. What a kernel waits for is a word that another process writes: under
the interpreter that is done in plain Python.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from pcomm.nvls.primitives.lamport_numbers import NOTHING_HERE

__all__ = ["EMULATED", "wait_for_payload", "wait_for_signal"]


# Decided when Triton decides what its decorator makes of a kernel: when the kernels are imported.
EMULATED = tl.constexpr(bool(triton.knobs.runtime.interpret))


# A rank that waits gives its core to those it waits for; the pause grows up to this one.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2e-5, 1e-3


def wait_for_signal(address: Any, number: Any, limit_ns: Any, failure: Any, peer: Any) -> None:
    """Wait until the word at `address` has `number`, or one that was counted later.

    After a wait of `limit_ns` nanoseconds it writes `peer` + 1 to the word at `failure` and
    returns, as the device does; with a failure there it does not wait.
    """
    word = ctypes.c_int32.from_address(_integer(address))
    failed = ctypes.c_int32.from_address(_integer(failure))
    wanted, pause_s = _integer(number), _FIRST_PAUSE_S
    end_ns = time.monotonic_ns() + _integer(limit_ns)
    while ctypes.c_int32(word.value - wanted).value < 0 and not failed.value:
        if time.monotonic_ns() > end_ns:
            failed.value = _integer(peer) + 1
            return
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def wait_for_payload(address: Any, mask: Any, limit_ns: Any, failure: Any, peer: Any) -> None:
    """Wait until no word of the 16 bytes at each address, where `mask`, is the one for nothing.

    The limit and the failure are those of `wait_for_signal`; `peer` is the rank of each address.
    """
    # With Triton's interpreter, which needs it; not for kernels on a GPU.
    import numpy as np

    mask, address = np.broadcast_arrays(_array(mask), _array(address).astype(np.int64))
    places = address[mask]
    if not places.size:
        return
    first = int(places.min())
    memory: Any = (ctypes.c_uint32 * ((int(places.max()) - first) // 4 + 4)).from_address(first)
    # Only the words asked for: those between them may be for other blocks.
    words, wanted = np.frombuffer(memory, np.uint32), (places - first)[:, None] // 4 + np.arange(4)
    failed = ctypes.c_int32.from_address(_integer(failure))
    pause_s, end_ns = _FIRST_PAUSE_S, time.monotonic_ns() + _integer(limit_ns)
    while (is_missing := (words[wanted] == NOTHING_HERE).any(axis=1)).any() and not failed.value:
        if time.monotonic_ns() > end_ns:
            peers = np.broadcast_to(_array(peer), mask.shape)[mask]
            failed.value = int(peers[is_missing][0]) + 1
            return
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _array(value: Any) -> Any:
    """The numbers in a tensor of the interpreter, or a number."""
    import numpy as np

    return np.asarray(value.handle.data if hasattr(value, "handle") else value)


def _integer(value: Any) -> int:
    """The number in a scalar of the interpreter, or the number itself."""
    return int(value.handle.data.item()) if hasattr(value, "handle") else int(value)


# Triton follows the names in a kernel also where a branch is not compiled, and takes functions of
# its own alone. These are called by the interpreter only.
wait_for_payload.__triton_builtin__ = True  # type: ignore[attr-defined]
wait_for_signal.__triton_builtin__ = True  # type: ignore[attr-defined]
