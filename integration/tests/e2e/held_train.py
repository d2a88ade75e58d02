"""Runs one rank of a resilient run, which is held before its fourth step and is told of no death.

    python held_train.py FOLDER LIMIT_S ARGUMENTS...

A rank leaves `held-RANK` in FOLDER when it comes to that step, and goes on once `go` is there. Each
step that it has committed is a line of `committed-RANK`. LIMIT_S is the time limit of an operation
between ranks, which is ten minutes by itself.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from pcomm.core.cli import main
from pcomm.integration.train import resilient
from pcomm.ntp.session import Session, Timeouts

FOLDER, LIMIT_S = Path(sys.argv[1]), float(sys.argv[2])
HELD_AT = 3


class HeldRun(resilient.ResilientRun):
    def _step(self, session: Session, *arguments: Any) -> None:
        # Also in a later generation: on a busy machine an operation may be late.
        if session.step == HELD_AT:
            (FOLDER / f"held-{self.place.rank}").touch()
            while not (FOLDER / "go").exists():
                time.sleep(0.01)
        super()._step(session, *arguments)

    def _write(self, session: Session, row: dict[str, float]) -> None:
        # Each rank comes here as soon as its commit has returned.
        if "loss" in row:
            with (FOLDER / f"committed-{self.place.rank}").open("a") as file:
                file.write(f"{row['step']:.0f}\n")
        super()._write(session, row)


if __name__ == "__main__":
    limits = Timeouts(
        heartbeat_s=0.1, dead_after_s=2 * LIMIT_S, agree_s=10 * LIMIT_S, operation_s=LIMIT_S
    )
    resilient.ResilientRun = partial(HeldRun, timeouts=limits)  # type: ignore
    # With no words given, as users start it: then it ends beside threads that torch still has.
    del sys.argv[1:3]
    sys.exit(main())
