"""Symmetric memory between processes: what one rank writes the others read, and nothing is left."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from core_support.mappings import shared_mappings
from pcomm.core.control.agreement import agree_in_group
from pcomm.core.errors import (
    ClosedError,
    ConfigError,
    DivergenceError,
    PcommError,
    PeerError,
    PeerTimeoutError,
    UnsupportedError,
)
from pcomm.core.groups.group import Group
from pcomm.core.groups.open_groups import open_groups
from pcomm.core.memory import backing as shm
from pcomm.core.memory.backing import SharedFileMemory
from pcomm.core.memory.symmetric_memory import SymmetricMemory
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.testing.programs import Programs
from pcomm.core.topology import Topology

WAIT_S = 120.0
MIB = 1 << 20


def held() -> tuple[list[str], int]:
    """Descriptors of /dev/shm, and threads of this process."""
    descriptors = []
    for name in os.listdir("/proc/self/fd"):
        # Others, such as sockets of the world, come and go.
        with suppress(FileNotFoundError):
            target = os.readlink(f"/proc/self/fd/{name}")
            descriptors += [target] if "/dev/shm" in target else []
    return descriptors, threading.active_count()


@contextmanager
def nothing_is_left() -> Iterator[Callable[[], int]]:
    """Gives what counts the mappings of shared memory that were made since."""
    mapped, before = shared_mappings(), held()
    yield lambda: len(shared_mappings() - mapped)
    assert not shared_mappings() - mapped
    assert held() == before


def meet(group: Group) -> None:
    agree_in_group(group, "test: meet", [], timeout_s=WAIT_S)


def byte_at(address: int) -> int:
    return ctypes.c_uint8.from_address(address).value


@ranks(3)
def test_two_memories_at_once_are_read_by_all_ranks(rank: int) -> None:
    with nothing_is_left() as num_mapped:
        with open_groups(Topology({"tp": 3}), ["tp"], timeout_s=WAIT_S) as groups:
            group = groups["tp"]
            one = SymmetricMemory.open(group, 5001, signal_bytes=12)
            two = SymmetricMemory.open(group, 64, backend="shm", device="cpu")
            assert (one.backend, one.device, one.rank, one.size) == ("shm", group_device(), rank, 3)
            assert (one.num_bytes, one.signal_bytes, two.signal_bytes) == (5001, 12, 9216)
            assert one.multicast_ptr is None
            for number, memory in enumerate((one, two)):
                assert memory.signal_pad().count_nonzero() == 0
                assert memory.buffer().numel() == memory.num_bytes
                assert memory.buffer_table.tolist() == list(memory.buffer_ptrs)
                assert memory.signal_table.tolist() == list(memory.signal_pad_ptrs)
                meet(group)
                memory.buffer().fill_(10 * number + rank + 1)
                # Each rank writes one word of every pad.
                for peer in range(3):
                    memory.signal_pad(peer)[rank] = 100 * number + 10 * rank + peer
            meet(group)
            for number, memory in enumerate((one, two)):
                for peer in range(3):
                    address, last = memory.buffer_ptrs[peer], memory.num_bytes - 1
                    assert address % 4096 == 0
                    assert memory.buffer(peer).data_ptr() == address
                    assert memory.signal_pad(peer).data_ptr() == memory.signal_pad_ptrs[peer]
                    assert memory.buffer(peer).unique().tolist() == [10 * number + peer + 1]
                    assert byte_at(address) == byte_at(address + last) == 10 * number + peer + 1
                    told = [100 * number + 10 * r + peer for r in range(3)]
                    assert memory.signal_pad(peer)[:3].tolist() == told
                    assert memory.signal_pad(peer)[3:].count_nonzero() == 0
            meet(group)
            one.close()
            with pytest.raises(ClosedError, match=f"rank {rank} of 3 was closed"):
                one.buffer()
            assert two.buffer((rank + 1) % 3)[0] == 10 + (rank + 1) % 3 + 1
            assert num_mapped() == 1
            view = two.buffer((rank + 1) % 3)[8:16]
            meet(group)
        # The groups have closed the second one; the mapping waits for the last tensor in it.
        with pytest.raises(ClosedError):
            two.signal_pad()
        assert view.unique().tolist() == [10 + (rank + 1) % 3 + 1]
        assert num_mapped() == 1
        del view


def group_device() -> torch.device:
    return torch.device("cpu")


@ranks(2)
def test_twenty_times_leave_nothing(rank: int) -> None:
    with open_groups(Topology({"tp": 2}), ["tp"], timeout_s=WAIT_S) as groups:
        SymmetricMemory.open(groups["tp"], MIB).close()
        with nothing_is_left() as num_mapped:
            for turn in range(20):
                memory = SymmetricMemory.open(groups["tp"], MIB + turn)
                assert num_mapped() == 1
                memory.buffer().fill_(turn)
                memory.close()
                memory.close()


@contextmanager
def failing(phase: str, after: bool) -> Iterator[None]:
    """The phase of this rank raises, before it has done anything or after it has done all."""
    plain: Callable[..., Any] = getattr(SharedFileMemory, phase)

    def fail(self: SharedFileMemory, *args: Any) -> None:
        if after:
            plain(self, *args)
        raise UnsupportedError("test", found=f"no {phase}", why="It is a test.", fix="None.")

    with mock.patch.object(SharedFileMemory, phase, fail):
        yield


@ranks(3)
def test_what_fails_on_one_rank_is_undone_on_all(rank: int) -> None:
    with (
        open_groups(Topology({"tp": 3}), ["tp"], timeout_s=WAIT_S) as groups,
        nothing_is_left() as num_mapped,
    ):
        group = groups["tp"]
        for phase in ("allocate", "rendezvous"):
            for culprit in range(3):
                for after in (False, True):
                    is_me = rank == culprit
                    with (
                        failing(phase, after) if is_me else nothing_is_left(),
                        pytest.raises(UnsupportedError if is_me else PeerError) as caught,
                    ):
                        SymmetricMemory.open(group, MIB)
                    assert f"no {phase}" in str(caught.value)
                    assert is_me or f"rank {culprit}: UnsupportedError: test" in str(caught.value)
                    del caught
                    assert num_mapped() == 0
        memory = SymmetricMemory.open(group, 64)
        assert memory.buffer(2).numel() == 64
        memory.close()
        del memory


@ranks(2)
def test_what_cannot_be_had_is_an_error_on_every_rank(rank: int) -> None:
    with (
        open_groups(Topology({"tp": 2}), ["tp"], timeout_s=WAIT_S) as groups,
        nothing_is_left() as num_mapped,
    ):
        group = groups["tp"]
        with pytest.raises(DivergenceError, match=r"rank 0 has '64 .*rank 1 has '80 "):
            SymmetricMemory.open(group, 64 + 16 * rank)
        with pytest.raises(ConfigError if rank else PeerError, match="signal_bytes=0"):
            SymmetricMemory.open(group, 64, signal_bytes=0 if rank else 4)
        with pytest.raises(ConfigError, match="group tp of 2 ranks, device cpu"):
            SymmetricMemory.open(group, 64, backend="virtual")
        # One byte a rank more than there is; nobody is ended by a signal at the first touch.
        room = os.statvfs("/dev/shm")
        too_much = room.f_blocks * room.f_frsize // 2 + 1
        with pytest.raises(UnsupportedError if rank == 0 else PeerError) as caught:
            SymmetricMemory.open(group, too_much)
        assert "/dev/shm has" in str(caught.value)
        other = mock.patch.object(shm, "this_host", return_value="another host")
        with other if rank else nothing_is_left(), pytest.raises(UnsupportedError) as caught:
            SymmetricMemory.open(group, 64)
        # The same words everywhere, so that any log has them.
        assert "rank 0 of the group on " in str(caught.value)
        assert "rank 1 of the group on another host" in str(caught.value)
        meet(group)
        if rank == 0:
            with pytest.raises(PeerTimeoutError, match=r"ranks \[1\] of 2"):
                SymmetricMemory.open(group, 64, timeout_s=0.1)
        meet(group)
        memory = SymmetricMemory.open(group, 64, timeout_s=2.0)
        if rank == 0:
            # It is given back here also where the other rank does not come.
            with pytest.raises(PcommError, match=r"ranks \[1\] of 2"):
                memory.close()
            assert num_mapped() == 0
        meet(group)
        if rank == 1:
            with pytest.raises(PcommError, match=r"ranks \[1\] of 2"):
                memory.close()
        del memory


@ranks(2)
def test_a_large_buffer(rank: int) -> None:
    num_bytes = 64 * MIB
    with open_groups(Topology({"tp": 2}), ["tp"], timeout_s=WAIT_S) as groups, nothing_is_left():
        memory = SymmetricMemory.open(groups["tp"], num_bytes)
        assert abs(memory.buffer_ptrs[1] - memory.buffer_ptrs[0]) >= num_bytes
        memory.buffer().view(torch.int64).fill_((rank + 1) << 33)
        meet(groups["tp"])
        for peer in range(2):
            words = memory.buffer(peer).view(torch.int64)
            assert (words.min().item(), words.max().item()) == ((peer + 1) << 33,) * 2
            assert memory.signal_pad(peer).count_nonzero() == 0
        del words
        meet(groups["tp"])
        memory.close()


KILLED = """
import json, os, signal, sys
import torch.distributed as dist
from pcomm.core.control.control import Control
from pcomm.core.errors import PeerTimeoutError
from pcomm.core.groups.group import Group
from pcomm.core.memory.backing import SharedFileMemory
from pcomm.core.memory.symmetric_memory import SymmetricMemory

