"""What a group look-up costs over a dict's, and a collective call over the bare torch call.

A collective between processes takes tens of microseconds on gloo and varies by more than what is
asked here. So the results are compared on two real gloo ranks first, and the time is taken with
torch's `fake` backend, whose operations return at once: what is left is the host's work, the same
for both calls but for ours. Tensors of 4 elements, `out` given. Aim: at most 2 microseconds more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from core_bench.rows import Row
from core_bench.runner import compare, run_benchmark, time_cases
from pcomm.core import Groups, run_local
from pcomm.core.collectives import DistributedCollectives
from pcomm.core.testing import assert_equal

NAME = "host_cost"
SIZE = 2
# Torch 2.13 renamed it.
bare_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Pair:
    """The same done by us and by the bare call; `result` is the tensor that both write."""

    ours: Callable[[], object]
    bare: Callable[[], object]
    result: Tensor


def measure() -> list[Row]:
    torch.set_num_threads(1)
    run_local(check, SIZE)
    dist.init_process_group("fake", rank=0, world_size=SIZE)
    try:
        cases: dict[str, Callable[[], object]] = {}
        for name, (ours, bare) in look_ups().items():
            cases |= {name: ours, f"dict of {name}": bare}
        for name, pair in calls().items():
            cases |= {f"collectives.{name}": pair.ours, f"torch.distributed.{name}": pair.bare}
        timings = list(time_cases(cases, clock=time.thread_time).values())
    finally:
        dist.destroy_process_group()
    return [
        row
        for ours, bare in zip(timings[::2], timings[1::2], strict=True)
        for row in compare(NAME, ours, bare)
    ]


def look_ups() -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """A look-up among the groups of a program, and in a plain dict of them."""
    world = dist.group.WORLD
    assert world is not None
    groups = Groups.from_process_groups({"tp": world, ("dp_cp", "gather"): world})
    plain = dict(groups)
    assert all(plain[key] is groups[key] for key in plain)
    return {
        "groups['tp']": (lambda: groups["tp"], lambda: plain["tp"]),
        "groups['dp_cp', 'gather']": (
            lambda: groups["dp_cp", "gather"],
            lambda: plain["dp_cp", "gather"],
        ),
    }


def calls() -> dict[str, Pair]:
    """Operations on the default group, each with tensors of its own."""
    world = dist.group.WORLD
    assert world is not None
    collectives = DistributedCollectives(world)
    x = torch.arange(4.0) + dist.get_rank()
    total, gathered, exchanged, sized = x.clone(), torch.empty(8), torch.empty(4), torch.empty(4)
    halves = [2, 2]
    return {
        "all_reduce in place": Pair(
            lambda: collectives.all_reduce(total, out=total),
            lambda: dist.all_reduce(total, group=world),
            total,
        ),
        "all_gather": Pair(
            lambda: collectives.all_gather(x, out=gathered),
            lambda: bare_all_gather(gathered, x, group=world),
            gathered,
        ),
        "all_to_all": Pair(
            lambda: collectives.all_to_all(x, out=exchanged),
            lambda: dist.all_to_all_single(exchanged, x, group=world),
            exchanged,
        ),
        "all_to_all with sizes": Pair(
            lambda: collectives.all_to_all(x, send_sizes=halves, receive_sizes=halves, out=sized),
            lambda: dist.all_to_all_single(sized, x, halves, halves, group=world),
            sized,
        ),
    }


def check() -> None:
    """On real ranks the two of a pair write the same. Collective."""
    for ours, bare in zip(calls().values(), calls().values(), strict=True):
        ours.ours()
        bare.bare()
        assert_equal(ours.result, bare.result)


if __name__ == "__main__":
    run_benchmark(__doc__, measure)
