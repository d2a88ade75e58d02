"""Groups of NCCL that are abandoned with operations in flight; never run on hardware yet.

Each rank has a communicator of its own ranks alone, so one GPU is enough: what is in flight is
queued behind a kernel that runs for a second or so, as one that waits for a rank would be.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pcomm.core.groups.abandoning import AbortOnFailure, abandon_communicators, outlive_failures
from pcomm.core.groups.communicators import new_communicator
from pcomm.core.groups.spec import CommOptions, grant

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="NCCL needs a GPU"),
]
BUSY_CYCLES = 2_000_000_000


def opened(store: dist.Store, number: int) -> list[dist.ProcessGroup]:
    """Three communicators of one rank, each used once."""
    options, made = grant(CommOptions(timeout_s=60.0), "nccl", group="one"), []
    for name in ("tp", "dp", "everyone"):
        about = {"store": dist.PrefixStore(f"{number} {name}", store), "rank": 0}
        group = new_communicator(f"{number} {name}", [0], options, **about, description=name)
        x = torch.ones(1 << 14, device="cuda")
        dist.all_reduce(x, group=group)
        assert x.sum().item() == 1 << 14
        made.append(group)
    return made


@pytest.mark.parametrize("aborts_first", [False, True], ids=["abandon", "failure, then abandon"])
def test_what_is_in_flight_ends_and_the_next_generation_works(aborts_first, tmp_path: Path) -> None:
    outlive_failures()
    torch.cuda.set_device(0)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=dist.PrefixStore("default", store), rank=0, world_size=1)
    for number in range(5):
        groups, told = opened(store, number), threading.Event()
        torch.cuda._sleep(BUSY_CYCLES)
        for group in groups:
            dist.all_reduce(torch.ones(1 << 20, device="cuda"), group=group, async_op=True)
        watch = AbortOnFailure(groups, lambda told=told: "a rank ended" if told.is_set() else None)
        del group
        if aborts_first:
            told.set()
            torch.cuda.synchronize()
        abandon_communicators(groups)
        watch.close()
        torch.cuda.synchronize()
    abandon_communicators(opened(store, 5))
    dist.destroy_process_group()
