"""Checkpoints are written while training goes on, and never hold a NaN."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from concurrent.futures import Future as ThreadFuture
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from pcomm.core import Group, PcommError
from pcomm.core.checkpoint import ShardSavePlanner, ShardView
from pcomm.core.errors import ConfigError
from pcomm.integration.checkpoint.folders import HashingFileSystem, commit, newest, partial_folder

__all__ = ["NotFiniteError", "Saver", "is_finite"]


class Saver:
    """Writes checkpoints of one run, one at a time; a context manager that ends the last one.

    Args:
        run_dir: The run's folder.
        group: All ranks, with a communicator of its own: the ranks talk while training does.
        keep: Number of newest checkpoints that stay; None keeps all.
        keep_best: True if the one with the fewest `bits_per_byte` in its state stays, too.
        is_asynchronous: True to return from `save` once the tensors are copied.
    """

    def __init__(
        self,
        run_dir: Path,
        group: Group,
        *,
        keep: int | None,
        keep_best: bool = False,
        is_asynchronous: bool,
    ) -> None:
        self._run_dir, self._group = run_dir, group
        self._kept: dict[str, Any] = {"keep": keep, "keep_best": keep_best}
        self._is_asynchronous = is_asynchronous
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._running: ThreadFuture[None] | None = None

    def save(self, step: int, views: Mapping[str, ShardView], state: dict[str, Any]) -> None:
        """Write a checkpoint. Collective: every rank calls it with the same step and names.

        Waits for the one before, copies the tensors, and writes the copies.

        Args:
            step: Optimizer steps that have been done.
            views: This rank's tensors, by name. With a number among them that is not finite the
                checkpoint is not made, and those before it stay.
            state: Values to save beside them, as JSON; those of the first rank count.

        Raises:
            ConfigError: The error of `wait`, about the checkpoint before.
        """
        self.wait()
        copies = {name: view.clone() for name, view in views.items()}
        self._running = self._thread.submit(self._write, step, copies, state)
        if not self._is_asynchronous:
            self.wait()

    def wait(self) -> None:
        """Until the checkpoint that is being written, if any, is whole.

        Raises:
            ConfigError: On every rank, if one of them could not write its files; the checkpoint
                is then not there.
            NotFiniteError: On every rank, if a tensor of one of them holds NaN or infinity.
        """
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

    def _write(self, step: int, views: dict[str, ShardView], state: dict[str, Any]) -> None:
        planner = _FinitePlanner(partial_folder(self._run_dir, step))
        writer = _Writer(partial_folder(self._run_dir, step), {"step": step, **state}, self._kept)
        try:
            with warnings.catch_warnings():
                # One process saves without torch.distributed, which torch warns about each time.
                warnings.simplefilter("ignore", UserWarning)
                dcp.save(
                    dict(views),
                    storage_writer=writer,
                    planner=planner,
                    process_group=self._group.process_group,
                    no_dist=self._group.is_identity,
                )
        except CheckpointException as failed:
            rank = min(failed.failures)
            error = failed.failures[rank][0]
            if isinstance(error, NotFiniteError):
                raise error from failed
            # A full disk is told in our words; anything else is our mistake, with its traceback.
            if not isinstance(error, OSError):
                raise
            raise ConfigError(
                f"checkpoint of step {step} in {self._run_dir}",
                found=f"rank {rank}: {type(error).__name__}: {error}",
                why="Every rank writes its part, and without one of them the rest is of no use.",
                fix="Make room there, or choose another --out; the same command goes on from "
                "the checkpoint before.",
            ) from failed


@dataclass(frozen=True)
class _FileResult(WriteResult):
    """What was written where, with the digest of the file; the first rank gets those of all."""

    digest: str


class _Writer(FileSystemWriter):
    """Writes into a partial folder, and names it when all ranks have written.

    torch calls `finish` on the first rank and tells every rank how it ended; so when the save
    returns, on any rank, the checkpoint is whole, and if it cannot get its name they all know.
    """

    def __init__(self, partial: Path, state: dict[str, Any], kept: dict[str, Any]) -> None:
        super().__init__(partial, sync_files=True)
        self.fs = self._hashing = HashingFileSystem()
        self._partial, self._state, self._kept = partial, state, kept

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            written = super().write_data(plan, planner).wait()
        except Exception as error:
            # A full disk, by its name.
            raise self._hashing.error or error from error
        results: list[WriteResult] = []
        for result in written:
            name = result.storage_data.relative_path
            digest = self._hashing.digests[name]
            results.append(
                _FileResult(result.index, result.size_in_bytes, result.storage_data, digest)
            )
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        digests = {".metadata": self._hashing.digests[".metadata.tmp"]}
        for of_rank in results:
            for result in of_rank:
                assert isinstance(result, _FileResult)
                digests[result.storage_data.relative_path] = result.digest
        commit(self._partial, self._state, digests, **self._kept)


class _FinitePlanner(ShardSavePlanner):
    """Refuses to save what is not finite; torch tells all ranks before any of them writes."""

    def __init__(self, partial: Path) -> None:
        super().__init__()
        self._partial = partial

    def create_local_plan(self) -> SavePlan:
        for name, view in self.state_dict.items():
            if not is_finite(view.tensor):
                good = newest(self._partial.parent.parent)
                raise NotFiniteError(
                    f"checkpoint {self._partial.stem}",
                    found=f"NaN or infinity in {name}",
                    why="A checkpoint with it would in time take the place of the good ones.",
                    fix="Lower train.learning_rate; the same command goes on "
                    + (f"from {good.folder}, which is good." if good else "from the beginning."),
                )
        return super().create_local_plan()


class NotFiniteError(PcommError, ArithmeticError):
    """A loss, a gradient or a weight is NaN or infinite, so the run would train on nothing."""


def is_finite(tensor: Tensor) -> bool:
    """Whether every element is a finite number. Local; waits for the tensor's device."""
    # A gradient of a sharded model is asked about this rank's part, which is meant here.
    tensor = tensor.as_subclass(Tensor)
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    # A sum needs no memory, and is finite only where all its terms are; it may itself overflow.
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())
