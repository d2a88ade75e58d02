"""Which checkpoints are whole: their folders, and the checksums of what was written."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from torch.distributed.checkpoint.filesystem import FileSystem

from pcomm.core.errors import ConfigError
from pcomm.integration.files import new_hash

__all__ = [
    "Checkpoint",
    "HashingFileSystem",
    "check_files",
    "checkpoints",
    "commit",
    "discard",
    "newest",
    "partial_folder",
    "remove_partial",
]

_log = logging.getLogger("pcomm.train")
_PARTIAL = ".partial"
_DISCARDED = ".discarded"
_STATE = "state.json"

CHECKSUMS = "checksums.json"
"""The file of a checkpoint that holds the digests of the others."""


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint.

    Args:
        step: Optimizer steps that had been done.
        folder: Folder of its files.
    """

    step: int
    folder: Path

    def state(self) -> dict[str, Any]:
        """What was saved beside the tensors.

        Raises:
            ConfigError: The file is missing or damaged, or the folder has the name of another step.
        """
        try:
            state = json.loads((self.folder / _STATE).read_text())
            if not isinstance(state, dict):
                raise ValueError(f"{state!r:.60}, which is no JSON object")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"checkpoint {self.folder}",
                found=f"{_STATE}: {error}",
                why="It says which model and how many steps the tensors belong to.",
                fix="Remove this folder to go on from the checkpoint before it.",
            ) from error
        if (step := state.get("step", self.step)) != self.step:
            raise ConfigError(
                f"checkpoint {self.folder}",
                found=f"{_STATE} of step {step!r:.20}",
                why="The folder's name says how far the run is, and so which batches, which "
                "learning rate and which part of the schedule come next.",
                fix="Give the folder back the name that it was written with, or remove it.",
            )
        return state


def checkpoints(run_dir: Path) -> list[Checkpoint]:
    """Every whole checkpoint of a run, oldest first. Local."""
    found = [
        Checkpoint(int(folder.name.removeprefix("step-")), folder)
        for folder in _parent(run_dir).glob("step-*")
        if folder.name.removeprefix("step-").isdigit() and folder.is_dir()
    ]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def newest(run_dir: Path) -> Checkpoint | None:
    """The whole checkpoint with the most steps, if there is one. Local."""
    return max(checkpoints(run_dir), key=lambda checkpoint: checkpoint.step, default=None)


def best(run_dir: Path) -> Checkpoint | None:
    """The one whose state has the fewest `bits_per_byte`, the newest of equals, if any has. Local.

    Raises:
        ConfigError: The state of one of them is damaged.
    """
    found = [(one.state().get("bits_per_byte"), one) for one in checkpoints(run_dir)]
    known = [(bits, -one.step, one) for bits, one in found if isinstance(bits, int | float)]
    return min(known, key=lambda one: one[:2])[2] if known else None


