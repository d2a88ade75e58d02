"""Whether this run may use this folder, one run at a time."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

from pcomm.core.errors import ConfigError
from pcomm.core.process import World
from pcomm.integration.checkpoint.folders import checkpoints, discard, newest, remove_partial
from pcomm.integration.checkpoint.state import check_index, check_same_run, identity_of
from pcomm.integration.config.sections import Config
from pcomm.integration.config.toml import to_toml
from pcomm.integration.data.preparation import build_beside
from pcomm.integration.files import atomic_write
from pcomm.integration.huggingface.directory import CONFIG
from pcomm.integration.huggingface.model_from import forget_directory, placed_files
from pcomm.integration.train.samples import SAMPLES

__all__ = [
    "check_resumable",
    "check_shared",
    "hold_folder",
    "lock_run",
    "prepare_folder",
    "share_folder",
    "write_config",
    "write_holder",
]

_log = logging.getLogger("pcomm.train")


def check_resumable(config: Config, run_dir: Path, corpus: str | None = None) -> None:
    """Refuse a folder, or a checkpoint in it, that this run cannot go on from. Local.

    Args:
        config: The validated configuration.
        run_dir: The run's folder, which need not exist.
        corpus: Fingerprint of the tokenised text; None to check the rest before there is one.

    Raises:
        ConfigError: The folder is a Hugging Face directory; or the newest checkpoint is damaged, of
            another model or other batches, or of a longer run.
    """
    if (run_dir / CONFIG).is_file():
        raise ConfigError(
            f"train: folder {run_dir}",
            found=f"{CONFIG} of a Hugging Face directory",
            why="With checkpoints of a run beside it nothing would say which weights are meant.",
            fix="Give --out a folder of its own, and start from the weights here with "
            "`pcomm convert` or model.from.",
        )
    checkpoint = newest(run_dir)
    if checkpoint is None:
        return
    check_same_run(checkpoint, identity_of(config, corpus))
    check_index(checkpoint)
    if checkpoint.step > config.train.steps:
        raise ConfigError(
            f"train.steps = {config.train.steps}",
            found=f"a checkpoint after step {checkpoint.step} in {run_dir}",
            why="The run is already longer than it should become.",
            fix=f"Set train.steps to at least {checkpoint.step}, or start over with --restart.",
        )


@contextmanager
def hold_folder(run_dir: Path) -> Iterator[None]:
    """Make the folder and keep other runs out of it; see `lock_run`. On one rank.

    Raises:
        ConfigError: Another run is under way there, or the folder cannot be written.
    """
    with ExitStack() as held:
        try:
            held.enter_context(lock_run(run_dir))
        except OSError as error:
            raise _unwritable(run_dir, error) from error
        yield


def prepare_folder(
    config: Config, run_dir: Path, *, must_restart: bool, shares: bool = True
) -> None:
    """Make an orderly folder with tokenised text in it. On one rank.

    A run that is refused changes nothing there: what a checkpoint demands is compared first, new
    tokens are built beside the old, and only then anything is replaced or removed.

    Args:
        config: The validated configuration; its `data` says which text.
        run_dir: Folder of the run, which is made if it is absent.
        must_restart: True to remove the checkpoints and metrics that are there.
        shares: False keeps no tokens for other runs; see `build_beside`.

    Raises:
        PcommError: The folder cannot be written, the text not be used, or the text is not the one
            that the newest checkpoint has learnt; see `build_beside`.
    """
    # The weights of a run that goes on mean nothing under another tokenizer.
    kept = None if must_restart else newest(run_dir)

    def check(fingerprint: str) -> None:
        assert kept is not None, "only a kept tokenizer tells the fingerprint before"
        check_same_run(kept, identity_of(config, fingerprint))

    is_placed = kept is None and bool(config.model.from_)
    placed = placed_files(Path(config.model.from_), run_dir) if is_placed else nullcontext()
    try:
        with placed:
            built = build_beside(
                config.data,
                run_dir,
                keep_tokenizer=is_placed or kept is not None,
                check=None if kept is None else check,
                shares=shares,
            )
        run_dir.mkdir(parents=True, exist_ok=True)
        for folder in remove_partial(run_dir):
            _log.warning("removed %s, which a run that died left half done", folder)
        if must_restart:
            _remove_results(run_dir)
        if not config.model.from_:
            forget_directory(run_dir)
        if built is not None:
            built.take_place()
    except OSError as error:
        raise _unwritable(run_dir, error) from error


def write_config(config: Config, run_dir: Path) -> None:
    """Write `config.toml`, whole or not at all. On one rank.

    Args:
        config: The configuration as the user wrote it: with `parallel.dp = "auto"` it fits other
            numbers of ranks, too.
        run_dir: Folder of the run, which exists.

    Raises:
        ConfigError: The folder cannot be written.
    """
    try:
        with atomic_write(run_dir / "config.toml") as file:
            file.write(to_toml(config).encode())
    except OSError as error:
        raise _unwritable(run_dir, error) from error


def _remove_results(run_dir: Path) -> None:
    """Remove what training wrote; the tokenised text stays, which other seeds would share."""
    for checkpoint in checkpoints(run_dir):
        discard(checkpoint.folder)
    for folder in ("tensorboard", "wandb", "profile"):
        shutil.rmtree(run_dir / folder, ignore_errors=True)
    for file in ("metrics.jsonl", "loss.png", SAMPLES):
        (run_dir / file).unlink(missing_ok=True)


def _unwritable(run_dir: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"train: folder {run_dir}",
        found=str(error),
        why="The run's tokens, checkpoints and metrics are written there.",
        fix="Choose a folder that can be written, with --out.",
    )


_HOLDER = "pcomm/holder of the run's folder"


def write_holder(run_dir: Path, world: World) -> None:
    """Tell the other ranks who holds the folder. On the rank that does."""
    if world.store is not None:
        world.store.set(_HOLDER, holder_of(run_dir))


def check_shared(run_dir: Path, world: World) -> None:
    """Refuse a folder that is not the one which the first rank holds. Local, after `write_holder`.

    Raises:
        ConfigError: Another folder has that name on this host.
    """
    if world.rank and world.store is not None:
        holder, here = world.store.get(_HOLDER).decode(), holder_of(run_dir)
        if here != holder:
            raise ConfigError(
                f"train: folder {run_dir}",
                found=f"rank {world.rank} on {socket.gethostname()} does not see there what rank 0 "
                f"has written: {holder}",
                why="All ranks read tokens and write checkpoints in one folder.",
                fix="Give --out a folder on a file system that all hosts share, such as NFS or "
                "Lustre, by a path that is the same on all of them.",
            )


_NAME = ".lock"
_RETRY_S = 0.2


@contextmanager
def lock_run(run_dir: Path) -> Iterator[None]:
    """Keep other runs out of a folder, which is made if absent. Local; on one rank of the run.

    The operating system holds the lock, and gives it back when the process ends in any way; a file
    that a dead process has left is no obstacle.

    Raises:
        ConfigError: Another run has it; names its process and host.
        OSError: The folder cannot be written.
    """
    is_new = not run_dir.exists()
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
        if is_new:
            # A run that was refused has written nothing into it.
            with suppress(OSError):
                run_dir.rmdir()
        os.close(descriptor)


@contextmanager
def share_folder(
    run_dir: Path, job: str, *, is_first: bool, patience_s: float = 0.0
) -> Iterator[None]:
    """Keep other runs out of a folder that all ranks of a job hold together. Local.

    Ranks come and go; the folder is free when none of them is left.

    Args:
        run_dir: Folder of the run.
        job: Word of the job, the same on all of its ranks, and of no other.
        is_first: True for the rank that prepares the folder, before the others come.
        patience_s: Seconds to wait for ranks of another job, which may be about to end.

    Raises:
        ConfigError: A run or the ranks of another job are under way there; or, on a later rank,
            the folder is not the one that the first has prepared, or cannot be written.
    """
    path, end_s = run_dir / _NAME, time.monotonic() + patience_s
    while True:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            descriptor = _acquire(path, fcntl.LOCK_SH)
            if _holds_for(descriptor, job, path, may_write=is_first):
                break
            holder = os.pread(descriptor, 1000, 0)
            os.close(descriptor)
            refused = _locked(path, holder) if is_first else _not_shared(run_dir, holder)
        except ConfigError as error:
            refused = error
        except OSError as error:
            raise _unwritable(run_dir, error) from error
        if time.monotonic() >= end_s:
            raise refused
        time.sleep(_RETRY_S)
    try:
        yield
    finally:
        # The last one takes the name away; the others still hold it.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        os.close(descriptor)


def _holds_for(descriptor: int, job: str, path: Path, *, may_write: bool) -> bool:
    """Whether the file that is held says the word of a job; writes it where none holds another."""
    if _job_of(os.pread(descriptor, 1000, 0)) == job:
        return True
    if not may_write:
        return False
    try:
        _lock(descriptor, path, fcntl.LOCK_EX)
    except OSError:
        return False
    holder = {"job": job, "pid": os.getpid(), "host": socket.gethostname()}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(holder).encode(), 0)
    os.fsync(descriptor)
    _lock(descriptor, path, fcntl.LOCK_SH)
    # The system may give the lock to another one in between.
    return _has_name(descriptor, path) and _job_of(os.pread(descriptor, 1000, 0)) == job


def _job_of(holder: bytes) -> str:
    try:
        return str(json.loads(holder).get("job", ""))
    except (ValueError, AttributeError):
        return ""


def _not_shared(run_dir: Path, holder: bytes) -> ConfigError:
    return ConfigError(
        f"train: folder {run_dir}",
        found=f"{socket.gethostname()} does not see there what the first rank has written, but "
        + (holder.decode(errors="replace") or "nothing"),
        why="All ranks read tokens and write checkpoints in one folder.",
        fix="Give --out a folder on a file system that all hosts share, such as NFS or Lustre, by "
        "a path that is the same on all of them.",
    )


def holder_of(run_dir: Path) -> str:
    """What the process that holds the folder says of itself; empty if none does. Local."""
    try:
        return (run_dir / _NAME).read_text(encoding="utf-8")
    except OSError:
        return ""


def _acquire(path: Path, kind: int = fcntl.LOCK_EX) -> int:
    """A descriptor of the locked file that has the name now."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _lock(descriptor, path, kind)
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


def _lock(descriptor: int, path: Path, kind: int) -> None:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
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
