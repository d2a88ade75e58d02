"""What lives in a process and may outlive its use: communicators, threads, parameters.

Counting costs some hundred microseconds, so `@ranks` counts around every test. What only a
collection of cycles would free counts as left behind where the collection does not free it.
"""

from __future__ import annotations

import gc
import threading
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch import nn

__all__ = ["Living", "left_behind", "num_parameters"]

# Threads of a gloo communicator: two that run its operations, one that polls its connections.
_GLOO = frozenset({"pt_gloo_runloop", "gloo_tcp_loop"})
# A thread that was told to end may need a moment. Only one that never ends costs all of it.
_ENDING_S = 30.0


@dataclass(frozen=True)
class Living:
    """What there is in this process at a moment.

    Args:
        gloo_threads: Threads of gloo communicators, two or three for each; 0 where the system does
            not tell (only Linux does).
        threads: Threads that Python knows.
        process_groups: Names and descriptions of the communicators that torch.distributed knows;
            they are not held by this object.
    """

    gloo_threads: int
    threads: frozenset[threading.Thread]
    process_groups: frozenset[tuple[str, str]]

    @classmethod
    def now(cls) -> Living:
        """Count. Local; nothing is collected, connected or ended."""
        names = dist.distributed_c10d._world.pg_names if dist.is_available() else {}
        groups = frozenset((name, group.group_desc) for group, name in names.items())
        return cls(_gloo_threads(), frozenset(threading.enumerate()), groups)

    def beyond(self, before: Living) -> list[str]:
        """What there is now and was not there before, in words; empty if nothing."""
        found = []
        if self.gloo_threads > before.gloo_threads:
            found.append(f"{self.gloo_threads - before.gloo_threads} threads of gloo communicators")
        found += sorted(f"the thread {t.name!r}" for t in self.threads - before.threads)
        found += sorted(
            f"the process group {description or name!r}"
            for name, description in self.process_groups - before.process_groups
        )
        return found


def left_behind(before: Living, *, within_s: float = _ENDING_S) -> list[str]:
    """What is there now and was not before, although it had the chance to go. Local.

    Nothing is collected where nothing is left, so the check is cheap in the usual case.

    Args:
        before: What there was.
        within_s: How long threads that were told to end may need.
    """
    found = Living.now().beyond(before)
    if not found:
        return found
    end = time.monotonic() + within_s
    while True:
        gc.collect()
        found = Living.now().beyond(before)
        if not found or time.monotonic() >= end:
            return found
        time.sleep(0.02)


def num_parameters() -> int:
    """How many `nn.Parameter` live in this process after a collection. Local; some 100 ms."""
    gc.collect()
    with warnings.catch_warnings():
        # Some of torch's own objects warn when they are asked for their type.
        warnings.simplefilter("ignore", FutureWarning)
        return sum(isinstance(found, nn.Parameter) for found in gc.get_objects())


def _gloo_threads() -> int:
    names = []
    for task in Path("/proc/self/task").glob("*/comm"):
        # One that ends while it is looked at is gone.
        with suppress(OSError):
            names.append(task.read_text().strip())
    return sum(name in _GLOO for name in names)