rank = 1 if os.fork() == 0 else 0
control = Control(dist.FileStore(sys.argv[1], 2), (0, 1), rank, timeout_s=60.0)
group = Group("tp", (0, 1), None, rank=rank, control=control)
inodes = []
plain = SharedFileMemory.rendezvous

def rendezvous(self, texts):
    inodes.append(json.loads(texts[0])["inode"])
    if len(inodes) == 2 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    plain(self, texts)

SharedFileMemory.rendezvous = rendezvous
kept = SymmetricMemory.open(group, 1 << 20)
kept.buffer().fill_(1)
try:
    SymmetricMemory.open(group, 1 << 20, timeout_s=3.0)
except PeerTimeoutError as problem:
    maps = [line for line in open("/proc/self/maps") if "/dev/shm" in line]
    print(json.dumps([inodes, len(maps), str(problem)]), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_ranks_leave_no_file(programs: Programs, tmp_path: Path) -> None:
    """One is killed before it maps the memory, and the other one while it has another open."""
    ended = programs.run(sys.executable, "-c", KILLED, tmp_path / "store")
    assert ended.returncode == -9, ended.stderr
    inodes, num_mapped, problem = json.loads(ended.stdout)
    assert len(set(inodes)) == 2
    assert num_mapped == 1
    assert "ranks [1] of 2 did not arrive" in problem
    names = {entry.inode() for entry in os.scandir("/dev/shm")}
    assert not names & set(inodes)
    assert programs.running() == []
