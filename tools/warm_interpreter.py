"""Runs programs one after another, each in a fork of an interpreter that has imported torch.

    python -W error tools/warm_interpreter.py

reads a line for each program from its standard input, a JSON list: the program's file, the folder
it runs in, and a file for what it prints. It answers with a line, the exit code. A program finds
what it would find in an interpreter of its own, but for the seconds that torch takes to import.
"""

import json
import os
import runpy
import sys


def main() -> None:
    """Answer until the input ends; a fork returns after its program, and ends as Python does."""
    # No more than that: pages set variables which Triton reads when it is imported.
    import torch.distributed.tensor  # noqa: F401

    for line in sys.stdin:
        script, folder, printed = json.loads(line)
        pid = os.fork()
        if pid == 0:
            run(script, folder, printed)
            return
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def run(script: str, folder: str, printed: str) -> None:
    """Run a program as `python script` does, within this process."""
    nothing, output = os.open(os.devnull, os.O_RDONLY), os.open(printed, os.O_WRONLY | os.O_CREAT)
    for number, file in enumerate((nothing, output, output)):
        os.dup2(file, number)
    os.chdir(folder)
    sys.argv = [script]
    sys.path[0] = os.path.dirname(script)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
