"""Symmetric memory without other processes: sizes, virtual ranks, one rank, and torch's handles."""

from __future__ import annotations

import errno
import gc
import importlib
import inspect
import os
import weakref
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from core_support.mappings import shared_mappings
from pcomm.core.errors import ClosedError, ConfigError, UnsupportedError
from pcomm.core.groups.group import Closing, Group
from pcomm.core.memory.backing import Segments
from pcomm.core.memory.symmetric_memory import SymmetricMemory
from pcomm.core.memory.torch_memory import TorchMemory, tensor_at

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_bytes", [1, 4095, 4096, 4097])
@pytest.mark.parametrize("signal_bytes", [4, 4096, 9216])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_what_belongs_to_different_ranks_does_not_overlap(
    size: int, num_bytes: int, signal_bytes: int
) -> None:
    segments = Segments(size, num_bytes, signal_bytes)
    owned = [0] * segments.total_bytes
    for rank in range(size):
        begins = {segments.buffer_offset(rank): num_bytes, segments.pad_offset(rank): signal_bytes}
        for begin, length in begins.items():
            assert begin % 4096 == 0
            for place in range(begin, begin + length):
                owned[place] += 1
    assert max(owned) == 1
    assert sum(owned) == size * (num_bytes + signal_bytes)


def test_virtual_ranks_share_one_allocation() -> None:
    memories = SymmetricMemory.virtual(3, 5000, signal_bytes=8)
    others = SymmetricMemory.virtual(2, 16)
    first = memories[0]
    for rank, memory in enumerate(memories):
        assert (memory.rank, memory.size, memory.backend) == (rank, 3, "virtual")
        assert memory.buffer().shape == (5000,)
        assert memory.signal_pad().dtype == torch.int32
        assert memory.signal_pad().tolist() == [0, 0]
        assert memory.buffer_ptrs == first.buffer_ptrs
        assert memory.buffer_table.tolist() == list(memory.buffer_ptrs)
        assert memory.signal_table.tolist() == list(memory.signal_pad_ptrs)
        assert memory.multicast_ptr is None
        memory.buffer().fill_(rank + 1)
        memory.signal_pad().fill_(-rank)
    for memory in memories:
        for rank in range(3):
            assert memory.buffer(rank).data_ptr() == first.buffer_ptrs[rank]
            assert memory.buffer_ptrs[rank] % 4096 == 0
            assert memory.signal_pad(rank).data_ptr() == first.signal_pad_ptrs[rank]
            assert memory.buffer(rank).unique().tolist() == [rank + 1]
            assert memory.signal_pad(rank).tolist() == [-rank] * 2
    memories[0].close()
    assert memories[1].buffer(0).unique().tolist() == [1]
    assert others[0].signal_pad(1).count_nonzero() == 0


@pytest.mark.parametrize("backend", ["auto", "shm", "virtual"])
def test_one_rank_needs_no_store(backend: str) -> None:
    closing = Closing()
    group = Group("tp", (0,), None, closing=closing)
    memory = SymmetricMemory.open(group, 100, backend=backend)
    assert memory.backend == ("virtual" if backend == "auto" else backend)
    assert memory.buffer_ptrs == (memory.buffer(0).data_ptr(),)
    assert memory.buffer_ptrs[0] % 4096 == 0
    assert memory.signal_pad().count_nonzero() == 0
    # With its groups, and the tensors that are still there stay.
    view = memory.buffer().fill_(7)
    for call in closing.take_all():
        call()
    assert view.unique().tolist() == [7]
    closed: list[Any] = [memory.buffer, memory.signal_pad, lambda: memory.multicast_ptr]
    closed += [lambda: memory.buffer_ptrs, lambda: memory.signal_pad_ptrs]
    closed += [lambda: memory.buffer_table, lambda: memory.signal_table]
    for use in closed:
        with pytest.raises(ClosedError, match="rank 0 of 1 was closed"):
            use()
    memory.close()
    assert "closed" in repr(memory)
    # One that was closed by itself is not called again.
    SymmetricMemory.open(group, 100, backend=backend).close()
    assert closing.take_all() == []


def test_a_full_file_system_is_told_before_memory_is_touched() -> None:
    group, mapped = Group("tp", (0,), None), shared_mappings()

    def open_with(free: int) -> None:
        room = SimpleNamespace(f_bavail=free, f_frsize=4096)
        with mock.patch.object(os, "statvfs", return_value=room):
            SymmetricMemory.open(group, 1, signal_bytes=4, backend="shm").close()

    # A page for the buffer and one for the pad.
    open_with(2)
    with pytest.raises(UnsupportedError, match="has 4096 bytes free, of 8192 that are needed"):
        open_with(1)
    # It filled up between the check and the allocation.
    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        mock.patch.object(os, "posix_fallocate", side_effect=full),
        pytest.raises(UnsupportedError, match=r"OSError: .*No space left"),
    ):
        open_with(2)
    assert not shared_mappings() - mapped


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_bytes": 0}, "num_bytes=0"),
        ({"signal_bytes": 0}, "signal_bytes=0"),
        ({"signal_bytes": 6}, "multiple of 4"),
        ({"backend": "smh"}, "Did you mean 'shm'"),
        ({"backend": "torch"}, "device cpu, without a communicator"),
        ({"backend": "shm", "device": "meta"}, "device meta"),
    ],
    ids=str,
)
def test_what_cannot_be_had_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SymmetricMemory.open(Group("tp", (0,), None), **{"num_bytes": 64, **options})
    with pytest.raises(ConfigError, match="of 0 ranks"):
        SymmetricMemory.virtual(0, 64)


