"""The batch script of the page on launchers, in a real Slurm whose nodes are of this machine."""

from __future__ import annotations

import os
import re
import signal
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration_support.short_runs import whole_rows
from integration_support.slurm_cluster import SlurmCluster, slurm_obstacle
from pcomm.core.testing.programs import Programs, free_port, wait_until
from pcomm.integration.checkpoint.folders import newest

pytestmark = pytest.mark.soak

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "start-ranks-by-a-launcher.md"
# The sizes of the script: three nodes with two tasks each.
NODES, RANKS = 3, 6
ENDLESS = "1000000"
KEYS = """
[parallel]
dp = 3
tp = 2
"""
OURS = {
    "steps = 6": f'steps = {ENDLESS}\nschedule = "constant"',
    "global_batch_tokens = 256": "global_batch_tokens = 384",
    "eval_every = 2": 'eval_every = "none"',
    'prompt = "word"': 'prompt = ""',
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    if reason := slurm_obstacle():
        pytest.skip(reason)
    with pytest.MonkeyPatch.context() as patch, Programs() as programs:
        # Jobs have the variables of the command that asks for them.
        paths = [sysconfig.get_path("scripts"), os.environ["PATH"]]
        patch.setenv("PATH", os.pathsep.join(paths))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield SlurmCluster(programs, tmp_path_factory.mktemp("slurm"), NODES)


class Job:
    """A job of the page's script; the paths, the port and the training are ours.

    Args:
        cluster: The cluster.
        folder: Folder of the test.
        config: A configuration.
        every: Steps between two checkpoints, in the words of TOML.
    """

    def __init__(self, cluster: SlurmCluster, folder: Path, config: str, every: str) -> None:
        self.cluster, self.out, self._log = cluster, folder / "run", folder / "log"
        self.config = folder / "job.toml"
        for shown, here in (OURS | {"every = 2": f"every = {every}"}).items():
            assert config.count(f"\n{shown}\n") == 1, shown
            config = config.replace(f"\n{shown}\n", f"\n{here}\n")
        self.config.write_text(config + KEYS)
        (script,) = (part for part in PAGE.read_text().split("\n```") if "text\n#!" in part)
        script = script.removeprefix("text\n")
        ours = {"29500": free_port(), " my.toml": f" {self.config}", "/shared/runs/mine": self.out}
        for shown, here in ours.items():
            assert shown in script
            script = script.replace(shown, str(here))
        file = folder / "run.sh"
        file.write_text(script)
        words = ["--parsable", f"--chdir={folder}", f"--output={self._log}", file]
        self.number = cluster.run("sbatch", *words).strip()

    def __getitem__(self, name: str) -> str:
        return self.cluster.job(self.number)[name]

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def rows(self) -> list[dict[str, Any]]:
        return whole_rows(self.out)

    @property
    def last(self) -> int:
        """The step of the newest checkpoint; 0 without one."""
        found = newest(self.out)
        return 0 if found is None else found.step

    @property
    def starts(self) -> list[int]:
        """The steps from which the job went on, each time that all of its ranks came."""
        found = re.findall(rf"generation 0 after step (\d+): {RANKS} ranks", self.log)
        return [int(step) for step in found]

    def pid(self, rank: int) -> int:
        """The newest process of a rank."""
        return int(re.findall(rf"rank {rank} of {RANKS} is process (\d+)", self.log)[-1])

    def pid_of(self, words: str) -> int:
        """The one process whose command line has these words."""
        (found,) = (pid for pid, line in self.cluster.processes().items() if words in line)
        return found

    def wait_for_ranks(self, count: int, *, after: int = 0) -> int:
        """Wait for a row, behind so many, of a step with so many ranks; returns its place."""

        def places() -> list[int]:
            assert self["JobState"] not in ("FAILED", "COMPLETED", "CANCELLED"), self.log
            return [at for at, row in enumerate(self.rows) if at >= after and row["ranks"] == count]

        wait_until(places, f"a step of {count} ranks")
        return places()[0]

    def wait_for_end(self) -> tuple[str, str, str]:
        """Wait for the end; returns its state, its exit code and how often it was started again."""
        states = ("CANCELLED", "COMPLETED", "FAILED")
        wait_until(lambda: self["JobState"] in states, "the end of the job")
        self.wait_until_gone()
        return self["JobState"], self["ExitCode"], self["Restarts"]

    def wait_until_gone(self) -> None:
        """Wait until no process of the job is left."""
        wait_until(lambda: not self.cluster.processes(), "the end of all processes")


@pytest.fixture
def job(
    request: pytest.FixtureRequest, cluster: SlurmCluster, config_file: Path, tmp_path: Path
) -> Iterator[Job]:
    made = Job(cluster, tmp_path, config_file.read_text(), request.param)
    yield made
    cluster.run("scancel", made.number)
    made.wait_until_gone()


@pytest.mark.parametrize("job", ["20"], indirect=True)
def test_a_task_and_then_the_store_are_killed_and_the_job_goes_on_to_its_end(job: Job) -> None:
    whole = job.wait_for_ranks(RANKS)
    os.kill(job.pid(4), signal.SIGKILL)
    fewer = job.wait_for_ranks(RANKS - 1, after=whole)
    # The loop of the script has started it again, and Slurm has done nothing.
    job.wait_for_ranks(RANKS, after=fewer)
    assert (job["JobState"], job["Restarts"]) == ("RUNNING", "0")

    wait_until(lambda: job.last > 0, "a checkpoint")
    saved, before = job.last, job.rows
    os.kill(job.pid_of("pcomm store"), signal.SIGKILL)
    wait_until(lambda: len(job.starts) == 2, "another start of the job")
    assert job["Restarts"] == "1"
    # From the newest checkpoint, perhaps one that was written meanwhile: no step is done again.
    assert job.starts[1] >= saved
    job.wait_for_ranks(RANKS, after=job.starts[1])
    assert job.rows[:saved] == before[:saved]

    # Asked for again by an administrator; and to end by itself.
    job.cluster.run("scontrol", "requeuehold", job.number)
    job.wait_until_gone()
    last = job.last + 60
    job.config.write_text(job.config.read_text().replace(ENDLESS, str(last)))
    job.cluster.run("scontrol", "release", job.number)
    assert job.wait_for_end() == ("COMPLETED", "0:0", "2"), job.log
    assert job.starts[2] == last - 60
    assert [row["step"] for row in job.rows] == list(range(1, last + 1))
    assert job.last == last


@pytest.mark.parametrize("job", ['"end"'], indirect=True)
def test_sigterm_to_the_ranks_has_them_save_and_ends_the_job(job: Job) -> None:
    job.wait_for_ranks(RANKS)
    assert job.last == 0
    job.cluster.run("scancel", "--signal=TERM", job.number)
    assert job.wait_for_end() == ("FAILED", "130:0", "0"), job.log
    assert job.last == job.rows[-1]["step"] > 0


@pytest.mark.parametrize("job", ["20"], indirect=True)
def test_a_batch_script_that_is_killed_leaves_nothing(job: Job) -> None:
    job.wait_for_ranks(RANKS)
    # Where Slurm has no control groups, it does not find the store.
    os.kill(job.pid_of("slurm_script"), signal.SIGKILL)
    assert job.wait_for_end() == ("FAILED", "0:9", "0")


@pytest.mark.parametrize("job", ["20"], indirect=True)
def test_a_job_that_is_cancelled_leaves_nothing(job: Job) -> None:
    job.wait_for_ranks(RANKS)
    job.cluster.run("scancel", job.number)
    assert job.wait_for_end() == ("CANCELLED", "0:15", "0")
