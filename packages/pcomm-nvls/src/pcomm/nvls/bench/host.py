"""The time of the host until a launch reaches the driver, beside torch.distributed's.

There is no device: the driver call does nothing. The baseline has none either: a process group of
torch's "fake" backend returns at once, so what is left is torch's way to a backend, without what
a backend such as NCCL adds on the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from pcomm.core.errors import ConfigError
from pcomm.core.testing.timing import Timing, time_cases
from pcomm.nvls.collectives.all_gather_into_tensor import all_gather_into_tensor
from pcomm.nvls.collectives.all_reduce import all_reduce, all_reduce_question
from pcomm.nvls.collectives.reduce_scatter_tensor import reduce_scatter_tensor
from pcomm.nvls.policy.facts import Question
from pcomm.nvls.testing.fake_device import fake_driver, fake_workspace

__all__ = ["BASELINES", "DECISION", "time_host"]

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
        question: Question = all_reduce_question(x, workspace)
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
