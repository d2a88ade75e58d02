"""Communicators of one rank on NCCL: opened, used and closed with every option, and aborted."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pcomm.core.groups.communicators import close_communicator, new_communicator
from pcomm.core.groups.spec import CommOptions, grant

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="NCCL needs a GPU"),
]
KINDS = [pytest.param("gloo"), pytest.param("nccl", marks=GPU)]
OPTIONS = [
    CommOptions(),
    CommOptions(timeout_s=60.0, high_priority=True),
    CommOptions(min_ctas=1, max_ctas=4, cga_cluster_size=2),
    CommOptions(collnet=False, traffic_class=0),
    CommOptions(cta_policy="zero", nvls_ctas=4),
    CommOptions(threads=1),
]


@pytest.fixture
def store(tmp_path: Path):
    """The store of a job of one rank, whose default group has begun."""
    made = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=dist.PrefixStore("default", made), rank=0, world_size=1)
    yield made
    dist.destroy_process_group()


def opened(store: dist.Store, backend: str, number: int, options: CommOptions) -> dist.ProcessGroup:
    return new_communicator(
        f"one-{number}",
        [0],
        grant(options, backend, group="one"),
        store=dist.PrefixStore(str(number), store),
        rank=0,
        description="a communicator of one rank",
    )


def used(group: dist.ProcessGroup, device: torch.device) -> None:
    x = torch.arange(1 << 14, dtype=torch.float32, device=device)
    whole = torch.empty_like(x)
    dist.all_gather([whole], x, group=group)
    dist.all_reduce(whole, group=group)
    dist.broadcast(whole, 0, group=group)
    assert torch.equal(whole, x)


@pytest.mark.parametrize("backend", KINDS)
def test_what_is_opened_and_closed_again_leaves_nothing(store: dist.Store, backend: str) -> None:
    assert {name for one in OPTIONS for name in one.asked} == {
        field.name for field in dataclasses.fields(CommOptions)
    } - {"strict", "interface"}
    device, times = torch.device("cpu"), 4
    if backend == "nccl":
        device, times = torch.device("cuda", 0), 20
        torch.cuda.set_device(device)

    def left() -> tuple[int, int, int]:
        memory = 0
        if backend == "nccl":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            memory = -torch.cuda.mem_get_info()[0] >> 20
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), memory

    seen = []
    for number in range(times * len(OPTIONS)):
        group = opened(store, backend, number, OPTIONS[number % len(OPTIONS)])
        used(group, device)
        close_communicator(group)
        seen.append(left())
    print(f"{backend}: threads, descriptors and MiB at first, in the middle, at last: "
          f"{seen[len(OPTIONS)]} {seen[len(seen) // 2]} {seen[-1]}")  # fmt: skip
    # What a library keeps for its next communicator is there after the first rounds.
    for half, last in zip(seen[len(seen) // 2], seen[-1], strict=True):
        assert last <= half + 1


@pytest.mark.parametrize("backend", KINDS)
def test_an_abort_ends_what_is_in_flight(store: dist.Store, backend: str) -> None:
    """The stream and the process go on; shutting down would wait for the kernel."""
    group = opened(store, backend, 0, CommOptions(timeout_s=60.0))
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
    used(group, device)
    x = torch.ones(1 << 14, device=device)
    if backend == "nccl":
        # The collective is queued behind a kernel that runs for a second or so.
        torch.cuda._sleep(2_000_000_000)
        dist.all_reduce(x, group=group)
    abort = getattr(group, "abort", None)
    if abort is None:
        pytest.skip("this torch has no ProcessGroup.abort")
    abort()
    if backend == "nccl":
        torch.cuda.synchronize()
    again = opened(store, backend, 1, CommOptions())
    used(again, device)
    close_communicator(again)
