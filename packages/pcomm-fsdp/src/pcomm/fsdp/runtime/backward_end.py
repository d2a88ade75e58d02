"""The end of a backward: autograd calls back after the last gradient, and not after an error."""

from __future__ import annotations

import threading
import weakref

from torch.autograd import Variable

from pcomm.fsdp.runtime.engine import Engine

__all__ = ["end_with_backward"]


def end_with_backward(engine: Engine, forward_thread: int) -> None:
    """Have the engine end its backward when the one that is running in autograd ends. Local.

    Torch has no hook for a backward that raises: the caller of backward gets the error, and the
    engine learns of it when the next forward begins. Peers may wait for this rank by then. So they
    are told as soon as autograd has dropped the callback without calling it, which is before the
    error reaches the caller of backward.

    Args:
        engine: The engine, in backward.
        forward_thread: Identifier of the thread that computed the forward.
    """
    callback = _BackwardEnd(engine)
    dropped = weakref.finalize(
        callback, _fail_if_open, engine, engine.num_backwards, forward_thread
    )
    dropped.atexit = False
    Variable._execution_engine.queue_callback(callback)


class _BackwardEnd:
    """Autograd's callback; autograd alone holds it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __call__(self) -> None:
        self._engine.end_backward()


def _fail_if_open(engine: Engine, number: int, forward_thread: int) -> None:
    """Tell the peers that backward `number` raised, if the engine is still in it."""
    is_open = engine.phase == "backward" and engine.num_backwards == number
    # On a GPU a thread of autograd's may be the last to drop the callback, while the caller's goes
    # on with the error. Two threads must not change the engine: there the next forward finds out.
    if is_open and threading.get_ident() == forward_thread:
        open_units = [name for name, unit in engine.units.items() if unit.is_in_backward]
        place = f"within unit {open_units[-1]!r}" if open_units else "at its beginning"
        engine.fail(RuntimeError(f"backward raised, {place}; the traceback of this rank says what"))
