"""How long a counted step takes on a described machine, by a roofline and the simulator."""

from __future__ import annotations

import math
import os
import socket
import statistics
import threading
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat

from pcomm.core.errors import ConfigError
from pcomm.core.simulate import Cluster, Kind, Rail, SimulatedCommunicator, Task, simulate
from pcomm.integration.config.sections import Dtype, Size, Text, section
from pcomm.integration.forecast.counted_step import Computed, CountedStep
from pcomm.integration.forecast.lone_rank import Sent
from pcomm.integration.forecast.replay import Replay, share_of_cores, threads_of_rank

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

    socket_gb_per_s: NonNegativeFloat = 0.0
    """What a rank could send and receive at once if its processor did nothing else, in GB/s, where
    that has to do it. 0: it has not, as with NCCL."""

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

    @property
    def memory_bytes(self) -> int:
        """Memory of a rank."""
        return int(self.memory_gib * 2**30)

    def assumptions(self, dtype: Dtype) -> list[str]:
        """What a time rests on that was predicted for this machine, to be read."""
        tflops = self.bf16_tflops if dtype == "bf16" else self.fp32_tflops
        return [
            f"{self.name or 'the cluster'}: {tflops:.3g} TFLOP/s in {dtype}, "
            f"{self.memory_gb_per_s:.3g} GB/s of memory, {self.operation_us:.1f} us an operation;",
            f"{self.link_gb_per_s:.3g} GB/s and {self.link_us:.0f} us between ranks of a host, "
            f"{self.network_gb_per_s:.3g} GB/s and {self.network_us:.0f} us between hosts",
        ]

    def rails(self) -> list[Rail]:
        """The two networks of a rank."""
        own = self.socket_gb_per_s * _GIGA or math.inf
        link, network = self.link_gb_per_s * _GIGA, self.network_gb_per_s * _GIGA
        return [
            Rail("link", link, self.link_us * 1e-6, processor_bytes_per_s=own),
            Rail("network", network, self.network_us * 1e-6, processor_bytes_per_s=own),
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
# An operation is done again if its tensors take no more than this share of a rank's memory.
_REPLAYED = 0.25
# Bytes that are sent through a socket.
_SENT = 2**25
# Rows of the matrix that is multiplied, numbers of the vector, and the times it is done.
_ROWS, _NUMBERS, _REPEATS = 2048, 2**21, 9


def measured_machine(num_ranks: int, width: int) -> Machine:
    """This machine's CPU, from a product as wide as the model, SiLU, a tiny addition and a socket.

    Takes about 0.2 s. Local. In seconds of the processor, which other programs do not add to, and
    on the cores, or the share of one, that each of `num_ranks` local ranks gets.
    """
    share = share_of_cores(num_ranks)
    with threads_of_rank(num_ranks), torch.no_grad():
        rates = []
        for dtype in (torch.float32, torch.bfloat16):
            left = torch.ones(_ROWS, width, dtype=dtype)
            right = torch.ones(width, 4 * width, dtype=dtype)
            taken_s = _typical_s(partial(torch.matmul, left, right)) / share
            rates.append(2 * _ROWS * width * 4 * width / taken_s / 1e12)
        vector, number = torch.zeros(_NUMBERS), torch.zeros(1)
        silu_s = _typical_s(lambda: torch.nn.functional.silu(vector)) / share
        tiny_s = _typical_s(lambda: [number.add(1) for _ in range(_REPEATS)]) / _REPEATS
        tiny_s /= min(1.0, share)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(
        name="this machine's CPU",
        ranks_per_host=num_ranks,
        memory_gib=memory / 2**30 / num_ranks,
        fp32_tflops=rates[0],
        bf16_tflops=rates[1],
        memory_gb_per_s=2 * vector.nbytes / silu_s / _GIGA,
        operation_us=tiny_s * 1e6,
        socket_gb_per_s=_socket_gb_per_s() * min(1.0, share),
        link_gb_per_s=_LINK_GB_PER_S,
        link_us=_LINK_US,
        network_gb_per_s=_LINK_GB_PER_S,
        network_us=_LINK_US,
    )


def _socket_gb_per_s() -> float:
    """Bytes over the time of the processor that a process needs to send itself so many."""
    data, into = bytes(_SENT), bytearray(_SENT)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as sender,
        server.accept()[0] as receiver,
    ):

        def receive() -> None:
            view = memoryview(into)
            while view:
                view = view[receiver.recv_into(view) :]

        start = time.process_time()
        receiving = threading.Thread(target=receive)
        receiving.start()
        sender.sendall(data)
        receiving.join()
        return _SENT / max(time.process_time() - start, 1e-9) / _GIGA


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


def _seconds_of(
    computed: Sequence[Computed], machine: Machine, replay: Replay | None
) -> list[float]:
    """What each operation takes; of those that were not timed, as far off as the others were."""
    expected = [machine.seconds(one) for one in computed]
    if replay is None:
        return expected
    replay.measure(
        (one.call, seconds)
        for one, seconds in zip(computed, expected, strict=True)
        if one.call is not None and one.num_bytes <= machine.memory_bytes * _REPLAYED
    )
    timed = [replay.seconds(one.call) for one in computed]
    both = [(t, e) for t, e in zip(timed, expected, strict=True) if t is not None]
    factor = sum(t for t, _ in both) / sum(e for _, e in both) if both else 1.0
    return [factor * e if t is None else t for t, e in zip(timed, expected, strict=True)]


def predict_step(
    step: CountedStep, machine: Machine, num_ranks: int, replay: Replay | None = None
) -> StepTime:
    """The time of a step if all ranks do what rank 0 was counted to do. Local.

    An operation takes the longer of its flops and its bytes, or what it took here. Collectives are
    rings that run beside computing and share the link of their rank, and where the processor sends,
    the processor.

    Args:
        step: The counted step.
        machine: Speeds of a rank and its links.
        num_ranks: All ranks.
        replay: Times of operations on this machine; None for the rates of `machine` alone.
    """
    computed = [event for event in step.events if isinstance(event, Computed)]
    seconds_of = dict(zip(map(id, computed), _seconds_of(computed, machine, replay), strict=True))
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
            took = seconds_of[id(event)]
            seconds, total = seconds + took, total + took
            continue
        compute()
        if isinstance(event, Sent):
            key, names[place] = event.group.key, f"{event.group.key} {place}"
            rails[key] = (machine.rail_of(event.group.ranks), event.group.size)
            kind, size = cast(Kind, event.operation), event.num_bytes
            tasks.append(Task(names[place], key, kind, num_bytes=size, after=before))
            if machine.socket_gb_per_s:
                total += event.sent_bytes / (machine.socket_gb_per_s * _GIGA)
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
