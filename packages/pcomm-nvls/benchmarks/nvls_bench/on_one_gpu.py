"""What one GPU can tell: what a launch, a barrier and the norm cost, and if it has multicast.

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

from core_bench.rows import Row, row
from nvls_support.virtual_ranks import Operation, VirtualRanks
from pcomm.core.errors import UnsupportedError
from pcomm.nvls.policy.table import MAX_BLOCKS
from pcomm.nvls.references import rms_norm
from pcomm.nvls.workspace.launch import Launch

_NAME = "nvls one-gpu"
_FLOOR = "an empty kernel in a graph"
_CALLS, _REPLAYS = 50, 20


@triton.jit  # type: ignore[untyped-decorator]
def _empty_kernel() -> None:
    pass


def measure_one_gpu(*, size: int = 8) -> Iterator[Row]:
    """Rows of a launch, of barriers, of the norm, and whether there is multicast. Local.

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
    yield row(_NAME, _FLOOR, floor, "us", _REPLAYS)
    ranks = VirtualRanks(size, 1 << 20, device=device)
    xs = [torch.zeros(8, dtype=torch.bfloat16, device=device) for _ in range(size)]
    outs = [torch.empty_like(x) for x in xs]
    operations: tuple[Operation, ...] = ("one_shot", "two_shot")
    for operation in operations:
        # In turns, as the slots are.
        pair = [ranks.launch(operation, outs, xs, num_blocks=1) for _ in range(2)]
        both = _in_graph(partial(_run_all, ranks, pair))
        case = f"16 bytes, {size} virtual ranks, {operation}"
        yield row(_NAME, case, both / 2, "us", _REPLAYS, beside=(_FLOOR, both / 2 / floor))
    ranks.close()
    yield from norm_rows(device)
    address, reason = multicast_of_one_device()
    case = "multicast address of one device" + (f": {reason}" if reason else "")
    yield row(_NAME, case, float(address is not None), "there")


def norm_rows(device: torch.device, *, rows: int = 16384, hidden: int = 8192) -> Iterator[Row]:
    """Rows of residual and norm beside a copy that reads and writes as many bytes. Local.

    Groups of one rank fill the device, `MAX_BLOCKS` blocks each. Addends and residual are read, the
    new residual and the normed rows written: a copy of a tensor of twice the size does that, too.

    Args:
        device: GPU.
        rows: Number of rows of all groups together, about; 4 times their bytes exceed the caches.
        hidden: Length of a row, in numbers of bf16.
    """
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    # Two blocks a processor, where there are registers for both.
    size = max(1, 2 * processors // MAX_BLOCKS)
    each = rows // size
    ranks = VirtualRanks(size, each * hidden * 2, device=device)
    residual = torch.randn(size * each, hidden, device=device, dtype=torch.bfloat16)
    weight = torch.randn(hidden, device=device, dtype=torch.bfloat16)
    stream, out = torch.empty_like(residual), torch.empty_like(residual)
    for rank in range(size):
        ranks.addends(rank, (each, hidden), residual.dtype).fill_(rank + 1)
    launch = ranks.launch_norm(out, stream, residual, weight, 1e-6, num_blocks=MAX_BLOCKS)
    norm_us = _in_graph(partial(ranks.run, launch))
    own = torch.arange(1, size + 1, device=device).repeat_interleave(each)[:, None]
    wanted = residual + own.to(residual.dtype)
    # The order in which squares are added may differ: the last digit of bf16 may, too.
    torch.testing.assert_close(stream, wanted, rtol=0, atol=0)
    torch.testing.assert_close(out, rms_norm(wanted, weight, 1e-6), rtol=2**-7, atol=0)
    source, target = (torch.empty(2, *residual.shape, device=device, dtype=residual.dtype)
                      for _ in range(2))  # fmt: skip
    copy_us = _in_graph(partial(target.copy_, source))
    ranks.close()
    copy = f"a copy of {2 * source.nbytes >> 20} MiB read and written"
    norm = f"residual and norm of {size * each} x {hidden}, {size} x {MAX_BLOCKS} blocks"
    yield row(_NAME, copy, copy_us, "us", _REPLAYS)
    yield row(_NAME, norm, norm_us, "us", _REPLAYS, beside=(copy, norm_us / copy_us))
    yield row(_NAME, norm, copy_us / norm_us, "of the bound", _REPLAYS)


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
