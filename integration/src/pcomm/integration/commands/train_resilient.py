"""`pcomm train --resilient`: a launcher that keeps the store, and ranks that may die."""

from __future__ import annotations

import importlib
import json
import logging
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pcomm.core import environment
from pcomm.core.errors import ConfigError, PcommError
from pcomm.core.process import logs

if TYPE_CHECKING:
    from pcomm.core.process import RankPlace, RankReport
    from pcomm.integration.config.sections import Config, Resolved
    from pcomm.integration.train.loop import Outcome

__all__ = ["join_resilient", "launch_resilient", "resilient_rank"]

_log = logging.getLogger("pcomm.train")

# Where the ranks of a run find what it trains.
_KEY = "pcomm/train/run"
# A launcher that is there answers at once.
_CONNECT_S = 10.0
# What a rank imports late. Its optimizer asks for Dynamo.
_OF_EVERY_RANK = ("pcomm.integration.train.resilient", "torch._dynamo")


def launch_resilient(config: Config, run_dir: Path, ranks: int, *, must_restart: bool) -> Outcome:
    """Prepare the text, start the ranks, and keep their store until all of these have ended.

    The run ends with the store, also where ranks that came back would go on.

    Args:
        config: The configuration as the user wrote it.
        run_dir: Folder of the run; made if absent.
        ranks: Number of ranks that are started.
        must_restart: True to remove the checkpoints and metrics that are there.

    Raises:
        PcommError: The run cannot begin, or no rank has come to its end.
    """
    # Imported late: mistakes in the configuration are found without torch.
    import torch

    from pcomm.core.process import ResilientRanks
    from pcomm.integration.config.rules import validate_resilient
    from pcomm.integration.config.toml import to_dict
    from pcomm.integration.metrics import draw_loss
    from pcomm.integration.precision import tell_device
    from pcomm.integration.train.run_folder import hold_folder, prepare_folder, write_config
    from pcomm.integration.train.run_state import chosen_dtype

    dtype, why = chosen_dtype(config, run_dir, torch.device("cpu"), is_new=must_restart)
    chosen = replace(config, train=replace(config.train, dtype=dtype))
    resolved = validate_resilient(chosen, ranks)
    tell_device(dtype, why, ranks, torch.device("cpu"), rank=0)
    _check_start(resolved, run_dir, must_restart=must_restart)
    with hold_folder(run_dir):
        prepare_folder(resolved, run_dir, must_restart=must_restart)
        write_config(config, run_dir)
        threads = max(1, (os.cpu_count() or 1) // ranks)
        with ResilientRanks(
            ranks, threads=threads, preload=_OF_EVERY_RANK, imports_main=False
        ) as processes:
            place = processes.place(0)
            told = {
                "size": ranks,
                "config": to_dict(chosen),
                "folder": str(run_dir.resolve()),
                "threads": threads,
            }
            place.store().set(_KEY, json.dumps(told))
            _log.warning(
                "a rank R that has died comes back by: pcomm train --resilient --join %s:%d "
                "--rank R --out %s",
                _own_address(),
                place.port,
                run_dir,
            )
            processes.start(resilient_rank, (chosen, run_dir))
            outcome = _outcome(processes.wait(), run_dir)
        draw_loss(run_dir)
        return outcome


def _own_address() -> str:
    """The address of this host on its default route, where torch's store listens, too."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
        try:
            # No packet is sent: the kernel chooses a route to an address for documentation.
            own.connect(("192.0.2.1", 9))
        except OSError:  # no network
            return "127.0.0.1"
        return str(own.getsockname()[0])


def _check_start(config: Resolved, run_dir: Path, *, must_restart: bool) -> None:
    """Refuse what cannot begin, before anything in the folder changes. Reads the checkpoint."""
    import torch

    from pcomm.integration.checkpoint.folders import check_files, newest
    from pcomm.integration.train.run_folder import check_resumable
    from pcomm.integration.train.trainer import check_batch_memory, largest_memory

    check_batch_memory(config, largest_memory(torch.device("cpu")))
    if must_restart:
        return
    check_resumable(config, run_dir)
    if (checkpoint := newest(run_dir)) is not None:
        check_files(checkpoint)


def resilient_rank(place: RankPlace, config: Config, run_dir: Path) -> Outcome:
    """One rank of a resilient run; the task of `ResilientRanks`."""
    from pcomm.integration.config.rules import validate_resilient
    from pcomm.integration.train.resilient import ResilientRun

    logs.configure(environment.log_level(), place.rank)
    resolved = validate_resilient(config, place.size)
    _log.warning("rank %d of %d is process %d", place.rank, place.size, os.getpid())
    return ResilientRun(place, resolved, run_dir, sys.stderr).go()


def join_resilient(address: str, rank: int, run_dir: Path) -> Outcome:
    """Come back as a rank of a run whose process has died; returns when the run ends.

    Args:
        address: `HOST:PORT` of the launcher's store, as it has told.
        rank: Rank to take.
        run_dir: Folder of the run.

    Raises:
        ConfigError: There is no run at the address, or it has no such rank or another folder.
    """
    from pcomm.core.process import RankPlace
    from pcomm.integration.config.toml import from_dict

    host, _, port = address.rpartition(":")
    run, found = None, "no HOST:PORT"
    if host and port.isdecimal():
        place = RankPlace(rank, rank + 1, host, int(port), 1)
        run, found = _run_at(place)
    if run is None or not 0 <= rank < run["size"]:
        raise ConfigError(
            f"pcomm train --resilient --join {address} --rank {rank}",
            found=found if run is None else f"a run of {run['size']} ranks",
            why="A rank that comes back finds the run in the store of its launcher.",
            fix="Give the address that `pcomm train --resilient` has told, and a rank of that run. "
            "Where the launcher has ended, start the run again with --ranks: it goes on from its "
            "newest checkpoint.",
        )
    if str(run_dir.resolve()) != run["folder"]:
        raise ConfigError(
            f"pcomm train --resilient --join {address} --out {run_dir}",
            found=f"a run whose folder is {run['folder']}",
            why="A rank that comes back may go on with the metrics and checkpoints of the run; in "
            "another folder it would overwrite those of another one.",
            fix=f"Give --out {run['folder']}.",
        )
    # The others wait for a rank from the moment that it joins.
    for name in _OF_EVERY_RANK:
        importlib.import_module(name)
    import torch

    # Torch's own number is that of the cores, which this process shares with the other ranks.
    torch.set_num_threads(run["threads"])
    # Errors of the run itself are not those of the address.
    return resilient_rank(replace(place, size=run["size"]), from_dict(run["config"]), run_dir)


def _run_at(place: RankPlace) -> tuple[Any, str]:
    """What the launcher at a place has told of its run; or None, and what was found instead."""
    import torch.distributed as dist

    try:
        # Torch's store tries a closed port again for minutes.
        socket.create_connection((place.host, place.port), timeout=_CONNECT_S).close()
        store = place.store(timeout_s=_CONNECT_S)
        return (json.loads(store.get(_KEY)), "") if store.check([_KEY]) else (None, "no run there")
    except (OSError, OverflowError) as error:
        return None, f"no launcher there ({error})"
    except dist.DistError as error:
        return None, str(error).splitlines()[0]


def _outcome(reports: dict[int, RankReport], run_dir: Path) -> Outcome:
    """The outcome of a rank that came to the end, or the error of one that did not."""
    for rank, report in sorted(reports.items()):
        if not report.has_finished:
            _log.warning("rank %d: %s", rank, report.reason)
    finished = [report for report in reports.values() if report.has_finished]
    if finished:
        outcome: Outcome = finished[0].result
        return outcome
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
