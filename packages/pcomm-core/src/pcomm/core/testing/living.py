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

from pcomm.core.testing.patience import scaled_s

__all__ = ["Living", "left_behind", "num_parameters"]

# Threads of a gloo communicator: two that run its operations, one that polls its connections.
_GLOO = frozenset({"pt_gloo_runloop", "gloo_tcp_loop"})
# A thread that was told to end may need a moment. Only one that never ends costs all of it.
_ENDING_S = 2.0


@dataclass(frozen=True)
class Living:
    """What there is in this process at a moment.

    Args:
        gloo_threads: Ids of the threads of gloo communicators, three for each; none where the
            system does not tell (only Linux does).
        other_threads: Ids of all others. A thread of gloo may not have its name yet.
        threads: Threads that Python knows.
        process_groups: Names and descriptions of the communicators that torch.distributed knows;
            they are not held by this object.
    """

    gloo_threads: frozenset[int]
    other_threads: frozenset[int]
    threads: frozenset[threading.Thread]
    process_groups: frozenset[tuple[str, str]]

    @classmethod
    def now(cls) -> Living:
        """Count. Local; nothing is collected, connected or ended."""
        names = dist.distributed_c10d._world.pg_names if dist.is_available() else {}
        groups = frozenset((name, group.group_desc) for group, name in names.items())
        return cls(*_threads_of_the_system(), frozenset(threading.enumerate()), groups)

    @property
    def names_of_groups(self) -> frozenset[str]:
        """Under which torch.distributed knows the communicators."""
        return frozenset(name for name, _ in self.process_groups)

    def beyond(self, before: Living) -> list[str]:
        """What there is now and was not there before, in words; empty if nothing."""
        found = []
        if gloo := self.gloo_threads - before.gloo_threads - before.other_threads:
            found.append(f"{len(gloo)} threads of gloo communicators")
        found += sorted(f"the thread {t.name!r}" for t in self.threads - before.threads)
        found += sorted(
            f"the process group {description or name!r}"
            for name, description in self.process_groups - before.process_groups
        )
        return found


def left_behind(before: Living, *, within_s: float | None = None) -> list[str]:
    """What is there now and was not before, although it had the chance to go. Local.

    Nothing is collected where nothing is left, so the check is cheap in the usual case.

    Args:
        before: The count that was taken before.
        within_s: Time that threads may take to end, in seconds; by default a few seconds, and
            more where the machine is busy.
    """
    found = Living.now().beyond(before)
    if not found:
        return found
    end = time.monotonic() + (scaled_s(_ENDING_S) if within_s is None else within_s)
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


def _threads_of_the_system() -> tuple[frozenset[int], frozenset[int]]:
    """Ids of the threads of gloo, and of all others."""
    gloo: set[int] = set()
    others: set[int] = set()
    for task in Path("/proc/self/task").glob("*/comm"):
        # One that ends while it is looked at is gone.
        with suppress(OSError):
            (gloo if task.read_text().strip() in _GLOO else others).add(int(task.parent.name))
    return frozenset(gloo), frozenset(others)
