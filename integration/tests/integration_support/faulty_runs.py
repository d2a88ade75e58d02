"""Ranks of a resilient run that die at a named place, and wait for those that come back.

And a process that holds the folder of a run until it dies.
"""

from __future__ import annotations

import io
import logging
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal
from unittest.mock import patch

import torch
from torch import Tensor

from pcomm.core.errors import PeerError
from pcomm.core.process import RankPlace
from pcomm.integration.config.rules import validate_resilient
from pcomm.integration.config.sections import Config
from pcomm.integration.metrics import sinks
from pcomm.integration.train.interrupt import Interrupt
from pcomm.integration.train.loop import Outcome
from pcomm.integration.train.resilient import GatheredSaver, ResilientRun
from pcomm.integration.train.run_folder import lock_run
from pcomm.ntp import Session
from pcomm.ntp.session import Attempt, Timeouts

__all__ = ["Fault", "faulty_rank", "hold_until_killed"]

_PAUSE_S = 0.005


@dataclass(frozen=True)
class Fault:
    """What happens to a run.

    Args:
        rank: Rank whose first process has the fault.
        step: Number of the step, from 0; for the number of steps, the fault is there when the last
            checkpoint is due, and a signal.
        place: Place in the step: the rank sends itself a signal in the middle of backward, or
            after the step is applied and before its row is written, or when the checkpoint behind
            it is due; or its commit ends with an error although all ranks apply the step.
        joins_at: Step at whose beginning the others wait until a process has asked to join; None
            if none will.
        joins: Number of processes that have asked by then.
        number: The signal.
    """

    rank: int
    step: int
    place: Literal["backward", "row", "commit", "save"] = "backward"
    joins_at: int | None = None
    joins: int = 1
    number: int = signal.SIGKILL


def faulty_rank(
    place: RankPlace,
    config: Config,
    run_dir: Path,
    *faults: Fault,
    hosts: Mapping[int, str] | None = None,
) -> Outcome | None:
    """One rank of a resilient run in fp64 with faults; a task of `ResilientRanks`.

    Args:
        place: Place of this process.
        config: The configuration.
        run_dir: Folder of the run, with its tokens.
        faults: Signal, rank and step of each fault; at most one for each rank.
        hosts: Host that each rank tells; None for that of this machine. Each rank then also writes
            its warnings into `warnings.RANK.txt`.
    """
    if hosts is not None:
        logging.getLogger("pcomm").addHandler(
            logging.FileHandler(run_dir / f"warnings.{place.rank}.txt")
        )
    resolved = validate_resilient(config, place.size)
    # Its launcher tells of each end. A rank that is slow on a busy machine is not a dead one.
    timeouts = Timeouts(heartbeat_s=0.1, dead_after_s=3600.0, leave_s=3600.0, agree_s=3600.0)
    stream = io.StringIO()
    run = _FaultyRun(
        place,
        resolved,
        run_dir,
        stream,
        dtype=torch.float64,
        timeouts=timeouts,
        host=None if hosts is None else hosts[place.rank],
    )
    run.faults = faults
    # Half of what the rank that writes computes would be the import.
    with patch.object(sinks, "open_tensorboard", lambda *_, **__: None):
        return run.go()


def hold_until_killed(caller: Connection, run_dir: Path) -> None:
    """Hold the folder of a run, and say "held"; called in a process of its own, which is killed.

    Args:
        caller: Connection to the process that kills this one.
        run_dir: The folder.
    """
    with lock_run(run_dir):
        caller.send("held")
        caller.recv()


def _strike(number: int, *_: object) -> None:
    os.kill(os.getpid(), number)


class _FaultyRun(ResilientRun):
    faults: tuple[Fault, ...]

    def _step(
        self, session: Session, attempt: Attempt, saver: GatheredSaver, interrupt: Interrupt
    ) -> None:
        step = session.step
        for fault in self.faults:
            if step == fault.joins_at:
                store = self.place.store()
                # Not their number, which is there before what they ask for.
                while not store.check([f"pcomm/session/join/{fault.joins}"]):
                    time.sleep(_PAUSE_S)
        if own := self._at_fault(step, "backward"):
            norm: Tensor = session.model.norm.weight  # type: ignore[assignment, union-attr]
            norm.register_hook(partial(_strike, own.number))
        if self._at_fault(step, "commit"):
            attempt = _BreaksAfterCommit(session._step_end)
        if own := self._at_fault(step, "save"):
            saver.save = partial(_strike, own.number)  # type: ignore[method-assign]
        super()._step(session, attempt, saver, interrupt)

    def _write(self, session: Session, row: dict[str, float]) -> None:
        if own := self._at_fault(int(row["step"]) - 1, "row"):
            os.kill(os.getpid(), own.number)
        super()._write(session, row)

    def _end(self, session: Session, saver: GatheredSaver) -> None:
        if own := self._at_fault(session.step, "backward"):
            os.kill(os.getpid(), own.number)
        super()._end(session, saver)

    def _at_fault(self, step: int, place: str) -> Fault | None:
        """The fault of this process at a place of a step, if it has one."""
        own = (self.place.rank, step, self.place.incarnation, place)
        found = (one for one in self.faults if (one.rank, one.step, 0, one.place) == own)
        return next(found, None)


class _BreaksAfterCommit(Attempt):
    """An attempt whose commit ends with an error on this rank alone; the step is applied."""

    def commit(self, *, max_norm: float | None = None) -> Tensor:
        super().commit(max_norm=max_norm)
        raise PeerError(
            "an operation between ranks",
            found="a connection that breaks when the others have all that they need",
            why="The fault of this run is there.",
            fix="Nothing: it is meant.",
        )
