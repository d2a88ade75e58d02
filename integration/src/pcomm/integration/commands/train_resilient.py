"""`pcomm train --resilient`: ranks that may die, started by any launcher, or by one of our own."""

from __future__ import annotations

import importlib
import json
import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pcomm.core import environment
from pcomm.core.errors import (
    ConfigError,
    FencedError,
    PcommError,
    PeerError,
    PeerTimeoutError,
    TopologyError,
)
from pcomm.core.face import version_of
from pcomm.core.process import logs

if TYPE_CHECKING:
    from pcomm.core.process import RankPlace, RankReport
    from pcomm.integration.config.sections import Config, Dtype
    from pcomm.integration.train.loop import Outcome
    from pcomm.ntp.job import JobLimits

__all__ = [
    "OF_EVERY_RANK",
    "exit_code_of",
    "launch_resilient",
    "outcome_of",
    "prepare_launch",
    "resilient_rank",
]

_log = logging.getLogger("pcomm.train")

# What a rank imports late. Its optimizer asks for Dynamo.
OF_EVERY_RANK = ("pcomm.integration.train.resilient", "torch._dynamo")
_INVALID = 2
# A file on a network file system is seen late.
_SEEN_S = 10.0


def exit_code_of(error: PcommError) -> int:
    """The exit code of a rank that ends with an error; its launcher may restart it by that. Local.

    Returns:
        75 where the same command goes on: the store is gone, the others have gone on, or too few
        ranks are left. Else 2.
    """
    from pcomm.ntp import StateLostError
    from pcomm.ntp.job import TRY_AGAIN

    go_on = PeerError | PeerTimeoutError | FencedError | TopologyError | StateLostError
    return TRY_AGAIN if isinstance(error, go_on) else _INVALID


def resilient_rank(
    place: RankPlace,
    config: Config,
    run_dir: Path,
    output: logs.LogOutput | None = None,
    limits: JobLimits | None = None,
) -> Outcome | None:
    """One rank of a resilient run, whoever has started its process; returns when the run ends.

    It returns None for a spare, or a rank that came back, whose run has ended without it.

    The first rank that comes prepares the text, and the others wait for it in the store.

    Args:
        place: Place of this rank in the job.
        config: The configuration as the user wrote it, the same on all ranks.
        run_dir: Folder of the run, which all ranks share.
        output: Form and file of its messages; None for text on stderr.
        limits: Patience with the launcher; None for the usual one.

    Raises:
        PcommError: The run cannot begin or go on; `exit_code_of` says whether to start again.
    """
    # Imported late: mistakes in the configuration are found without torch.
    from pcomm.integration.config.rules import validate_resilient
    from pcomm.integration.train.loop import Outcome
    from pcomm.integration.train.run_folder import share_folder
    from pcomm.ntp.job import enter_job

    logs.configure(environment.log_level(), place.rank, size=place.size, output=output)
    # Before anything is waited for, and each rank by itself: all have the same.
    validate_resilient(config, place.size)
    facts = _facts(config, run_dir, place.size)
    with enter_job(place, facts, limits) as job, ExitStack() as held:
        if job.finished is not None:
            _log.warning("the run was done before this process of rank %d began", place.rank)
            return Outcome(**json.loads(job.finished))
        prepare = partial(_prepare, config, run_dir, place.size, job.word, held)
        chosen = json.loads(job.once("the folder", prepare))["dtype"]
        held.enter_context(share_folder(run_dir, job.word, is_first=False, patience_s=_SEEN_S))
        resolved = validate_resilient(_with_dtype(config, chosen), place.size)
        # The others wait for a rank from the moment that it joins.
        for name in OF_EVERY_RANK:
            importlib.import_module(name)
        from pcomm.integration.train.resilient import ResilientRun

        _log.warning("rank %d of %d is process %d", place.rank, place.size, os.getpid())
        stream = logs.progress_stream(output)
        outcome = ResilientRun(job.enter(), resolved, run_dir, stream).go()
        if outcome is None:
            return None
        if outcome.is_interrupted:
            job.stop()
        else:
            job.finish(json.dumps(asdict(outcome)))
        return outcome


def _with_dtype(config: Config, dtype: Dtype) -> Config:
    return replace(config, train=replace(config.train, dtype=dtype))


def _facts(config: Config, run_dir: Path, size: int) -> Mapping[str, str]:
    """What the job of a store is; the keys of a configuration by their names."""
    from pcomm.integration.config.toml import to_dict

    keys = {
        f"{section}.{key}": json.dumps(value)
        for section, values in to_dict(config).items()
        for key, value in values.items()
    }
    versions = {f"the version of {name}": version_of(name) for name in ("pcomm-core", "torch")}
    own = {"--out": str(run_dir.resolve()), "the number of ranks": str(size)}
    return {**own, **versions, **keys}