# -- torch's handles -------------------------------------------------------------------------


class FakeSymmetricMemory:
    """The functions of torch's module that pcomm uses, for two ranks of this process."""

    def __init__(self, multicast_ptr: int = 0, offset: int = 0) -> None:
        self.multicast_ptr, self.pad_bytes, self.offset = multicast_ptr, 0, offset
        self._SymmetricMemory = self
        self.blocks: list[torch.Tensor] = []
        self.groups: list[Any] = []
        self.refuses = False

    def set_signal_pad_size(self, size: int) -> None:
        self.pad_bytes = size

    def empty_strided_p2p(
        self, size: Any, stride: Any, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        assert self.pad_bytes
        assert stride == (1,)
        (num_bytes,) = size
        # The pad at the end, as torch 2.11 has it, and one block for each rank.
        whole = num_bytes + self.pad_bytes
        self.blocks = [torch.full((whole,), 9, dtype=dtype, device=device) for _ in range(2)]
        return self.blocks[1][self.offset : self.offset + num_bytes]

    def rendezvous(self, tensor: torch.Tensor, group: Any) -> Any:
        if self.refuses:
            raise RuntimeError("CUDASymmetricMemoryAllocator: no peer access")
        self.groups.append(group)
        addresses = [block.data_ptr() for block in self.blocks]
        return SimpleNamespace(
            buffer_ptrs=addresses,
            signal_pad_ptrs=[address + tensor.numel() for address in addresses],
            multicast_ptr=self.multicast_ptr,
            rank=1,
            world_size=2,
            kept=self.blocks,
        )


def test_torch_has_what_the_adapter_stands_on() -> None:
    module = importlib.import_module("torch.distributed._symmetric_memory")
    assert list(inspect.signature(module.set_signal_pad_size).parameters) == ["size"]
    assert list(inspect.signature(module.rendezvous).parameters) == ["tensor", "group"]
    handle = module._SymmetricMemory
    told = handle.empty_strided_p2p.__doc__
    places = [told.index(f"{name}: ") for name in ("size", "stride", "dtype", "device")]
    assert places == sorted(places)
    for field in ("buffer_ptrs", "signal_pad_ptrs", "multicast_ptr", "rank", "world_size"):
        assert isinstance(getattr(handle, field), property), field


def torch_memory(module: Any, rank: int = 1) -> TorchMemory:
    group: Any = "the process group"
    memory = TorchMemory(group, rank, Segments(2, 48, 16), CPU, module)
    assert memory.allocate() == ""
    return memory


def test_handles_of_torch_become_addresses_and_tensors() -> None:
    module = FakeSymmetricMemory()
    memory = torch_memory(module)
    memory.rendezvous(["", ""])
    assert module.groups == ["the process group"]
    assert module.pad_bytes == 16
    # Zero says that there is no multicast.
    assert memory.multicast_ptr is None
    there = torch_memory(FakeSymmetricMemory(multicast_ptr=1 << 40))
    there.rendezvous(["", ""])
    assert there.multicast_ptr == 1 << 40
    assert memory.signal_pad(1).tolist() == [0] * 4
    assert memory.signal_pad(0).tolist() != [0] * 4
    for rank in range(2):
        assert memory.buffer_ptrs[rank] == module.blocks[rank].data_ptr()
        assert memory.buffer(rank).shape == (48,)
        memory.buffer(rank).fill_(rank)
        memory.signal_pad(rank).fill_(-1)
        assert module.blocks[rank].tolist() == [rank] * 48 + [255] * 16
    # A tensor keeps the handle after the memory was given back.
    kept, view = weakref.ref(module.blocks[0]), memory.buffer(0)[4:]
    module.blocks = []
    memory.release()
    gc.collect()
    assert kept() is not None
    assert view.unique().tolist() == [0]
    del view
    assert kept() is None


def test_what_torch_refuses_is_told() -> None:
    module = FakeSymmetricMemory()
    memory = torch_memory(module)
    module.refuses = True
    with pytest.raises(UnsupportedError, match=r"rendezvous: RuntimeError: .*no peer access"):
        memory.rendezvous(["", ""])
    module.refuses = False
    with pytest.raises(UnsupportedError, match=r"rank 1 of 2, with 2 and 2 addresses"):
        torch_memory(module, rank=0).rendezvous(["", ""])
    # As from a pool, where the addresses are those of the segment.
    with pytest.raises(UnsupportedError, match="does not begin its allocation"):
        torch_memory(FakeSymmetricMemory(offset=4)).rendezvous(["", ""])
    without: Any = SimpleNamespace(_SymmetricMemory=module)
    with pytest.raises(UnsupportedError, match="allocate: AttributeError"):
        torch_memory(without)


def test_a_tensor_at_an_address_keeps_what_it_was_told_to() -> None:
    class Keeper:
        pass

    source, keeper = torch.arange(10, dtype=torch.uint8), Keeper()
    kept = weakref.ref(keeper)
    tensor = tensor_at(source.data_ptr() + 2, 8, CPU, keeper)
    del keeper
    assert (tensor.dtype, tensor.device, tensor.tolist()) == (torch.uint8, CPU, [*range(2, 10)])
    tensor[0] = 200
    assert source[2] == 200
    view = tensor.view(torch.int32)
    del tensor
    assert kept() is not None
    assert view.shape == (2,)
    del view
    assert kept() is None