def partial_folder(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of `step` is written before it is whole."""
    return _parent(run_dir) / f"step-{step:08d}{_PARTIAL}"


def commit(
    partial: Path,
    state: dict[str, Any],
    digests: Mapping[str, str],
    *,
    keep: int | None,
    keep_best: bool = False,
) -> Checkpoint:
    """Give a written checkpoint its final name, then remove the oldest ones. On one rank.

    Args:
        partial: The folder, in which every rank has written and synced its part.
        state: Values to save beside the tensors, as JSON.
        digests: Digest of every file in the folder, by name.
        keep: Number of newest checkpoints that stay; None keeps all.
        keep_best: True if the one of `best` stays, too.
    """
    described = json.dumps(state, indent=1).encode()
    _write_synced(partial / _STATE, described)
    files = {**digests, _STATE: new_hash(described).hexdigest()}
    checksums = {"algorithm": "blake2b of 16 bytes", "files": dict(sorted(files.items()))}
    _write_synced(partial / CHECKSUMS, json.dumps(checksums, indent=1).encode())
    _sync_folder(partial)
    final = partial.with_name(partial.name.removesuffix(_PARTIAL))
    if final.exists():
        # A run that was resumed from an earlier step reaches this one again.
        discard(final)
    partial.rename(final)
    _sync_folder(final.parent)
    run_dir = final.parent.parent
    spared = best(run_dir) if keep_best else None
    for old in checkpoints(run_dir)[:-keep] if keep else []:
        if old != spared:
            discard(old.folder)
    return Checkpoint(int(final.name.removeprefix("step-")), final)


def discard(folder: Path) -> None:
    """Remove a whole checkpoint, which at no moment is there in part. On one rank."""
    nameless = folder.with_name(folder.name + _DISCARDED)
    folder.rename(nameless)
    shutil.rmtree(nameless)


def remove_partial(run_dir: Path) -> list[Path]:
    """Remove what processes that died left half written or half removed. On one rank.

    Returns:
        The folders that were removed.
    """
    parent = _parent(run_dir)
    found = sorted(f for end in (_PARTIAL, _DISCARDED) for f in parent.glob(f"step-*{end}"))
    for folder in found:
        shutil.rmtree(folder)
    return found


def _parent(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, which syncing its files does not."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class HashingFileSystem(FileSystem):
    """The local file system; knows afterwards the digest of each file that was written through it.

    A file must be written from its beginning to its end, as torch does it.
    """

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}
        """Name of a file, without its folder, to the digest of its content."""
        self.error: OSError | None = None
        """What the operating system said when a file could not be written."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open a file as torch's own class does."""
        with super().create_stream(path, mode) as stream:
            if "w" not in mode:
                yield stream
                return
            hashing = _HashingStream(cast(IO[bytes], stream))
            try:
                yield cast(io.IOBase, hashing)
            finally:
                self.error = self.error or hashing.error
            self.digests[Path(path).name] = hashing.digest()


class _HashingStream:
    """Passes on what is written to it."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._hash = stream, new_hash()
        self.error: OSError | None = None

    def write(self, content: Any) -> int:
        self._hash.update(content)
        try:
            return self._stream.write(content)
        except OSError as error:
            # torch's writer of archives replaces it by an error of its own.
            self.error = error
            raise

    def digest(self) -> str:
        return self._hash.hexdigest()

    def __getattr__(self, name: str) -> Any:
        # tell, flush, fileno and close: whatever else torch does with a file that it writes.
        if name in ("seek", "truncate", "writelines"):
            raise AttributeError(f"{name}: what is hashed is written in order")
        return getattr(self._stream, name)


# Hashing is as fast as a core, and files are hashed side by side.
_MAX_THREADS = 8


def check_files(checkpoint: Checkpoint, *, rank: int = 0, size: int = 1) -> None:
    """Compare files of a checkpoint with the checksums that were written beside them. Local.

    Reads the whole files. The ranks of a run share them: each calls it with its place, and the
    verdict of all counts.

    Args:
        checkpoint: A checkpoint that is whole.
        rank: Number of the share of the files to read, from 0.
        size: Number of shares.

    Raises:
        ConfigError: A file is missing or has other content; names it, and the newest checkpoint
            before this one whose files are as they were written.
    """
    problem = _problem(checkpoint, rank, size)
    if problem is None:
        return
    raise ConfigError(
        f"checkpoint {checkpoint.folder}",
        found=problem,
        why="The file has changed since it was written, so the weights would not be those saved.",
        fix=_way_on(checkpoint),
    )


def _problem(checkpoint: Checkpoint, rank: int, size: int) -> str | None:
    """The first file that is not as it was written, or None."""
    try:
        expected = _expected(checkpoint.folder)
    except (OSError, ValueError) as error:
        return f"{CHECKSUMS} cannot be read: {error}"
    if expected is None:
        if rank == 0:
            _log.warning("%s has no %s, so damage would go unseen", checkpoint.folder, CHECKSUMS)
        return None
    mine = sorted(expected)[rank::size]
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as threads:
        found = threads.map(lambda name: _digest(checkpoint.folder / name), mine)
        for name, digest in zip(mine, found, strict=True):
            if digest != expected[name]:
                return f"the file {name} {_difference(digest)}"
    return None


def _expected(folder: Path) -> Mapping[str, str] | None:
    """File name to digest; None without a file of them."""
    try:
        content = json.loads((folder / CHECKSUMS).read_text())
    except FileNotFoundError:
        return None
    files = content.get("files") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not all(Path(name).name == name for name in files):
        raise ValueError("no list of files")
    return files


def _digest(path: Path) -> str | OSError | ValueError:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, new_hash).hexdigest()
    # The list of names may be damaged, too: a name with a zero byte in it is a ValueError.
    except (OSError, ValueError) as error:
        return error


def _difference(digest: str | OSError | ValueError) -> str:
    if not isinstance(digest, str):
        return f"cannot be read: {type(digest).__name__}: {digest}"
    return "does not have the content that was written: its checksum differs"


def _way_on(checkpoint: Checkpoint) -> str:
    run_dir = checkpoint.folder.parent.parent
    for earlier in reversed(checkpoints(run_dir)):
        if earlier.step < checkpoint.step and _problem(earlier, 0, 1) is None:
            return (
                f"Remove {checkpoint.folder} to go on from {earlier.folder}, whose files are as "
                "they were written, or copy the file from a backup."
            )
    return (
        "Copy the file from a backup; there is no earlier checkpoint that is whole, so otherwise "
        "start over with --restart."
    )
