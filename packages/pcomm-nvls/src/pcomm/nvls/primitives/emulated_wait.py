"""The wait for a word that another process writes, as the interpreter does it: in plain Python."""

from __future__ import annotations

import ctypes
import time
from typing import Any

__all__ = ["wait_for_signal"]

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


def _integer(value: Any) -> int:
    """The number in a scalar of the interpreter, or the number itself."""
    return int(value.handle.data.item()) if hasattr(value, "handle") else int(value)


# Triton follows the names in a kernel also where a branch is not compiled, and takes functions of
# its own alone. This one is called by the interpreter only.
wait_for_signal.__triton_builtin__ = True  # type: ignore[attr-defined]
