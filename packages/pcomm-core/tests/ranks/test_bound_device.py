"""Groups of a default group that is bound to a device, as `init_process_group(device_id=...)` does.

No CPU build of torch has NCCL, so a gloo group stands in for it that writes down how torch made it.
Torch splits NCCL groups off the default group's communicator when a device is bound, and every rank
of the parent has to take part in a split; groups of ours are opened by their members alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo, distributed_c10d

from pcomm.core.errors import PcommError, TopologyError
from pcomm.core.groups.open_groups import open_groups
from pcomm.core.groups.spec import CommOptions, GroupSpec
from pcomm.core.process import world
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.topology import Topology

DEVICE = torch.device("cuda", 0)


class StandInOptions:
    """`ProcessGroupNCCL.Options`, as far as torch's Python code and ours set it."""

    def __init__(self) -> None:
        self._timeout = timedelta(seconds=60)
        self.is_high_priority_stream = False
        self.split_from: Any = None
        self.split_color: Any = None
        self.config = mock.Mock(spec=["max_ctas", "min_ctas"])
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""


class StandInNccl(ProcessGroupGloo):
    """A gloo backend in place of NCCL's."""

    made: list[StandInNccl]
    splits: list[torch.device]
    connected: list[torch.device]
    Options = StandInOptions

    def __init__(self, store: dist.Store, rank: int, size: int, options: StandInOptions) -> None:
        super().__init__(store, rank, size, timeout=timedelta(seconds=60))
        self.asked = options
        StandInNccl.made.append(self)

    @property
    def supports_splitting(self) -> bool:
        return True

    def perform_nocolor_split(self, device: torch.device) -> None:
        StandInNccl.splits.append(device)

    def eager_connect_single_device(self, device: torch.device) -> None:
        StandInNccl.connected.append(device)


@contextmanager
def nccl_world(monkeypatch: pytest.MonkeyPatch, *, device: torch.device | None) -> Iterator[None]:
    """A world of the stand-in in place of the one that the test was given."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore("bound", distributed_c10d._get_default_store())
    dist.destroy_process_group()
    StandInNccl.made, StandInNccl.splits, StandInNccl.connected = [], [], []
    monkeypatch.setattr(distributed_c10d, "_NCCL_AVAILABLE", True)
    monkeypatch.setattr(distributed_c10d, "ProcessGroupNCCL", StandInNccl, raising=False)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", StandInNccl, raising=False)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size)
    if device is not None:
        # What device_id does, which a build without an accelerator refuses.
        distributed_c10d._get_default_group().bound_device_id = device
    try:
        yield
    finally:
        dist.destroy_process_group()
        StandInNccl.made.clear()


@ranks(4)
def test_members_alone_open_groups_that_nothing_is_split_off(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch, nccl_world(patch, device=DEVICE):
        default = distributed_c10d._get_default_group()
        StandInNccl.connected.clear()
        # The last rank has failed: a split would wait for it.
        topology = Topology({"dp": 2, "tp": 2}).with_failed([3])
        if rank == 3:
            with pytest.raises(TopologyError, match="rank 3"):
                open_groups(topology, ["tp", "dp"], backend="nccl")
            assert len(StandInNccl.made) == 1
            return
        high = GroupSpec("dp", "gather", CommOptions(high_priority=True, max_ctas=4))
        with open_groups(topology, ["tp", "dp", high], backend="nccl") as groups:
            made = StandInNccl.made[1:]
            keys = [("tp", ""), ("dp", ""), ("dp", "gather")]
            assert len(made) == sum(not groups[key].is_identity for key in keys)
            assert [backend.asked.split_from for backend in made] == [None] * len(made)
            assert StandInNccl.splits == []
            # Eager connections, as bound devices are for, but among members.
            assert StandInNccl.connected == [DEVICE] * len(made)
            assert default.bound_device_id == DEVICE
            gather = groups["dp", "gather"]
            if not gather.is_identity:
                assert gather.process_group is not None
                assert gather.process_group.bound_device_id == DEVICE
                assert made[-1].asked.is_high_priority_stream
                assert made[-1].asked.config.max_ctas == 4
                assert not made[0].asked.is_high_priority_stream
        assert default.bound_device_id == DEVICE


@pytest.mark.parametrize("options", [CommOptions(), CommOptions(threads=1, timeout_s=30)])
@ranks(2)
def test_gloo_groups_beside_a_bound_device_work(rank: int, options: CommOptions) -> None:
    with pytest.MonkeyPatch.context() as patch, nccl_world(patch, device=DEVICE):
        specs = [GroupSpec("dp", "control", options)]
        with open_groups(Topology({"dp": 2}), specs, backend="gloo") as groups:
            group = groups["dp", "control"]
            assert group.collectives.all_reduce(torch.ones(3)).tolist() == [2.0] * 3
            # Both sides of the size from which pairs take over.
            for length in (8, 1 << 20):
                gathered = group.collectives.all_gather(torch.full((length,), float(rank)))
                assert gathered.view(2, length).mean(1).tolist() == [0.0, 1.0]


@ranks(2)
def test_groups_connect_on_the_current_device_beside_a_default_group_without_one(
    rank: int,
) -> None:
    device = torch.device("cuda", rank)
    with pytest.MonkeyPatch.context() as patch, nccl_world(patch, device=None):
        patch.setattr(torch.cuda, "current_device", lambda: rank)
        with open_groups(Topology({"dp": 2}), ["dp"], backend="nccl") as groups:
            assert groups["dp"].process_group is not None
            assert groups["dp"].process_group.bound_device_id == device
            assert StandInNccl.made[-1].asked.split_from is None
            assert StandInNccl.connected == [device]
        # As the program that made it wants it.
        assert distributed_c10d._get_default_group().bound_device_id is None


@ranks(2)
def test_a_default_group_of_our_own_connects_once_the_devices_are_known(rank: int) -> None:
    device = torch.device("cuda", rank)
    shared = mock.patch("torch.cuda.get_device_properties", return_value=mock.Mock(uuid=1))
    with pytest.MonkeyPatch.context() as patch, nccl_world(patch, device=None):
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 2)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "set_device", lambda _: None)
        patch.setenv("LOCAL_RANK", str(rank))
        with shared, pytest.raises(PcommError, match="on the same device"):
            world._joined(None, may_be_chosen=False)
        assert StandInNccl.connected == []
        patch.setattr(torch.cuda, "get_device_properties", lambda d: mock.Mock(uuid=d.index + 2))
        assert world._joined(None, may_be_chosen=False).device == device
        assert StandInNccl.connected == [device]
        assert distributed_c10d._get_default_group().bound_device_id == device
