"""How long a counted step takes on a described machine, by a roofline and the simulator."""

from __future__ import annotations

import math
import os
import statistics
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat

from pcomm.core.errors import ConfigError
from pcomm.core.simulate import Cluster, Kind, Rail, SimulatedCommunicator, Task, simulate
from pcomm.integration.config.sections import Size, Text, section
from pcomm.integration.forecast.counted_step import Computed, CountedStep
from pcomm.integration.forecast.lone_rank import Sent

__all__ = ["Machine", "StepTime", "measured_machine", "predict_step", "read_cluster"]

_GIGA = 1e9


@section("cluster")
class Machine:
    """What one rank has, and what is between ranks: the keys of a file for `--cluster`."""

    name: Text = ""
    """What the assumptions call it."""

    ranks_per_host: Size = 8
    """Ranks on one host; groups within a host use `link`, others `network`."""

    memory_gib: PositiveFloat = Field(...)
    """Memory of a rank, in GiB."""

    fp32_tflops: PositiveFloat = Field(...)
    """Rate of a large matrix product in fp32, as measured and not as advertised, in TFLOP/s."""

    bf16_tflops: PositiveFloat = Field(...)
    """The same in bf16."""

    memory_gb_per_s: PositiveFloat = Field(...)
    """Bytes that an elementwise function reads and writes, in GB/s."""

    operation_us: NonNegativeFloat = 0.0
    """Least time of an operation, in microseconds: on a GPU that of a launch."""

    link_gb_per_s: PositiveFloat = Field(...)
    """What a rank sends to ranks of its host, each way, in GB/s."""

    link_us: NonNegativeFloat = 0.0
    """Time of one step of a collective there, without its bytes, in microseconds."""

    network_gb_per_s: PositiveFloat = Field(...)
    """What a rank sends to ranks of other hosts, each way, in GB/s."""

    network_us: NonNegativeFloat = 0.0
    """Time of one step of a collective there, without its bytes, in microseconds."""

    def seconds(self, done: Computed) -> float:
        """The longer of computing and of moving bytes, and the least of an operation."""
        rate = self.bf16_tflops if done.dtype.itemsize == 2 else self.fp32_tflops
        computing = done.flops / (rate * 1e12)
        moving = done.num_bytes / (self.memory_gb_per_s * _GIGA)
        return max(computing, moving) + self.operation_us * 1e-6

    def rails(self) -> list[Rail]:
        """The two networks of a rank."""
        return [
            Rail("link", self.link_gb_per_s * _GIGA, self.link_us * 1e-6),
            Rail("network", self.network_gb_per_s * _GIGA, self.network_us * 1e-6),
        ]

    def rail_of(self, ranks: tuple[int, ...]) -> str:
        """The slowest network between these ranks."""
        return "link" if len({rank // self.ranks_per_host for rank in ranks}) == 1 else "network"


def read_cluster(path: Path) -> Machine:
    """The machine that a TOML file describes.

    Raises:
        ConfigError: The file cannot be read, or a key is unknown, missing or has no such value.
    """
    try:
        with path.open("rb") as file:
            found = tomllib.load(file)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--cluster {path}",
            found=f"{type(error).__name__}: {error}",
            why="The file says in TOML what a rank computes and sends.",
            fix="Write keys such as `bf16_tflops = 600.0`; an empty file names all it needs.",
        ) from error
    return Machine(**found)


# Assumed between local ranks, since none is started to measure it.
_LINK_GB_PER_S, _LINK_US = 1.0, 200.0
# Rows of the matrix that is multiplied, numbers of the vector, and the times it is done.
_ROWS, _NUMBERS, _REPEATS = 2048, 2**21, 9


def measured_machine(num_ranks: int, width: int) -> Machine:
    """This machine's CPU, from a matrix product as wide as the model, SiLU, and a tiny addition.

    Takes about 0.2 s. Local. In seconds of the processor, which other programs do not add to, and
    with as many threads as each of `num_ranks` local ranks gets.
    """
    threads = max(1, (os.cpu_count() or 1) // num_ranks)
    with _threads(threads), torch.no_grad():
        rates = []
        for dtype in (torch.float32, torch.bfloat16):
            left = torch.ones(_ROWS, width, dtype=dtype)
            right = torch.ones(width, 4 * width, dtype=dtype)
            taken_s = _typical_s(partial(torch.matmul, left, right)) / threads
            rates.append(2 * _ROWS * width * 4 * width / taken_s / 1e12)
        vector, number = torch.zeros(_NUMBERS), torch.zeros(1)
        silu_s = _typical_s(lambda: torch.nn.functional.silu(vector)) / threads
        tiny_s = _typical_s(lambda: [number.add(1) for _ in range(_REPEATS)]) / _REPEATS
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(
        name="this machine's CPU",
        ranks_per_host=num_ranks,
        memory_gib=memory / 2**30 / num_ranks,
        fp32_tflops=rates[0],
        bf16_tflops=rates[1],
        memory_gb_per_s=2 * vector.nbytes / silu_s / _GIGA,
        operation_us=tiny_s * 1e6,
        link_gb_per_s=_LINK_GB_PER_S,
        link_us=_LINK_US,
        network_gb_per_s=_LINK_GB_PER_S,
        network_us=_LINK_US,
    )


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _typical_s(call: Callable[[], object]) -> float:
    call()
    found = []
    for _ in range(_REPEATS):
        start = time.process_time()
        call()
        found.append(time.process_time() - start)
    return max(statistics.median(found), 1e-9)


@dataclass(frozen=True)
class StepTime:
    """A prediction of a model, never a measurement.

    Args:
        seconds: Seconds of a step.
        computing_s: Seconds of it in which the rank computes; in the others it waits.
    """

    seconds: float
    computing_s: float


def predict_step(step: CountedStep, machine: Machine, num_ranks: int) -> StepTime:
    """The time of a step if all ranks do what rank 0 was counted to do. Local.

    An operation takes the longer of its flops and its bytes. Collectives are rings that run beside
    computing, and share the link of their rank.

    Args:
        step: The counted step.
        machine: What a rank computes and sends.
        num_ranks: All ranks.
    """
    tasks: list[Task] = []
    rails: dict[str, tuple[str, int]] = {}
    before: tuple[str, ...] = ()
    names: dict[int, str] = {}
    seconds = total = 0.0

    def compute() -> None:
        nonlocal seconds, before
        name = f"compute {len(tasks)}"
        tasks.append(Task(name, "compute", "compute", seconds=seconds, after=before))
        before, seconds = (name,), 0.0

    for place, event in enumerate(step.events):
        if isinstance(event, Computed):
            took = machine.seconds(event)
            seconds, total = seconds + took, total + took
            continue
        compute()
        if isinstance(event, Sent):
            key, names[place] = event.group.key, f"{event.group.key} {place}"
            rails[key] = (machine.rail_of(event.group.ranks), event.group.size)
            kind, size = cast(Kind, event.operation), event.num_bytes
            tasks.append(Task(names[place], key, kind, num_bytes=size, after=before))
        else:
            before += (names[event.number],)
    compute()
    # Ranks do the same, so it does not matter which of them share a group, only how many.
    ranks = range(math.lcm(num_ranks, *(size for _, size in rails.values())))
    communicators = [
        SimulatedCommunicator(
            key, rail, tuple(tuple(ranks[i : i + size]) for i in range(0, len(ranks), size))
        )
        for key, (rail, size) in rails.items()
    ]
    timeline = simulate(dict.fromkeys(ranks, tasks), Cluster(machine.rails(), communicators))
    return StepTime(timeline.makespan_s, total)