def _prepare(config: Config, run_dir: Path, size: int, job: str, held: ExitStack) -> str:
    """Check what may go on in the folder, and make its tokens. One rank calls it; the others wait.

    Args:
        config: The configuration as the user wrote it.
        run_dir: Folder of the run; made if absent.
        size: Number of ranks.
        job: Word of the job.
        held: Stack that keeps the lock of the folder until this rank ends.

    Returns:
        What was chosen, for the other ranks.
    """
    import torch

    from pcomm.integration.checkpoint.folders import check_files, newest
    from pcomm.integration.config.rules import validate_resilient
    from pcomm.integration.precision import tell_device
    from pcomm.integration.train.run_folder import (
        check_resumable,
        prepare_folder,
        share_folder,
        write_config,
    )
    from pcomm.integration.train.run_state import chosen_dtype
    from pcomm.integration.train.trainer import check_batch_memory, largest_memory

    device = torch.device("cpu")
    dtype, why = chosen_dtype(config, run_dir, device, is_new=False)
    resolved = validate_resilient(_with_dtype(config, dtype), size)
    check_batch_memory(resolved, largest_memory(device))
    check_resumable(resolved, run_dir)
    if (checkpoint := newest(run_dir)) is not None:
        check_files(checkpoint)
    # Ranks of a job whose store is gone end within this time.
    patience_s = environment.timeout_s()
    held.enter_context(share_folder(run_dir, job, is_first=True, patience_s=patience_s))
    tell_device(dtype, why, size, device, rank=0)
    prepare_folder(resolved, run_dir, must_restart=False)
    write_config(config, run_dir)
    return json.dumps({"dtype": dtype})


def launch_resilient(
    config: Config,
    run_dir: Path,
    ranks: int,
    *,
    must_restart: bool,
    output: logs.LogOutput | None = None,
) -> Outcome:
    """A launcher of our own: keep a store, and start all ranks on this machine, each of them once.

    The run ends with the store, also where ranks that came back would go on.

    Args:
        config: The configuration as the user wrote it.
        run_dir: Folder of the run; made if absent.
        ranks: Number of ranks that are started, spare ones included.
        must_restart: True to remove the checkpoints and metrics that are there.
        output: Form and file of the ranks' messages; None for text on stderr.

    Raises:
        PcommError: The run cannot begin, or no rank has come to its end.
    """
    prepare_launch(config, run_dir, ranks, must_restart=must_restart)
    # Imported late: mistakes in the configuration are found without torch.
    from pcomm.core.process import ResilientRanks
    from pcomm.integration.metrics.picture import draw_loss

    threads = max(1, (os.cpu_count() or 1) // ranks)
    with ResilientRanks(
        ranks, threads=threads, preload=OF_EVERY_RANK, imports_main=False
    ) as processes:
        _log.warning(
            "a rank R that has died comes back by the same command with: --store %s --rank R",
            processes.place(0).address,
        )
        processes.start(resilient_rank, (config, run_dir, output))
        outcome = outcome_of(processes.wait(), run_dir)
    draw_loss(run_dir)
    return outcome


def prepare_launch(config: Config, run_dir: Path, ranks: int, *, must_restart: bool) -> None:
    """Refuse what cannot run, and begin the folder anew if that is asked. On a launcher.

    Args:
        config: The configuration as the user wrote it.
        run_dir: Folder of the run; made if absent.
        ranks: Number of ranks, spare ones included.
        must_restart: True to remove the checkpoints and metrics that are there.

    Raises:
        PcommError: The run cannot begin.
    """
    from pcomm.integration.config.rules import validate_resilient

    resolved = validate_resilient(config, ranks)
    # Imported late: mistakes in the configuration are found without torch.
    import torch

    from pcomm.integration.train.run_folder import hold_folder, prepare_folder
    from pcomm.integration.train.trainer import check_batch_memory, largest_memory

    check_batch_memory(resolved, largest_memory(torch.device("cpu")))
    if must_restart:
        # Once, and not by each rank that is started.
        with hold_folder(run_dir):
            prepare_folder(resolved, run_dir, must_restart=True)


def outcome_of(reports: dict[int, RankReport], run_dir: Path) -> Outcome:
    """The outcome of a rank that came to the end, or the error of one that did not."""
    for rank, report in sorted(reports.items()):
        if not report.has_finished:
            _log.warning("rank %d: %s", rank, report.reason)
    # Not of spares that no place was free for.
    outcomes: list[Outcome] = [own.result for own in reports.values() if own.result is not None]
    if outcomes:
        return outcomes[0]
    for report in reports.values():
        error = report.error
        # What a disk or a network refused is told below: where it was met explains nothing.
        if isinstance(error, PcommError) or not (error is None or isinstance(error, OSError)):
            raise error
    raise ConfigError(
        "pcomm train --resilient",
        found="; ".join(f"rank {rank}: {r.reason}" for rank, r in sorted(reports.items())),
        why="No rank was left to go on of those that it has started, and the store ends with them.",
        fix=f"Start it again with --out {run_dir}: it goes on from the newest checkpoint.",
    )
