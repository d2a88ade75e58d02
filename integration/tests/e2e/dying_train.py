"""Runs `pcomm train` twice; its rank 1 is killed when it starts, then before its second batch.

    python dying_train.py MOMENT ARGUMENTS...

prints the exit codes. A process that is started as a local rank imports this file too, with the
arguments that the command has then, and so carries out its own death.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from typing import Any

from pcomm.core.cli import main
from pcomm.integration.data.batches import TrainBatches

batch = TrainBatches.batch


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def batch_or_die(batches: TrainBatches, step: int, **options: Any) -> Any:
    if step == 1:
        die()
    return batch(batches, step, **options)


if multiprocessing.current_process().name.startswith("rank 1 "):
    if sys.argv[1] == "import":
        die()
    TrainBatches.batch = batch_or_die

if __name__ == "__main__":
    for sys.argv[1] in ("import", "batch"):
        print(sys.argv[1], main(sys.argv[2:]))
