"""What one GPU can tell: the cost of a launch and of a barrier in a graph, and the fused norm.

Ranks are virtual, in one launch, and reach each other through the memory of the device: these
times say nothing of NVLink.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import triton  # type: ignore[import-untyped]

from pcomm.core.errors import UnsupportedError
from pcomm.core.testing.timing import Row
from pcomm.nvls.testing.virtual_ranks import Operation, VirtualRanks
from pcomm.nvls.workspace.launch import Launch

__all__ = ["measure_one_gpu", "multicast_of_one_device"]

_NAME = "nvls one-gpu"
_CALLS, _REPLAYS = 50, 20


@triton.jit  # type: ignore[untyped-decorator]
def _empty_kernel() -> None:
    pass


def measure_one_gpu(*, size: int = 8) -> Iterator[Row]:
    """Rows of the floor of a launch, the cost of barriers and whether there is multicast. Local.

    Args:
        size: Number of virtual ranks.

    Raises:
        UnsupportedError: There is no GPU.
    """
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "pcomm bench nvls --parts one-gpu",
            found="no CUDA device",
            why="It times kernels on a device.",
            fix="Run it on a machine with a GPU of compute capability 9.0 or later.",
        )
    device = torch.device("cuda", torch.cuda.current_device())
    floor = _in_graph(lambda: _empty_kernel[(1,)]())
    yield Row(_NAME, "an empty kernel in a graph", round(floor, 3), "us", "", None, _REPLAYS)
    ranks = VirtualRanks(size, 1 << 20, device=device)
    xs = [torch.zeros(8, dtype=torch.bfloat16, device=device) for _ in range(size)]
    outs = [torch.empty_like(x) for x in xs]
    operations: tuple[Operation, ...] = ("one_shot", "two_shot")
    for operation in operations:
        # In turns, as the slots are.
        pair = [ranks.launch(operation, outs, xs, num_blocks=1) for _ in range(2)]
        both = _in_graph(partial(_run_all, ranks, pair))
        case = f"16 bytes, {size} virtual ranks, {operation}"
        ratio = round(both / 2 / floor, 3)
        yield Row(
            _NAME,
            case,
            round(both / 2, 3),
            "us",
            "an empty kernel in a graph",
            ratio,
            _REPLAYS,
        )
    ranks.close()
    address, reason = multicast_of_one_device()
    case = "multicast address of one device" + (f": {reason}" if reason else "")
    yield Row(_NAME, case, float(address is not None), "there", "", None, 1)


def multicast_of_one_device() -> tuple[int | None, str]:
    """The multicast address of symmetric memory of one rank, or None and the reason. Local.

    It opens a default process group for the time of the call, and needs a GPU.
    """
    import torch.distributed._symmetric_memory as symmetric

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        memory = symmetric.empty(1 << 21, dtype=torch.uint8, device=torch.device("cuda"))
        handle = symmetric.rendezvous(memory, dist.group.WORLD)
        address = int(handle.multicast_ptr)
        return (address, "") if address else (None, "torch gave 0")
    except RuntimeError as error:
        return None, str(error).partition("\n")[0]
    finally:
        dist.destroy_process_group()


def _run_all(ranks: VirtualRanks, launches: list[Launch]) -> None:
    for launch in launches:
        ranks.run(launch)


def _in_graph(run: Callable[[], Any]) -> float:
    """Microseconds of a call in a graph of several."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    for _ in range(_REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / (_CALLS * _REPLAYS)
