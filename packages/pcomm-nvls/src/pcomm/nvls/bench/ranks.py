"""Times of the operations between the GPUs of this machine, under torchrun.

Each time is that of a call in a CUDA graph of many, on the slowest rank, so that the host does not
count. Beside it stand torch.distributed's and torch's own symmetric-memory operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pcomm.core.errors import UnsupportedError
from pcomm.core.groups.group import Group
from pcomm.nvls.collectives.all_gather_into_tensor import all_gather_into_tensor
from pcomm.nvls.collectives.all_reduce import all_reduce
from pcomm.nvls.collectives.inputs import VECTOR_BYTES
from pcomm.nvls.collectives.reduce_scatter_tensor import reduce_scatter_tensor
from pcomm.nvls.policy.operations import ALGORITHMS, Algorithm
from pcomm.nvls.workspace.workspace import Workspace

__all__ = ["RankTime", "check_has_gpus", "divided_sizes", "measure_ranks"]

_CALLS, _REPLAYS = 20, 20
_OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "all_gather_into_tensor": all_gather_into_tensor,
    "reduce_scatter_tensor": reduce_scatter_tensor,
    "all_reduce": all_reduce,
}


@dataclass(frozen=True)
class RankTime:
    """The time of one way to do an operation.

    Args:
        operation: Name of the operation; "barrier" for the least one, an all-reduce of 16 bytes.
        algorithm: "lamport", "multimem", "p2p", "torch.distributed" or "torch symm_mem".
        num_bytes: Size of the whole tensor, in bytes.
        world: Number of ranks.
        microseconds: Time of a call on the slowest rank.
    """

    operation: str
    algorithm: str
    num_bytes: int
    world: int
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
