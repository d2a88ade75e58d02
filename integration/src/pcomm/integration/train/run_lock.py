"""One run at a time in a folder."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pcomm.core.errors import ConfigError

__all__ = ["holder_of", "lock_run"]

_log = logging.getLogger("pcomm.train")

_NAME = ".lock"


@contextmanager
def lock_run(run_dir: Path) -> Iterator[None]:
    """Keep other runs out of a folder, which is made if absent. Local; on one rank of the run.

    The operating system holds the lock, and gives it back when the process ends in any way; a file
    that a dead process has left is no obstacle.

    Raises:
        ConfigError: Another run has it; names its process and host.
        OSError: The folder cannot be written.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / _NAME
    descriptor = _acquire(path)
    try:
        holder = {"pid": os.getpid(), "host": socket.gethostname()}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder).encode(), 0)
        # Other hosts of the run look for it, also through a network file system.
        os.fsync(descriptor)
        yield
    finally:
        # Before the lock is given back: the next run would otherwise lose its name.
        path.unlink(missing_ok=True)
        os.close(descriptor)


def holder_of(run_dir: Path) -> str:
    """What the process that holds the folder says of itself; empty if none does. Local."""
    try:
        return (run_dir / _NAME).read_text(encoding="utf-8")
    except OSError:
        return ""


def _acquire(path: Path) -> int:
    """A descriptor of the locked file that has the name now."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _lock(descriptor, path)
            if _has_name(descriptor, path):
                return descriptor
        except OSError as error:
            holder = os.pread(descriptor, 1000, 0)
            os.close(descriptor)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise _locked(path, holder) from error
            raise
        # Its holder ended between our two calls, and took the name with it.
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Such as Lustre that was mounted without locks.
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK):
            raise
        _log.warning("no lock for %s (%s): see that no other run uses it", path.parent, error)


def _has_name(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _locked(path: Path, holder: bytes) -> ConfigError:
    try:
        known = json.loads(holder)
        who = f"process {known['pid']} on host {known['host']}"
    except (ValueError, TypeError, KeyError):
        who = "another process"
    return ConfigError(
        f"train: folder {path.parent}",
        found=f"a run of {who}, which is under way there",
        why="Two runs in one folder would mix their tokens, metrics and checkpoints.",
        fix="Wait for it, stop it, or choose another folder with --out.",
    )
