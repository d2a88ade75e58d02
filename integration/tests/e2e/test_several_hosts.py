"""The commands of the page on operating a run, started on two hosts as each launcher would."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed.run
import yaml

from core_bench.rated_network import RatedNetwork, obstacle, rated_network
from core_support.hosts import ADDRESS, on_host
from pcomm.core.testing.programs import PATIENCE_S, Programs, scaled_s
from pcomm.integration.commands.train import command as train_command

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "operate-a-run.md"


@pytest.fixture(scope="module")
def network() -> Iterator[RatedNetwork]:
    if reason := obstacle():
        pytest.skip(f"no hosts of their own here: {reason}")
    with rated_network(2, num_rails=1, mbit_per_s=1000.0) as network:
        yield network


@pytest.fixture(scope="module")
def losses_of_one(
    train: Callable[..., int], tmp_path_factory: pytest.TempPathFactory
) -> list[float]:
    out = tmp_path_factory.mktemp("one") / "run"
    assert train(out) == 0
    return losses(out)


def losses(out: Path) -> list[float]:
    rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


def blocks(language: str) -> list[str]:
    return [part.split("\n```")[0] for part in PAGE.read_text().split(f"```{language}\n")[1:]]


def by_torchrun(host: int) -> tuple[list[str], dict[str, str]]:
    (line,) = (text for text in blocks("bash") if text.startswith("torchrun"))
    for shown, here in (
        ("-rank 0", f"-rank {host}"),
        ("-node 2", "-node 1"),
        ("10.0.0.1", ADDRESS),
    ):
        assert shown in line
        line = line.replace(shown, here)
    return shlex.split(line), {}


def by_slurm(host: int) -> tuple[list[str], dict[str, str]]:
    (script,) = (text for text in blocks("bash") if "srun" in text)
    (line,) = (line for line in script.splitlines() if line.startswith("srun"))
    program = shlex.split(line)
    sets = {"SLURM_PROCID": str(host), "SLURM_LOCALID": "0", "SLURM_NTASKS": "2"}
    return program[program.index("bash") :], {
        **sets,
        "MASTER_PORT": "29500",
        "MASTER_ADDR": ADDRESS,
    }


def by_kubernetes(host: int) -> tuple[list[str], dict[str, str]]:
    service, job = yaml.safe_load_all(blocks("yaml")[0])
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    sets = {one["name"]: one["value"] for one in container["env"]}
    # Kubernetes names pod 0 so, where the service has that name and selects the job's pods.
    name = job["metadata"]["name"]
    assert sets["MASTER_ADDR"] == f"{name}-0.{service['metadata']['name']}"
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert int(sets["WORLD_SIZE"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    return container["command"], {
        **sets,
        "JOB_COMPLETION_INDEX": str(host),
        "MASTER_ADDR": ADDRESS,
    }


def test_torchrun_and_the_command_take_the_line_of_the_page() -> None:
    """Also where no torchrun is started."""
    words, _ = by_torchrun(1)
    asked = torch.distributed.run.parse_args(words[1:])
    assert (words[0], asked.nnodes, asked.node_rank, asked.nproc_per_node) == (
        "torchrun",
        "2",
        1,
        "1",
    )
    assert (asked.no_python, asked.training_script) == (True, "pcomm")
    name, *options = asked.training_script_args
    assert name == train_command.name
    parser = argparse.ArgumentParser()
    train_command.add_arguments(parser)
    assert parser.parse_args(options).out == Path("/shared/runs/hosts")


@pytest.mark.parametrize(
    "launcher",
    # They differ in the names of variables, which unit tests read. An agent of torchrun is a
    # process more; on one host others start it.
    [
        pytest.param(by_torchrun, marks=pytest.mark.soak),
        by_slurm,
        pytest.param(by_kubernetes, marks=pytest.mark.soak),
    ],
)
def test_two_hosts_train_what_one_process_does(
    launcher: Callable[[int], tuple[list[str], dict[str, str]]],
    network: RatedNetwork,
    losses_of_one: list[float],
    config_file: Path,
    tmp_path: Path,
) -> None:
    out = tmp_path / "run"
    unset = ("GLOO_SOCKET_IFNAME", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    with Programs() as programs:
        started = []
        for host in range(2):
            words, sets = launcher(host)
            text = json.dumps(words)
            for shown, here in (
                ("integration/configs/quickstart.toml", config_file),
                ("/shared/runs/hosts", out),
            ):
                assert shown in text
                text = text.replace(shown, str(here))
            env = {**environment, "PATH": path, "OMP_NUM_THREADS": "1", **sets}
            started.append(
                programs.start(*on_host(network, host, tmp_path), *json.loads(text), env=env)
            )
        for host, process in enumerate(started):
            printed, logged = process.communicate(timeout=scaled_s(3 * PATIENCE_S))
            assert process.returncode == 0, logged
            # The first rank alone says how it went.
            assert ("held-out bits per byte" in printed) == (host == 0)
    # Sums of fp32 in another order; a rank that trained alone would be off in the first digits.
    assert losses(out) == pytest.approx(losses_of_one, rel=1e-4)
