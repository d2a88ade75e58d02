"""Runs `pcomm train`, whose fourth step's checkpoint never gets finished; killed by a test.

    python blocked_train.py write|commit FOLDER ARGUMENTS...

Every rank that comes to the write leaves a file named after its process in FOLDER. A process that
is started as a local rank imports this file too, and so has the same trap.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter

from pcomm.core.cli import main
from pcomm.integration.checkpoint import saver

PLACE, FOLDER = sys.argv[1], Path(sys.argv[2])
write, commit = FileSystemWriter.write_data, saver.commit


def block(at: str, folder: Path) -> None:
    if at == PLACE and folder.name.startswith("step-00000004"):
        (FOLDER / f"blocked-{os.getpid()}").touch()
        time.sleep(600)


def write_and_block(writer: Any, *arguments: Any) -> Any:
    result = write(writer, *arguments)
    result.wait()
    (FOLDER / f"pid-{os.getpid()}").touch()
    block("write", Path(writer.path))
    return result


def block_and_commit(partial: Path, *arguments: Any, **options: Any) -> Any:
    block("commit", partial)
    return commit(partial, *arguments, **options)


FileSystemWriter.write_data = write_and_block
saver.commit = block_and_commit

if __name__ == "__main__":
    sys.exit(main(sys.argv[3:]))
