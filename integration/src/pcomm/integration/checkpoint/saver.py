"""Writing checkpoints while training goes on, and reading them back."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from pcomm.core.group import Group
from pcomm.integration.checkpoint.folders import Checkpoint, commit, partial_folder
from pcomm.integration.checkpoint.planners import RegionLoadPlanner, RegionSavePlanner
from pcomm.integration.checkpoint.region import Region

__all__ = ["Saver", "read"]


class Saver:
    """Writes checkpoints of one run, one at a time; a context manager that ends the last one.

    Args:
        run_dir: The run's folder.
        group: All ranks, with a communicator of its own: the ranks talk while training does.
        keep: How many checkpoints stay; 0 keeps all.
        is_asynchronous: Whether `save` returns once the tensors are copied.
    """

    def __init__(self, run_dir: Path, group: Group, *, keep: int, is_asynchronous: bool) -> None:
        self._run_dir, self._group, self._keep = run_dir, group, keep
        self._is_asynchronous = is_asynchronous
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._running: Future[None] | None = None

    def save(self, step: int, regions: Mapping[str, Region], state: dict[str, Any]) -> None:
        """Write a checkpoint. Collective: every rank calls it with the same step and names.

        Waits for the one before, copies the tensors, and writes the copies.

        Args:
            step: Optimizer steps that have been done.
            regions: This rank's tensors.
            state: What to keep beside them, as JSON; that of the first rank counts.

        Raises:
            Exception: Whatever the checkpoint before failed with.
        """
        self.wait()
        copies = {name: region.clone() for name, region in regions.items()}
        self._running = self._thread.submit(self._write, step, copies, state)
        if not self._is_asynchronous:
            self.wait()

    def wait(self) -> None:
        """Until the checkpoint that is being written, if any, is whole; raises what it failed with."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def close(self) -> None:
        """End the last checkpoint and the thread. Calling it again does nothing."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            # The other ranks may be gone; what is half written stays partial.
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _write(self, step: int, regions: dict[str, Region], state: dict[str, Any]) -> None:
        partial = partial_folder(self._run_dir, step)
        partial.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings():
            # One process saves without torch.distributed, which torch warns about each time.
            warnings.simplefilter("ignore", UserWarning)
            dcp.save(
                dict(regions),
                storage_writer=FileSystemWriter(partial, sync_files=True),
                planner=RegionSavePlanner(),
                process_group=self._group.process_group,
                no_dist=self._group.is_identity,
            )
        # The save returns once all ranks have written, so the first one may give it its name.
        if self._group.rank == 0:
            commit(partial, {"step": step, **state}, keep=self._keep)


def read(checkpoint: Checkpoint, regions: Mapping[str, Region], group: Group | None = None) -> None:
    """Fill `regions` in place from a checkpoint written by any number of ranks.

    Args:
        checkpoint: A whole one.
        regions: This rank's tensors, with the logical shapes that were saved.
        group: All ranks, which then read together; without it this process reads alone.

    Raises:
        ConfigError: A tensor is missing or has another logical shape.
    """
    alone = group is None or group.is_identity
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(
            dict(regions),
            storage_reader=FileSystemReader(checkpoint.folder),
            planner=RegionLoadPlanner(),
            process_group=None if group is None else group.process_group,
            no_dist=alone,
        )
