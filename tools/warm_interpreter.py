"""Runs programs one after another, each in a fork of an interpreter that has imported torch.

    python -W error tools/warm_interpreter.py FILE

runs FILE, which imports what the programs do, and reads a line for each program from its standard
input, a JSON list: the program's file, the folder it runs in, and a file for what it prints. It
answers with a line, the exit code. If the input ends, so does the program. A program finds what it
would find in an interpreter of its own, but for the seconds that imports take; the server that its
ranks are forked from is a fork, too.
"""

import gc
import json
import os
import runpy
import select
import signal
import sys
import threading
from multiprocessing import forkserver, resource_tracker, util
from typing import Any


def main() -> None:
    """Answer until the input ends; a fork returns after its program, and ends as Python does."""
    runpy.run_path(sys.argv[1])
    # A fork would copy all that was imported when it collects cycles at its end.
    gc.freeze()
    server = start_server()
    for line in sys.stdin:
        script, folder, printed = json.loads(line)
        pid = os.fork()
        if pid == 0:
            run(script, folder, printed)
            return
        if not ends_before_input(pid):
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    # It would wait for an end of its own, as it has a copy of the pipe that tells it.
    os.kill(server, signal.SIGKILL)


def ends_before_input(pid: int) -> bool:
    """Wait for a program, or for whoever sends them to be gone, and say whether it is the first."""
    end = os.pidfd_open(pid)
    waiting = select.poll()
    waiting.register(end, select.POLLIN)
    # The next line comes after an answer, so there is nothing to read: only the end is reported.
    waiting.register(sys.stdin, 0)
    ended = [file for file, _ in waiting.poll()]
    os.close(end)
    return end in ended


def start_server() -> int:
    """Start multiprocessing's server as a fork of this process, for the ranks of all programs.

    Returns:
        Its process.
    """
    starter: Any = util
    server: Any = forkserver._forkserver
    spawn = starter.spawnv_passfds

    def fork(_path: object, words: list[str], _descriptors: object) -> int:
        pid = os.fork()
        if pid == 0:
            # Standard output is for answers. The lock is held by the call that forks.
            os.dup2(2, 1)
            server._lock = threading.Lock()
            try:
                exec(words[-1], {})
            finally:
                os._exit(0)
        return pid

    starter.spawnv_passfds = fork
    forkserver.set_forkserver_preload([])
    server.ensure_running()
    starter.spawnv_passfds = spawn
    # A program would wait for a child that is not its own.
    server.ensure_running = resource_tracker.ensure_running
    return int(server._forkserver_pid)


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
