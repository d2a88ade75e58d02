"""The command of the page on launchers, under real agents of torchrun: workers and store die."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.run

from integration_support.short_runs import (
    allowed_by_rounding,
    assert_same_numbers,
    settings,
    whole_rows,
)
from pcomm.core import environment
from pcomm.core.cli import main
from pcomm.core.testing.programs import (
    PATIENCE_S,
    Programs,
    free_port,
    is_running,
    scaled_s,
    wait_until,
)
from pcomm.integration.checkpoint.folders import newest
from pcomm.integration.commands.train import command as train_command

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "start-ranks-by-a-launcher.md"
ENDLESS = "1000000"
# A small rate: what fp32 rounds stays small over hundreds of steps. Checkpoints of each second step
# keep these few until a worker is back.
OURS = {
    "steps = 6": f'steps = {ENDLESS}\nschedule = "constant"',
    "learning_rate = 1e-2": "learning_rate = 1e-4",
    # Also a multiple of three replicas.
    "global_batch_tokens = 256": "global_batch_tokens = 384",
    "eval_every = 2": 'eval_every = "none"',
    'prompt = "word"': 'prompt = ""',
}


def line_of_page() -> str:
    """The command of the page."""
    (line,) = re.findall(r"\n```text\n(torchrun .*)\n```\n", PAGE.read_text())
    return line


class Job:
    """Agents of the page's command, their store, and what they leave.

    Args:
        start: The fixture.
        folder: Folder of the test.
        config: A configuration.
        parallel: Sizes of `[parallel]`.
        knows_others: True for agents of one job of torchrun's, which have a store of their own.
    """

    def __init__(
        self,
        start: Callable[..., Any],
        folder: Path,
        config: str,
        parallel: dict[str, int],
        *,
        knows_others: bool = False,
    ) -> None:
        self._start, self._folder, self.out = start, folder, folder / "run"
        self.config, self._port, self._knows_others = folder / "job.toml", free_port(), knows_others
        self._agents_port = free_port()
        self.size = 1
        for shown, here in OURS.items():
            assert config.count(f"\n{shown}\n") == 1, shown
            config = config.replace(f"\n{shown}\n", f"\n{here}\n")
        config += "\n[parallel]\n"
        for name, number in parallel.items():
            config += f"{name} = {number}\n"
            self.size *= number
        self.config.write_text(config)
        self.agents = [self.start_agent(rank) for rank in range(self.size)]
        # The workers wait for it.
        self.start_store()

    def start_agent(self, rank: int) -> subprocess.Popen[str]:
        line = line_of_page()
        place, sizes = f" --rank {rank}", f" --ranks {self.size}"
        ours = {
            " --rank 0": place,
            " --ranks 6": sizes,
            "10.0.0.1:29500": f"127.0.0.1:{self._port}",
            " my.toml": f" {self.config}",
            "/shared/runs/mine": str(self.out),
        }
        for shown, here in ours.items():
            assert line.count(shown) == 1, shown
            line = line.replace(shown, here)
        if self._knows_others:
            meet = f"--master-addr 127.0.0.1 --master-port {self._agents_port}"
            nodes = f"--nnodes {self.size} --node-rank {rank} {meet}"
            line = line.replace(place + sizes, "").replace("--standalone", nodes)
        paths = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
        with self._log_file(rank).open("a") as log:
            words = shlex.split(line)
            return self._start("env", f"PATH={paths}", *words, stdout=log, stderr=log)

    def start_store(self) -> None:
        with (self._folder / "store").open("a") as log:
            self.store = self._start("pcomm", "store", "--port", self._port, stdout=log, stderr=log)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return whole_rows(self.out)

    @property
    def saved(self) -> int:
        """The step of the newest checkpoint; 0 without one."""
        found = newest(self.out)
        return 0 if found is None else found.step

    @property
    def logs(self) -> str:
        return "\n".join(self.log(rank) for rank in range(self.size))

    def log(self, rank: int) -> str:
        """What an agent and its workers have printed."""
        return self._log_file(rank).read_text()

    def _log_file(self, rank: int) -> Path:
        return self._folder / f"log-{rank}"

    def workers(self, rank: int) -> list[int]:
        """All processes that were a rank, one after the other."""
        found = re.findall(rf"rank {rank} of {self.size} is process (\d+)", self.log(rank))
        return [int(pid) for pid in found]

    def codes(self, rank: int) -> list[int]:
        """The exit codes with which an agent has seen workers fail."""
        return [int(code) for code in re.findall(r"failed \(exitcode: (-?\d+)\)", self.log(rank))]

    def wait_for_step(self, ranks: int, *, after: int = -1) -> int:
        """Wait for a step of so many ranks in a generation behind `after`, which is returned."""

        def found() -> list[int]:
            own = [int(row["generation"]) for row in self.rows if row["ranks"] == ranks]
            return [generation for generation in own if generation > after]

        wait_until(lambda: found() or self._check(), f"{ranks} ranks behind generation {after}")
        return found()[0]

    def _check(self) -> None:
        """Fail if an agent has ended that was not killed."""
        ends = [agent.poll() for agent in self.agents]
        assert all(end in (None, -signal.SIGKILL) for end in ends), self.logs

    def kill_worker(self, rank: int) -> None:
        os.kill(self.workers(rank)[-1], signal.SIGKILL)

    def lose_store(self, *, steps: int) -> int:
        """Kill the store, and let the next start end so many steps behind the last one.

        Returns the number of steps.
        """
        # No step is committed without it, so that the ranks stay where they are.
        self.store.send_signal(signal.SIGSTOP)
        last = self.rows[-1]["step"] + steps
        text = self.config.read_text()
        self.config.write_text(text.replace(ENDLESS, str(last)))
        self.store.kill()
        self.store.wait()
        return int(last)

    def finish(self) -> list[int]:
        """Wait for the end of all agents; returns their exit codes."""
        for agent in self.agents:
            agent.communicate(timeout=scaled_s(PATIENCE_S))
        return [agent.returncode for agent in self.agents]

    def terminate(self) -> list[int]:
        """Send SIGTERM to all agents, and wait for their end; returns their exit codes."""
        for agent in self.agents:
            agent.terminate()
        return self.finish()

    def end_store(self, started: Programs) -> None:
        """End the store, the last process that may be left."""
        self.store.terminate()
        assert self.store.wait(scaled_s(PATIENCE_S)) == 0
        wait_until(lambda: not started.running(), "the end of all processes")


def test_torchrun_and_the_command_take_the_line_of_the_page() -> None:
    """Also where no torchrun is started."""
    program, *words = shlex.split(line_of_page())
    asked = torch.distributed.run.parse_args(words)
    assert (program, asked.standalone, asked.nproc_per_node) == ("torchrun", True, "1")
    assert (asked.max_restarts, asked.no_python, asked.training_script) == (20, True, "pcomm")
    name, *options = asked.training_script_args
    assert name == train_command.name
    parser = argparse.ArgumentParser()
    train_command.add_arguments(parser)
    found = parser.parse_args(options)
    assert (found.resilient, found.store, found.rank, found.ranks) == (
        True,
        "10.0.0.1:29500",
        0,
        6,
    )


# In the gate ranks die under the launcher of the command, and come back by words like these.
@pytest.mark.soak
def test_a_killed_worker_is_started_again_and_sigterm_to_the_agents_saves(
    start, started, config_file, tmp_path
):
    job = Job(start, tmp_path, config_file.read_text(), {"dp": 2})
    assert_comes_back(job)
    # Of torchrun, which a signal has ended.
    assert job.terminate() == [1, 1], job.logs
    job.end_store(started)
    assert_steps_of_one_process(job, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("parallel", "knows_others"),
    [({"dp": 2}, True), ({"dp": 2}, False), ({"dp": 3, "tp": 2}, False)],
)
def test_a_worker_and_then_the_store_are_killed_and_the_job_goes_on_to_its_end(
    parallel, knows_others, start, started, config_file, tmp_path
):
    job = Job(start, tmp_path, config_file.read_text(), parallel, knows_others=knows_others)
    assert_comes_back(job)
    wait_until(lambda: job.saved > 0, "a checkpoint")
    last, before = job.lose_store(steps=30), job.rows
    left = [job.workers(rank)[-1] for rank in range(job.size)]
    limit_s = scaled_s(environment.timeout_s())
    wait_until(lambda: not any(map(is_running, left)), "the end of the workers", within_s=limit_s)

    def waits(rank: int) -> bool:
        return "no store at" in job.log(rank).rpartition("failed (exitcode: 75)")[2]

    wait_until(lambda: all(map(waits, range(job.size))), "workers that wait for a store")
    ended = [*([[75]] * (job.size - 1)), [-signal.SIGKILL, 75]]
    assert [job.codes(rank) for rank in range(job.size)] == ended
    saved = job.saved
    job.start_store()
    assert job.finish() == [0] * job.size, job.logs
    job.end_store(started)

    assert f"generation 0 after step {saved}: {job.size} ranks" in job.logs
    assert job.rows[:saved] == before[:saved]
    assert job.saved == last
    assert_steps_of_one_process(job, tmp_path)


@pytest.mark.soak
def test_agents_start_workers_again_without_that_of_a_lost_host(
    start, started, config_file, tmp_path
):
    """Also without that of rank 0, which another one brings back."""
    job = Job(start, tmp_path, config_file.read_text(), {"dp": 3})
    whole = job.wait_for_step(3)
    job.agents[0].kill()
    job.agents[0].wait()
    # By itself it leaves its worker.
    job.kill_worker(0)
    fewer = job.wait_for_step(2, after=whole)
    job.kill_worker(1)
    wait_until(lambda: len(job.workers(1)) == 2, "another worker of rank 1")
    again = job.wait_for_step(2, after=fewer)
    job.agents[0] = job.start_agent(0)
    job.wait_for_step(3, after=again)
    assert [len(job.workers(rank)) for rank in range(3)] == [2, 2, 1]
    assert [job.codes(rank) for rank in range(3)] == [[], [-signal.SIGKILL], []]
    assert job.terminate() == [1, 1, 1], job.logs
    job.end_store(started)
    assert_steps_of_one_process(job, tmp_path)


@pytest.mark.soak
def test_agents_of_one_job_start_nothing_again_without_that_of_node_0(start, config_file, tmp_path):
    """Which is why those of the page do not know each other. Their ranks go on nevertheless."""
    job = Job(start, tmp_path, config_file.read_text(), {"dp": 2}, knows_others=True)
    whole = job.wait_for_step(2)
    job.agents[0].kill()
    job.agents[0].wait()
    job.kill_worker(1)
    assert job.agents[1].wait(scaled_s(PATIENCE_S)) == 1
    assert job.codes(1) == [-signal.SIGKILL]
    job.agents = []
    job.wait_for_step(1, after=whole)
    assert [len(job.workers(rank)) for rank in range(2)] == [1, 1]


def assert_comes_back(job: Job) -> None:
    """Kill the worker of the last rank: its agent, and no other, starts one that joins."""
    whole, victim = job.wait_for_step(job.size), job.size - 1
    first = [job.workers(rank) for rank in range(job.size)]
    job.kill_worker(victim)
    job.wait_for_step(job.size, after=whole)
    assert job.codes(victim) == [-signal.SIGKILL]
    assert len(job.workers(victim)) == 2
    assert [job.workers(rank) for rank in range(victim)] == first[:victim]


def assert_steps_of_one_process(job: Job, folder: Path) -> None:
    """Each step is there once, with the loss of a run on one process that nobody disturbs."""
    assert [row["step"] for row in job.rows] == list(range(1, job.saved + 1))
    one, parts = folder / "one", folder / "parts"
    alone = {"train.steps": str(job.saved), "checkpoint.every": "end"}
    sizes = {"parallel.dp": "1", "parallel.tp": "1"}
    words = ["train", "--config", str(job.config), *settings({**alone, **sizes})]
    assert main([*words, "--out", str(one)]) == 0
    assert main([*words, "--out", str(parts), "--set", "train.micro_batch_tokens=128"]) == 0
    assert_same_numbers(job.out, one, allowed_by_rounding(one, parts))
