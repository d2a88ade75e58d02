"""Where checkpoints lie in a run's folder, and which of them are whole.

A checkpoint is written under a name that ends in `.partial` and renamed when every rank has
written its part, and loses its name again before it is removed; a rename happens or does not. So
what has its final name is whole, whenever a process died.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pcomm.core.errors import ConfigError
from pcomm.integration.checkpoint.hashing import new_hash

__all__ = [
    "CHECKSUMS",
    "Checkpoint",
    "checkpoints",
    "commit",
    "discard",
    "newest",
    "partial_folder",
    "remove_partial",
]

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


def partial_folder(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of `step` is written before it is whole."""
    return _parent(run_dir) / f"step-{step:08d}{_PARTIAL}"


def commit(
    partial: Path, state: dict[str, Any], digests: Mapping[str, str], *, keep: int | None
) -> Checkpoint:
    """Give a written checkpoint its final name, then remove the oldest ones. On one rank.

    Args:
        partial: The folder, in which every rank has written and synced its part.
        state: Values to save beside the tensors, as JSON.
        digests: Digest of every file in the folder, by name; see `checksums`.
        keep: Number of newest checkpoints that stay; None keeps all.
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
    for old in checkpoints(run_dir)[:-keep] if keep else []:
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
