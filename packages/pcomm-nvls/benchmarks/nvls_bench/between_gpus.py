"""Times of the operations between the GPUs of this machine, under torchrun, and rows of the table.

Each time is that of a call in a CUDA graph of many, on the slowest rank, so that the host does not
count. Beside it stand torch.distributed's and torch's own symmetric-memory operations, and the
least time that an operation can take: a latency, and bytes over the rate of a link. Bytes that a
GPU sends and receives: NCCL's maintainers for gathers and reduce-scatters (NVIDIA/nccl issues 1083
and 1506), NCCL's model in `sym_kernels.cc` for all-reduces in two steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from core_bench.rows import Row, row
from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.core.groups.group import Group
from pcomm.nvls.collectives.call import VECTOR_BYTES
from pcomm.nvls.collectives.gathers import all_gather_into_tensor
from pcomm.nvls.collectives.reductions import all_reduce, reduce_scatter_tensor
from pcomm.nvls.policy.table import ALGORITHMS, Algorithm, Band, Table, Threshold, operation_named
from pcomm.nvls.workspace.workspace import Workspace

_CALLS, _REPLAYS = 20, 20
_NAME, _BASELINE = "nvls ranks", "torch.distributed"
_OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "all_gather_into_tensor": all_gather_into_tensor,
    "reduce_scatter_tensor": reduce_scatter_tensor,
    "all_reduce": all_reduce,
}


class RankTime(NamedTuple):
    """The time of one way to do an operation."""

    # "barrier" for the least one, an all-reduce of 16 bytes.
    operation: str
    # "lamport", "multimem", "p2p", "torch.distributed" or "torch symm_mem".
    algorithm: str
    # Of the whole tensor.
    num_bytes: int
    world: int
    # Of a call, on the slowest rank.
    microseconds: float


def check_has_gpus() -> None:
    """Refuse a machine with fewer than two GPUs, and a process outside of torchrun.

    Raises:
        UnsupportedError: It is one.
    """
    number = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if number < 2 or not dist.is_torchelastic_launched():
        found = f"{number} GPUs" if number < 2 else "a process without ranks"
        raise UnsupportedError(
            "pcomm bench nvls --parts ranks",
            found=found,
            why="It times transfers between GPUs.",
            fix="Run it as `torchrun --nproc-per-node=N $(which pcomm) bench nvls --parts ranks` "
            "on a machine with N >= 2 GPUs and NVLink.",
        )


def divided_sizes(sizes: Sequence[int], world: int) -> list[int]:
    """The sizes, each rounded up so that a rank's part is a multiple of 16 bytes; none twice. Pure.

    Args:
        sizes: Sizes of whole tensors, in bytes.
        world: Number of ranks.
    """
    step = VECTOR_BYTES * world
    return sorted({-(-size // step) * step for size in sizes})


def measure_ranks(sizes: Sequence[int]) -> Iterator[RankTime]:
    """Time each operation, algorithm and size. Collective over all ranks of torchrun.

    Args:
        sizes: Sizes of the whole tensors, in bytes; see `divided_sizes`.

    Raises:
        UnsupportedError: There are no two GPUs.
    """
    check_has_gpus()
    torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group("nccl")
    try:
        assert dist.group.WORLD is not None
        group = Group.from_process_group("world", dist.group.WORLD)
        divided = divided_sizes(sizes, group.size)
        largest = max(divided)
        with Workspace(group, largest, lamport_bytes=min(largest, 1 << 20)) as workspace:
            yield from _all_times(workspace, divided)
    finally:
        dist.destroy_process_group()


def _all_times(workspace: Workspace, sizes: Sequence[int]) -> Iterator[RankTime]:
    world, device = workspace.group.size, workspace.device
    tiny = torch.zeros(8, dtype=torch.bfloat16, device=device)
    with_barrier: tuple[Algorithm, ...] = ("multimem", "p2p")
    for algorithm in with_barrier:
        try:
            alone = partial(all_reduce, tiny, out=tiny, workspace=workspace, algo=algorithm)
            least = _time(workspace, alone)
        except UnsupportedError:
            continue
        yield RankTime("barrier", algorithm, 16, world, least)
    for num_bytes in sizes:
        whole = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=device)
        part = torch.zeros(num_bytes // 2 // world, dtype=torch.bfloat16, device=device)
        tensors = {
            "all_gather_into_tensor": (whole, part),
            "reduce_scatter_tensor": (part, whole),
            "all_reduce": (torch.empty_like(whole), whole),
        }
        for operation, (out, x) in tensors.items():
            for name, run in _ways(workspace, operation, out, x).items():
                try:
                    yield RankTime(operation, name, num_bytes, world, _time(workspace, run))
                except UnsupportedError:  # the same on all ranks: too large, or no multicast
                    continue


def _ways(
    workspace: Workspace, operation: str, out: Tensor, x: Tensor
) -> dict[str, Callable[[], Any]]:
    ours = _OPERATIONS[operation]
    ways: dict[str, Callable[[], Any]] = {
        algorithm: partial(ours, x, out=out, workspace=workspace, algo=algorithm)
        for algorithm in ALGORITHMS
        if algorithm != "dist"
    }
    match operation:
        case "all_gather_into_tensor":
            ways["torch.distributed"] = lambda: dist.all_gather_into_tensor(out, x)
        case "reduce_scatter_tensor":
            ways["torch.distributed"] = lambda: dist.reduce_scatter_tensor(out, x)
        case _:
            ways["torch.distributed"] = lambda: dist.all_reduce(x)
            symmetric = _torch_symmetric(workspace, x)
            if symmetric is not None:
                ways["torch symm_mem"] = symmetric
    return ways


def _torch_symmetric(workspace: Workspace, x: Tensor) -> Callable[[], Any] | None:
    """Torch's own all-reduce by multicast, where it has one."""
    if not workspace.capability.multicast or not hasattr(torch.ops, "symm_mem"):
        return None
    import torch.distributed._symmetric_memory as symmetric

    run = getattr(torch.ops.symm_mem, "multimem_all_reduce_", None)
    if run is None:
        return None
    group = workspace.group.process_group
    assert group is not None
    buffer = symmetric.empty(x.numel(), dtype=x.dtype, device=x.device)
    symmetric.rendezvous(buffer, group)
    return lambda: run(buffer, "sum", group.group_name)


