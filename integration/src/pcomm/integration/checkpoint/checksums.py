"""Checksums of a checkpoint's files: computed while they are written, compared before reading."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pcomm.core.errors import ConfigError
from pcomm.integration.checkpoint.folders import CHECKSUMS, Checkpoint, checkpoints
from pcomm.integration.checkpoint.hashing import new_hash

__all__ = ["check_files"]

_log = logging.getLogger("pcomm.train")

# Hashing is as fast as a core, and files are hashed side by side.
_MAX_THREADS = 8


def check_files(checkpoint: Checkpoint, *, rank: int = 0, size: int = 1) -> None:
    """Compare files of a checkpoint with the checksums that were written beside them. Local.

    Reads the whole files. The ranks of a run share them: each calls it with its place, and the
    verdict of all counts.

    Args:
        checkpoint: A whole one.
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
    """File name to digest; None for a checkpoint of a version that wrote none."""
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
