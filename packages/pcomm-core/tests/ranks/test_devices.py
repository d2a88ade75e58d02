"""Where processes compute, on machines with several CUDA devices that this one pretends to be."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

# Registers the backend "fake", whose collectives do nothing.
import torch.testing._internal.distributed.fake_pg

from pcomm.core import environment
from pcomm.core.errors import ConfigError, PcommError, PeerError
from pcomm.core.process import world as devices
from pcomm.core.process.world import connect
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.testing.programs import free_port

LOCAL_RANKS = [variable.name for variable in environment.LOCAL_RANKS]


class Machine:
    """CUDA devices that are not there, with a current one."""

    def __init__(self, name: str, num_devices: int, current: int = 0) -> None:
        self.name, self.num_devices, self.current = name, num_devices, current

    def set_current(self, device: torch.device) -> None:
        self.current = device.index

    @contextmanager
    def as_this_one(self, **variables: str) -> Iterator[None]:
        """In the block torch sees these devices, and the environment these local ranks."""
        kept = {name: value for name, value in os.environ.items() if name not in LOCAL_RANKS}
        replaced = {
            "is_available": lambda: self.num_devices > 0,
            "device_count": lambda: self.num_devices,
            "current_device": lambda: self.current,
            "set_device": self.set_current,
            "get_device_properties": lambda d: SimpleNamespace(uuid=f"{self.name}-{d.index}"),
        }
        with ExitStack() as patches:
            patches.enter_context(mock.patch.dict(os.environ, {**kept, **variables}, clear=True))
            for name, function in replaced.items():
                patches.enter_context(mock.patch.object(torch.cuda, name, function))
            yield


@contextmanager
def default_group(backend: str | None) -> Iterator[None]:
    """A default group of this process alone."""
    dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("backend", "device"),
    [
        ("gloo", "cpu"),
        ("cpu:gloo", "cpu"),
        ("cpu:gloo,cuda:gloo", "cpu"),
        ("cpu:gloo,cuda:fake", "cuda:2"),
        ("fake", "cuda:2"),
        (None, "cuda:2"),
    ],
    ids=str,
)
def test_the_device_is_one_for_which_the_default_group_has_a_backend(
    backend: str | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What torch takes for a group without a backend; with CUDA that would be NCCL.
    monkeypatch.setitem(dist.Backend.default_device_backend_map, "cuda", "fake")
    monkeypatch.setattr(torch._C, "_get_accelerator", lambda: torch.device("cuda"))
    machine = Machine("one", 4, current=2)
    with machine.as_this_one(), default_group(backend):
        with connect() as world:
            assert str(world.device) == device
            assert machine.current == 2
        with connect(device="cpu") as world:
            assert str(world.device) == "cpu"
    with Machine("none", 0).as_this_one(), default_group("fake"), connect() as world:
        assert str(world.device) == "cpu"


def test_a_default_group_may_be_bound_to_a_device() -> None:
    machine = Machine("one", 4, current=2)
    with machine.as_this_one(LOCAL_RANK="3"), default_group("fake"):
        group = dist.group.WORLD
        assert group is not None
        # As `init_process_group(device_id=...)` does, which a build without CUDA refuses.
        group.bound_device_id = torch.device("cuda:1")
        with connect() as world:
            assert str(world.device) == "cuda:1"
        assert machine.current == 1


def test_alone_it_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    machine = Machine("one", 4, current=3)
    with machine.as_this_one():
        with connect() as world:
            assert str(world.device) == "cuda:3"
        with connect(device="cuda:1") as world:
            assert str(world.device) == "cuda:1"
            assert machine.current == 1


@pytest.mark.parametrize(
    ("num_devices", "current", "variables", "expected"),
    [
        (4, 0, {"LOCAL_RANK": "3"}, 3),
        (4, 0, {"SLURM_LOCALID": "2"}, 2),
        (4, 0, {"OMPI_COMM_WORLD_LOCAL_RANK": "1"}, 1),
        (4, 0, {"MPI_LOCALRANKID": "1"}, 1),
        # Started by torchrun or mpirun within a step of Slurm.
        (4, 0, {"SLURM_LOCALID": "0", "LOCAL_RANK": "3"}, 3),
        (4, 0, {"SLURM_LOCALID": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}, 3),
        # Chosen by the program.
        (4, 2, {"LOCAL_RANK": "1"}, 2),
        (4, 2, {}, 2),
        # A launcher shows each process its own device.
        (1, 0, {"SLURM_LOCALID": "3"}, 0),
        (1, 0, {}, 0),
        (4, 0, {"SLURM_LOCALID": "4"}, "local rank 4: 4 devices"),
        (4, 0, {"SLURM_LOCALID": "first"}, "SLURM_LOCALID: .*'first'"),
        (4, 0, {"LOCAL_RANK": "-1"}, "LOCAL_RANK: .*'-1'"),
        (4, 0, {}, "one of 8 processes: 4 devices, and none of LOCAL_RANK, .*SLURM_LOCALID set"),
    ],
    ids=str,
)
def test_a_process_has_the_device_of_its_local_rank(
    num_devices: int, current: int, variables: Mapping[str, str], expected: int | str
) -> None:
    with Machine("one", num_devices, current).as_this_one(**variables):
        if isinstance(expected, str):
            with pytest.raises(ConfigError, match=expected):
                devices._own_device(8, may_be_chosen=False)
        else:
            assert devices._own_device(8, may_be_chosen=False).index == expected


@ranks(2)
def test_two_ranks_share_a_device_only_on_purpose(rank: int) -> None:
    """The default group has been made by the program, which may have chosen device 0."""
    takes_cuda = mock.patch("pcomm.core.process.world._default_group_takes_cuda", return_value=True)
    forgotten, chosen = Machine("forgotten", 4), Machine("chosen", 4, current=rank)
    with takes_cuda:
        with forgotten.as_this_one():
            with pytest.raises(PcommError, match="computes on the same device"), connect():
                pass
            with connect(device="cuda:0") as world:
                assert str(world.device) == "cuda:0"
        for _ in range(2):
            with chosen.as_this_one(), connect() as world:
                assert str(world.device) == f"cuda:{rank}"
        # Only one device is seen by each, which is the same one under the same number or not.
        for name, is_shared in ((f"node {rank}", False), ("node", True)):
            with Machine(name, 1).as_this_one(LOCAL_RANK=str(rank)):
                if is_shared:
                    with pytest.raises(PcommError, match="on the same device"), connect():
                        pass
                else:
                    with connect() as world:
                        assert str(world.device) == "cuda:0"
        launched = Machine("launched", 2)
        with launched.as_this_one(SLURM_LOCALID=str(rank)), connect() as world:
            assert str(world.device) == f"cuda:{rank}"
            assert launched.current == rank
        # A wrong place on one rank is told to both, and nobody waits.
        with Machine("wrong", 2).as_this_one(SLURM_LOCALID=str(2 * rank)):
            kind = PeerError if rank == 0 else ConfigError
            with pytest.raises(kind, match="local rank 2"), connect():
                pass


@pytest.fixture
def ports() -> list[int]:
    return [free_port() for _ in range(4)]


@ranks(2)
def test_launched_processes_have_devices_of_their_own(
    rank: int, ports: list[int], tmp_path: Path
) -> None:
    """They join the same job again and again, each time with another local rank."""
    dist.destroy_process_group()
    launcher = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    told = []
    for number, port in enumerate(ports):
        place = [{}, {"SLURM_LOCALID": str(rank)}, {"LOCAL_RANK": "1"}, {}][number]
        backend = "gloo" if number == 3 else "cpu:gloo,cuda:fake"
        with Machine("node", 2).as_this_one(**launcher, MASTER_PORT=str(port), **place):
            try:
                with connect(backend=backend) as world:
                    # Gloo has connected on one rank before it has on the other, which would find
                    # its peer gone.
                    dist.all_reduce(torch.zeros(1))
                    told.append(str(world.device))
            except PcommError as problem:
                told.append(type(problem).__name__)
        assert not dist.is_initialized()
    store = dist.FileStore(str(tmp_path / "told"), 2)
    store.set(str(rank), json.dumps(told))
    unknown, slurm, shared, gloo = zip(
        *(json.loads(store.get(str(r))) for r in (0, 1)), strict=True
    )
    assert unknown == ("ConfigError", "ConfigError")
    assert slurm == ("cuda:0", "cuda:1")
    assert sorted(shared) == ["ConfigError", "PeerError"]
    assert gloo == ("cpu", "cpu")