def _time(workspace: Workspace, run: Callable[[], Any]) -> float:
    """Microseconds of a call in a graph of several, on the slowest rank."""
    workspace.prepare(run)
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), workspace.sequence():
        for _ in range(_CALLS):
            run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    dist.barrier()
    begin.record()
    for _ in range(_REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    own = begin.elapsed_time(end) * 1e3 / (_CALLS * _REPLAYS)
    slowest = torch.tensor([own], device=workspace.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest.item())


LINK_RATES = {"sm_90": 450e9, "sm_100": 900e9, "sm_103": 900e9}
"""Bytes a second in one direction of all NVLinks of a GPU, from public specifications."""


def bytes_of(operation: str, algorithm: str, num_bytes: int, world: int) -> tuple[float, float]:
    """What a GPU sends and receives, in bytes.

    Args:
        operation: "all_gather_into_tensor", "reduce_scatter_tensor" or "all_reduce" (two steps).
        algorithm: "multimem" for the switch, another one for each rank to each.
        num_bytes: Size of the whole tensor, in bytes.
        world: Number of ranks.

    Raises:
        ConfigError: Another operation.
    """
    part = num_bytes / world
    direct = (world - 1) * part
    by_switch = algorithm == "multimem"
    match operation:
        case "all_gather_into_tensor":
            return (part, num_bytes) if by_switch else (direct, direct)
        case "reduce_scatter_tensor":
            return (num_bytes, part) if by_switch else (direct, direct)
        case "all_reduce":
            both = num_bytes + part
            return (both, both) if by_switch else (2 * direct, 2 * direct)
    raise ConfigError(
        f"bytes_of: {operation!r}",
        found="an operation without a known limit",
        why="A ratio to a limit needs the bytes on the links.",
        fix="Use all_gather_into_tensor, reduce_scatter_tensor or all_reduce.",
    )


def least_us(
    operation: str, algorithm: str, num_bytes: int, world: int, *, rate: float, latency_us: float
) -> float:
    """Microseconds that an operation takes at least.

    Args:
        operation: Name of the operation, as in `bytes_of`.
        algorithm: Name of the algorithm, as in `bytes_of`.
        num_bytes: Size of the whole tensor, in bytes.
        world: Number of ranks.
        rate: Bytes a second in one direction.
        latency_us: Time of a barrier alone on the same machine, in microseconds.
    """
    sent, received = bytes_of(operation, algorithm, num_bytes, world)
    return latency_us + max(sent, received) / rate * 1e6


def tuned_bands(architecture: str, times: Sequence[RankTime], *, source: str) -> list[Band]:
    """Bands for the operations that were measured, to be put before those of the table.

    Args:
        architecture: Architecture of the devices, such as "sm_90".
        times: Times of one number of ranks.
        source: Origin of the times, for the rows.
    """
    by_operation: dict[str, list[RankTime]] = defaultdict(list)
    for time in times:
        if time.operation != "barrier":
            by_operation[time.operation].append(time)
    bands = []
    for operation, found in by_operation.items():
        world = found[0].world
        before = Table().rows(architecture, operation, world)
        rows = rows_from_times(operation, found, before, source=source)
        bands.append(Band((architecture,), (operation,), (world, world), tuple(rows)))
    return bands


def rows_from_times(
    operation: str, times: Sequence[RankTime], before: Sequence[Threshold], *, source: str
) -> list[Threshold]:
    """Rows in ascending size: each is the fastest from the row before up to its own size.

    A boundary lies at the last measured size at which the algorithm was the fastest. Where
    torch.distributed is the fastest from some size on, the last row ends before it; where it
    always is, the only row says so.

    Args:
        operation: Name of the operation.
        times: Its times for one number of ranks.
        before: Rows of the table so far, whose grids are kept.
        source: Origin of the times.
    """
    spec = operation_named(operation)
    fastest: list[tuple[int, str]] = []
    for num_bytes in sorted({time.num_bytes for time in times}):
        here = [time for time in times if time.num_bytes == num_bytes]
        best = min(here, key=lambda time: time.microseconds).algorithm
        message = num_bytes // times[0].world if spec.is_segment else num_bytes
        fastest.append((message, best if best in ALGORITHMS else _BASELINE))
    rows: list[Threshold] = []
    for place, (num_bytes, algorithm) in enumerate(fastest):
        is_last = place + 1 == len(fastest) or fastest[place + 1][1] != algorithm
        if not is_last:
            continue
        if algorithm == _BASELINE:
            if any(other != _BASELINE for _, other in fastest[place + 1 :]):
                rows.append(Threshold("dist", num_bytes, 0, 0, source))
            continue
        blocks, warps = _grid(algorithm, num_bytes, before)
        name: Algorithm = next(known for known in ALGORITHMS if known == algorithm)
        rows.append(Threshold(name, num_bytes, blocks, warps, source))
    return rows or [Threshold("dist", fastest[-1][0], 0, 0, source)]


def _grid(algorithm: str, num_bytes: int, before: Sequence[Threshold]) -> tuple[int, int]:
    """Blocks and warps that the table had for this size, or for its largest one."""
    same = [row for row in before if row.algorithm == algorithm]
    fits = [row for row in same if row.max_bytes >= num_bytes] or same[-1:]
    return (fits[0].num_blocks, fits[0].num_warps) if fits else (8, 16)


def rank_rows(times: Sequence[RankTime], architecture: str) -> list[Row]:
    """Time, bandwidth and the ratio to torch.distributed and to the least time, for each size."""
    rows = []
    latencies = [time.microseconds for time in times if time.operation == "barrier"]
    theirs = {
        (time.operation, time.num_bytes): time.microseconds
        for time in times
        if time.algorithm == "torch.distributed"
    }
    for time in times:
        place = f"{time.operation}, {time.num_bytes} bytes, {time.world} ranks"
        case, us = f"{time.algorithm} @ {place}", time.microseconds
        beside = None
        if time.algorithm != _BASELINE and (time.operation, time.num_bytes) in theirs:
            ratio = us / theirs[time.operation, time.num_bytes]
            beside = (f"{_BASELINE} @ {place}", ratio)
        rows.append(row(_NAME, case, us, "us", beside=beside))
        if time.operation == "barrier":
            continue
        rows.append(row(_NAME, case, time.num_bytes / us / 1e3, "GB/s"))
        if latencies and architecture in LINK_RATES:
            what = time.operation, time.algorithm, time.num_bytes, time.world
            rate = LINK_RATES[architecture]
            least = least_us(*what, rate=rate, latency_us=min(latencies))
            rows.append(row(_NAME, case, least / us, "of the limit"))
    return rows
