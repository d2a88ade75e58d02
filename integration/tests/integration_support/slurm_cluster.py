"""A Slurm on this machine, whose daemons and jobs end with the test that started them."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from pathlib import Path

from pcomm.core.testing.programs import Finished, Programs, free_port, wait_until

__all__ = ["SlurmCluster", "slurm_obstacle"]

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "scontrol", "sinfo", "srun")
# Without accounting, and without the kernel's control groups. A job that is asked for again starts
# when its credential has run out: after two minutes, but here after seconds.
_CONF = """\
ClusterName=pcomm
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
AuthInfo=socket={folder}/munge.socket,cred_expire=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
"""


def slurm_obstacle() -> str | None:
    """Why no Slurm can be started here; None if one can."""
    if sys.platform != "linux" or os.geteuid():
        return "the daemons of Slurm run as root, on Linux"
    absent = [name for name in _PROGRAMS if shutil.which(name) is None]
    told = f"no {', '.join(absent)}: `apt-get install slurmctld slurmd slurm-client munge`"
    return told if absent else None


class SlurmCluster:
    """Nodes of one machine, each with a daemon of its own, and the commands of Slurm.

    Args:
        programs: What starts the daemons, and so all of their jobs, and ends them.
        folder: An empty folder for their files.
        nodes: Number of nodes.
    """

    def __init__(self, programs: Programs, folder: Path, nodes: int) -> None:
        self._programs, self._folder = programs, folder
        host = socket.gethostname().partition(".")[0]
        file = folder / "slurm.conf"
        names = [f"n{number}" for number in range(nodes)]
        own = f"NodeHostname={host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()}"
        lines = [f"NodeName={name} {own} Port={free_port()}\n" for name in names]
        text = _CONF.format(host=host, port=free_port(), folder=folder)
        file.write_text(text + "".join(lines))
        self._environment = {**os.environ, "SLURM_CONF": str(file)}
        for name in ("state", *names):
            (folder / name).mkdir()
        self._start_munge()
        self._start("slurmctld", "-D")
        for name in names:
            self._start("slurmd", "-D", "-N", name)
        wait_until(lambda: self._states() == ["idle"] * nodes, "idle nodes")
        self.daemons = frozenset(programs.running())

    def run(self, *words: object) -> str:
        """What a command of Slurm prints, which must succeed."""
        found = self._try(*words)
        assert found.returncode == 0, found
        return found.stdout

    def job(self, number: str) -> dict[str, str]:
        """What Slurm says of a job, by its names for it."""
        told = self.run("scontrol", "--oneliner", "show", "job", number)
        return dict(item.partition("=")[::2] for item in told.split())

    def processes(self) -> dict[int, str]:
        """The command lines of all processes of jobs, by process id."""
        found = {}
        for pid in set(self._programs.running()) - self.daemons:
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            found[pid] = words.replace(b"\0", b" ").decode(errors="replace")
        return found

    def _states(self) -> list[str]:
        return self._try("sinfo", "--noheader", "--Node", "--format=%T").stdout.split()

    def _try(self, *words: object) -> Finished:
        return self._programs.run(*words, env=self._environment)

    def _start_munge(self) -> None:
        key, socket_file = (self._folder / f"munge.{name}" for name in ("key", "socket"))
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        names = {"pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        files = [f"--{option}={self._folder}/munge.{name}" for option, name in names.items()]
        files += [f"--key-file={key}", f"--socket={socket_file}"]
        # Forced: others could not enter the folder of the socket, and need not.
        self._start("munged", "--foreground", "--force", *files)
        wait_until(socket_file.exists, "the socket of munge")

    def _start(self, *words: str) -> None:
        with (self._folder / f"{words[0]}.out").open("a") as log:
            self._programs.start(*words, env=self._environment, stdout=log, stderr=log)
