"""What a machine without a GPU can tell: launches into nothing, compiled kernels, emulated ranks.

The time of the host until a launch reaches the driver stands beside torch.distributed's. There is
no device: the driver call does nothing. The baseline has none either: a process group of torch's
"fake" backend returns at once, so what is left is torch's way to a backend, without what a backend
such as NCCL adds on the host.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist

from core_bench.rows import Row, row
from core_bench.runner import Timing, time_cases
from core_support.fake_driver import fake_driver
from nvls_support.calls import calls
from nvls_support.compiled import compile_kernel
from nvls_support.fake_device import fake_workspace
from pcomm.core.errors import ConfigError
from pcomm.core.process.local_ranks import LocalRanks
from pcomm.nvls.collectives.gathers import all_gather_into_tensor
from pcomm.nvls.collectives.reductions import all_reduce, all_reduce_question, reduce_scatter_tensor
from pcomm.nvls.policy.choose import CollectiveRequest
from pcomm.nvls.workspace.launch import Launch

# What each case is compared with.
BASELINES = {
    "all_reduce": "torch's all_reduce",
    "all_gather_into_tensor": "torch's all-gather",
    "reduce_scatter_tensor": "torch's reduce-scatter",
}
DECISION = "choosing the algorithm again"


def time_host(*, world: int, rounds: int) -> dict[str, Timing]:
    """Microseconds of each call with results that are allocated before, and of a decision. Local.

    Args:
        world: Number of ranks that launches are made for.
        rounds: Number of rounds.

    Raises:
        ConfigError: torch.distributed is in use in this process.
    """
    if dist.is_initialized():
        raise ConfigError(
            "pcomm bench nvls --parts host",
            found="a default process group in this process",
            why="The baselines need groups of their own.",
            fix="Run it as one process, without torchrun.",
        )
    x = torch.zeros(world * 512, dtype=torch.bfloat16)
    shard, whole, sums = x[:512], torch.zeros(world * 512, dtype=torch.bfloat16), x.clone()
    segment = torch.zeros(512, dtype=torch.bfloat16)
    with fake_driver(), fake_workspace(world) as workspace, torch.inference_mode():
        question: CollectiveRequest = all_reduce_question(x, workspace)
        ours: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: all_reduce(x, out=sums, workspace=workspace),
            "all_gather_into_tensor": lambda: all_gather_into_tensor(
                shard, out=whole, workspace=workspace
            ),
            "reduce_scatter_tensor": lambda: reduce_scatter_tensor(
                x, out=segment, workspace=workspace
            ),
            DECISION: lambda: workspace.choose(question),
        }
        for run in ours.values():
            for _ in range(4):
                run()
        with _fake_group(world) as group:
            gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
            scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
            theirs: dict[str, Callable[[], object]] = {
                "torch's all_reduce": lambda: dist.all_reduce(x, group=group),
                "torch's all-gather": lambda: gather(whole, shard, group=group),
                "torch's reduce-scatter": lambda: scatter(segment, x, group=group),
            }
            # Nothing here waits or uses another thread, so other programs need not count.
            return time_cases(ours | theirs, rounds=rounds, clock=time.thread_time)


@contextmanager
def _fake_group(size: int) -> Iterator[dist.ProcessGroup]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


class Build(NamedTuple):
    """A kernel that was compiled."""

    operation: str
    algorithm: str
    # 90 for Hopper.
    architecture: int
    # Time of the compiler, with an empty cache.
    seconds: float
    # Of a thread, as the bytes in local memory.
    registers: int
    spilled_bytes: int
    num_blocks: int
    num_warps: int


def builds(*, world: int, architectures: Sequence[int]) -> Iterator[Build]:
    """Compile the kernel of each operation and algorithm. Local; needs Linux and no GPU.

    Args:
        world: Number of ranks that kernels are compiled for.
        architectures: Architectures, 90 for Hopper.
    """
    with _empty_cache():
        for architecture in architectures:
            for (operation, algorithm), launch in recorded_launches(world, architecture).items():
                begin = time.perf_counter()
                made = compile_kernel(
                    launch.kernel,
                    launch.arguments,
                    architecture,
                    num_warps=launch.num_warps,
                    max_registers=launch.max_registers,
                )
                seconds, usage = time.perf_counter() - begin, made.resources()
                used = usage["REG"], usage["STACK"] + usage["LOCAL"]
                grid = launch.num_blocks, launch.num_warps
                yield Build(operation, algorithm, architecture, seconds, *used, *grid)


def recorded_launches(
    world: int, architecture: int, *, rows: int = 64, hidden: int = 512, lamport: bool = True
) -> dict[tuple[str, str], Launch]:
    """What each operation would launch on ranks that are not there, by operation and algorithm.

    Args:
        world: Number of ranks.
        architecture: Architecture, 90 for Hopper.
        rows: Number of rows of the whole tensor, as in `calls`.
        hidden: Length of a row.
        lamport: Whether that algorithm is among them, which takes small tensors only.
    """
    found: dict[tuple[str, str], Launch] = {}
    with (
        fake_driver(architecture),
        # With `debug` no call is kept, of which there would have to be a compiled kernel.
        fake_workspace(world, 1 << 26, capability=architecture, debug=True) as workspace,
    ):
        launches: list[Launch] = []
        workspace.launcher.run = launches.append  # type: ignore[method-assign, assignment]
        for case, run in calls(workspace, rows=rows, hidden=hidden).items():
            if lamport or case[1] != "lamport":
                run()
                found[case] = launches[-1]
    return found


@contextmanager
def _empty_cache() -> Iterator[None]:
    before = os.environ.get("TRITON_CACHE_DIR")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        try:
            yield
        finally:
            del os.environ["TRITON_CACHE_DIR"]
            if before is not None:
                os.environ["TRITON_CACHE_DIR"] = before


def check_emulated(world: int) -> str:
    """Run the self-test on emulated ranks. Local; some seconds.

    Args:
        world: Number of processes.

    Returns:
        One line: how many findings there are, and which of them are bad.
    """
    with LocalRanks(world, imports_main=False) as ranks:
        found = ranks.run(_self_test)[0]
    bad = [f"{name}: {status}" for name, status in found if status == "broken"]
    told = "all right" if not bad else "; ".join(bad)
    return f"emulated, {world} ranks: {len(found)} findings, {told}"


def _self_test() -> list[tuple[str, str]]:
    """On a rank: name and status of each finding."""
    from nvls_support.emulation import emulate

    emulate()
    import torch.distributed as dist

    from pcomm.core.groups.group import Group
    from pcomm.nvls._self_test import self_test
    from pcomm.nvls.workspace.workspace import Workspace

    assert dist.group.WORLD is not None
    group = Group.from_process_group("world", dist.group.WORLD)
    with Workspace(group, 1 << 14) as workspace:
        report = self_test(workspace, repetitions=2)
    return [(finding.name, finding.status) for finding in report.findings]


def host_rows(timings: Mapping[str, Timing]) -> list[Row]:
    """A row for each call with the ratio to torch.distributed's, and one for a decision."""
    rows = []
    for case, timing in timings.items():
        theirs = BASELINES.get(case)
        beside = (theirs, timing.ratio_to(timings[theirs])) if theirs else None
        number = len(timing.rounds_us)
        rows.append(row("nvls host", case, timing.median_us, "us", number, beside=beside))
    return rows


def build_rows(found: Sequence[Build]) -> list[Row]:
    """Seconds, registers, spilled bytes and blocks of each kernel, as a grid."""
    rows = []
    for build in found:
        place = f"{build.operation}, {build.algorithm}, sm_{build.architecture}"
        values = {
            "compile time": (build.seconds, "s"),
            "registers": (build.registers, "of a thread"),
            "spilled": (build.spilled_bytes, "of a thread"),
            "blocks": (build.num_blocks, "of a launch"),
            "warps": (build.num_warps, "of a launch"),
        }
        rows += [row("nvls compile", f"{case} @ {place}", *v) for case, v in values.items()]
    return rows
