"""The server that processes of ranks are forked from, and how they are started."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import sys
from collections.abc import Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.context import ForkServerContext
from types import ModuleType

from pcomm.core.process import rank_process
from pcomm.core.process.rank_process import blocked_requests

__all__ = ["fork_server", "starting"]


def fork_server(preload: Sequence[str]) -> ForkServerContext:
    """The context of the server, which has imported torch; it starts with the first process. Local.

    Args:
        preload: Modules that the server imports before it forks, so that ranks need not; beside
            them it imports those of pcomm that this process has imported.
    """
    context = mp.get_context("forkserver")
    own = ["torch", "torch.distributed", rank_process.__name__]
    # Ranks run the script of this process again, up to its `__main__`: they import the same.
    imported = [name for name in list(sys.modules) if name.startswith("pcomm.")]
    context.set_forkserver_preload([*own, *preload, *imported])
    return context


@contextlib.contextmanager
def starting(*, imports_main: bool) -> Iterator[None]:
    """A block that starts processes of ranks.

    A process takes over what is blocked here: a request to stop, which a terminal or a batch system
    sends to all processes, reaches a rank within a task, and neither the server that imports torch,
    which knows when ranks end, nor a rank that waits.

    Args:
        imports_main: False to keep the processes from running the program's own file.
    """
    # Starting the tracker would lift the block.
    resource_tracker.ensure_running()
    with blocked_requests(), contextlib.nullcontext() if imports_main else _no_main():
        yield


@contextlib.contextmanager
def _no_main() -> Iterator[None]:
    """Let processes that start here not run the program's file as a module."""
    before = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = before
