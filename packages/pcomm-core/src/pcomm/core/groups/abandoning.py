"""Leaving communicators behind when ranks are gone: those of gloo, and those of NCCL by an abort.

Gloo's operations end when its connections are shut down. Those of NCCL are kernels that wait on the
device for a rank that never comes; `ProcessGroup.abort` alone ends them, and then the device is
free for the next generation. `shutdown`, which `destroy_process_group` calls, waits for them.

What torch's sources say (`ProcessGroupNCCL.hpp` of 2.13, and its `.cpp`), and what follows here:

- An abort of one communicator may wait for the kernels of the others on this device, since it frees
  memory there, and with some versions of NCCL for the other ranks' aborts of the same communicator
  (pytorch/pytorch#119797). So all aborts of a rank begin before any is waited for, one thread each,
  and then no order of ranks or communicators can hang. Torch's own `_abort_process_group` calls one
  after the other between `ncclGroupStart` and `ncclGroupEnd`, which count for one thread, while
  each `abort` works on another.
- `abort` waits for that thread with the time limit of the group, and again in the destructor of its
  future, without one. So the limit here is one of its own.
- After it the watchdog of a group only looks whether what was queued has ended, which it has.
- Before it, the watchdog ends the process where the environment says so: see `outlive_failures`.
- `torch.distributed.shrink_group` would keep the communicators of the ranks that are left. It is
  not used (`docs/decisions/0031-new-communicators-after-a-failure.md`): most groups change their
  members in other ways, it needs a communicator that was not aborted, and may not return.

None of this has run on hardware yet: `tests/gpu/test_abandon_on_nccl.py`.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence

import torch.distributed as dist
from torch.distributed import distributed_c10d

from pcomm.core.control.without_control import end_if_unused
from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.core.groups.communicators import Abort, communicator_of

__all__ = [
    "AbortOnFailure",
    "abandon_communicators",
    "abort_communicator",
    "begin_aborts",
    "is_abortable",
    "never_freed",
    "outlive_failures",
]


# For all aborts of a rank together; one takes well below a second where it works.
_ABORT_S = 60.0


def abandon_communicators(process_groups: list[dist.ProcessGroup]) -> None:
    """Refuse their operations and leave them behind, operations in flight included. Local.

    Torch forgets them, as `destroy_process_group` does, so that torch's end of the default group
    does not meet them. The destructor of one waits for operations in flight. Those of gloo end when
    its connections are shut down, those of NCCL by an abort, and then a thread runs the destructor;
    where neither is possible, it never runs.

    Args:
        process_groups: Groups of `new_communicator`; all that are to be left, in one call. The list
            is emptied, so that a thread has the last reference to each.

    Raises:
        UnsupportedError: An abort has failed, or not ended within a minute, so that kernels may
            keep the device busy; all groups are left nonetheless.
    """
    # The queue's thread ends if it has nothing to do, and is not waited for otherwise.
    _refuse(process_groups)
    begin_aborts(process_groups)
    end_s, busy = time.monotonic() + _ABORT_S, list[str]()
    while process_groups:
        busy += _leave(process_groups.pop(0), end_s)
    if busy:
        raise UnsupportedError(
            "Groups.abandon",
            found="; ".join(busy),
            why="Their kernels may keep the device busy, which the next groups need.",
            fix="End this process, which frees the device; a new one takes its place.",
        )


def _refuse(process_groups: Iterable[dist.ProcessGroup]) -> None:
    for one in process_groups:
        communicator_of(one).abandon()


def is_abortable(process_group: dist.ProcessGroup) -> bool:
    """Whether only an abort ends operations in flight: those of NCCL. Local."""
    is_known = process_group in distributed_c10d._world.pg_map
    return is_known and "nccl" in dist.get_backend(process_group)


def begin_aborts(process_groups: Iterable[dist.ProcessGroup]) -> None:
    """Begin the aborts of those that have one, all at the same time, each once. Local.

    It waits for none of them. What was queued on the device ends, with any numbers as the result.
    """
    for one in process_groups:
        communicator = communicator_of(one)
        if communicator.abort is None and is_abortable(one):
            communicator.abort = Abort(one)


def abort_communicator(process_group: dist.ProcessGroup) -> None:
    """Abort a communicator of NCCL, so that ending it waits for no operation. Local.

    Others are left as they are. It waits a minute at most; a failure of the abort is not told,
    since the caller has an error already.

    Args:
        process_group: Group that is ended next, such as torch's default group.
    """
    if is_abortable(process_group):
        Abort(process_group).problem(time.monotonic() + _ABORT_S)


def _leave(process_group: dist.ProcessGroup, end_s: float) -> list[str]:
    """Have torch forget a group, and free it on a thread; what keeps the device busy, in words."""
    communicator = communicator_of(process_group)
    _forget(process_group)
    problem = None if communicator.abort is None else communicator.abort.problem(end_s)
    is_ended = communicator.connections if communicator.abort is None else problem is None
    if not is_ended:
        never_freed([process_group, communicator])
        return [] if problem is None else [f"{process_group.group_desc!r}: {problem}"]
    communicator.connections.shut_down()
    # The thread has the last reference, unless the caller keeps one.
    held = [process_group]
    del process_group
    threading.Thread(target=held.clear, name="pcomm freeing", daemon=True).start()
    return []


def _forget(process_group: dist.ProcessGroup) -> None:
    """Have torch forget a group that it still knows, without ending it."""
    world = distributed_c10d._world
    if process_group not in world.pg_map:
        return
    tag = world.pg_to_tag.pop(process_group, None)
    for table in (
        world.pg_map,
        world.pg_names,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.pg_coalesce_state,
    ):
        table.pop(process_group, None)
    # Under its own tag, and under none where torch has chosen that tag.
    for tagged in (tag or "", ""):
        if process_group in world.tags_to_pg.get(tagged, []):
            world.tags_to_pg[tagged].remove(process_group)
    distributed_c10d._unregister_process_group(process_group.group_name)
    end_if_unused()


def never_freed(objects: Iterable[object]) -> None:
    """Keep objects until the process ends, and never run their destructors. Local.

    A list of this module would be emptied when the interpreter ends, and a destructor that waits
    for a rank that is gone would keep the process from ending.

    Args:
        objects: Objects to keep, with all that they refer to.
    """
    for found in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(found))


_LOOK_S = 0.01


class AbortOnFailure:
    """A thread that aborts communicators once a rank has failed. Local.

    So a host that has queued operations need not look at each: what it waits for on the device
    ends, and its next call of these communicators raises.

    Args:
        process_groups: Communicators to abort.
        failure: Function called every few milliseconds, on the thread; the message of a rank that
            failed, or None. It returns the message for good before anything is aborted.
    """

    def __init__(
        self, process_groups: Sequence[dist.ProcessGroup], failure: Callable[[], str | None]
    ) -> None:
        self._process_groups, self._failure = list(process_groups), failure
        self._stop = threading.Event()
        threading.Thread(target=self._run, name="pcomm looks for failures", daemon=True).start()

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_S):
            if self._failure() is not None:
                begin_aborts(self._process_groups)
                break
        self._process_groups.clear()

    def close(self) -> None:
        """Look no more; what has begun goes on."""
        self._stop.set()


# What a rank needs that outlives others, by name, and what another value does.
_SETTINGS: Mapping[str, tuple[str, str]] = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("0", "its watchdog ends the process after an error"),
    "TORCH_NCCL_ENABLE_MONITORING": ("0", "its monitor ends the process of a slow watchdog"),
    "TORCH_NCCL_DUMP_ON_TIMEOUT": ("0", "an error of one rank makes the monitors of all end"),
    "TORCH_NCCL_BLOCKING_WAIT": ("0", "each wait keeps the host until the device is through"),
    "TORCH_NCCL_DESYNC_DEBUG": ("0", "it turns the handling of errors on again"),
}
_OLDER = {name: name.removeprefix("TORCH_") for name in _SETTINGS}
_WORDS = {"n": "0", "no": "0", "f": "0", "false": "0"}


def outlive_failures(environ: MutableMapping[str, str] = os.environ) -> None:
    """Have torch's watchdogs leave this process alone when an operation of NCCL fails. Local.

    Torch reads these variables when it makes a communicator, so those made before keep what they
    had. What is not set is set.

    Args:
        environ: Environment variables.

    Raises:
        ConfigError: One is set to a value with which a failure of another rank ends this process;
            nothing is set then.
    """
    wrong = [
        f"{name}={environ[name]}: {what}"
        for current, (wanted, what) in _SETTINGS.items()
        for name in (current, _OLDER[current])
        if name in environ and _WORDS.get(environ[name].lower(), environ[name]) != wanted
    ]
    if environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        wrong.append("TORCH_DISTRIBUTED_DEBUG=DETAIL: it turns the handling of errors on again")
    if wrong:
        raise ConfigError(
            "the environment of ranks that outlive others on NCCL",
            found="; ".join(wrong),
            why="Operations that a rank which died leaves open are ended here by an abort, and "
            "torch would end the process before or meanwhile.",
            fix="Unset them; they are set as needed.",
        )
    for name, (wanted, _) in _SETTINGS.items():
        environ.setdefault(name, wanted)
