"""Torch's symmetric memory of one rank on one GPU; never run on hardware yet."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pcomm.core.errors import ClosedError
from pcomm.core.groups.group import Group
from pcomm.core.groups.open_groups import Groups
from pcomm.core.memory.symmetric_memory import SymmetricMemory
from pcomm.core.memory.torch_memory import tensor_at

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="it needs a GPU"),
]

DEVICE = torch.device("cuda", 0)


def test_one_rank_reads_and_writes_its_memory_by_address(tmp_path: Path) -> None:
    torch.cuda.set_device(DEVICE)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=DEVICE)
    try:
        # One rank, and still a communicator: open_groups would make none.
        process_group = dist.new_group([0], backend="nccl")
        group = Group("tp", (0,), process_group)
        groups = Groups([group], owned=[process_group])
        memories = [
            SymmetricMemory.open(group, 1 << 20, signal_bytes=signal_bytes)
            for signal_bytes in (9216, 128 * 72 * 4)
        ]
        for memory in memories:
            assert (memory.backend, memory.device) == ("torch", DEVICE)
            assert memory.multicast_ptr != 0
            assert memory.signal_pad().count_nonzero().item() == 0
            assert memory.signal_pad().numel() == memory.signal_bytes // 4
            assert memory.buffer_table.tolist() == list(memory.buffer_ptrs)
            assert memory.buffer().data_ptr() == memory.buffer_ptrs[0]
            # The whole pad is ours: nothing of the buffer lies in it.
            memory.buffer().fill_(3)
            memory.signal_pad().fill_(-1)
            assert memory.buffer().min().item() == memory.buffer().max().item() == 3
            assert memory.signal_pad().min().item() == memory.signal_pad().max().item() == -1
        view = memories[0].buffer()[16:]
        memories[0].close()
        gc.collect()
        with pytest.raises(ClosedError):
            memories[0].buffer()
        assert view.sum().item() == 3 * ((1 << 20) - 16)
        groups.close()
        with pytest.raises(ClosedError):
            memories[1].buffer()
    finally:
        dist.destroy_process_group()


def test_virtual_ranks_of_one_gpu() -> None:
    memories = SymmetricMemory.virtual(4, 5000, device=DEVICE)
    for memory in memories:
        memory.buffer().fill_(memory.rank + 1)
        memory.signal_pad().fill_(memory.rank)
    for memory in memories:
        assert [memory.buffer(r).unique().tolist() for r in range(4)] == [[1], [2], [3], [4]]
        assert [memory.signal_pad(r).unique().tolist() for r in range(4)] == [[0], [1], [2], [3]]
        assert memory.buffer_table.device == DEVICE
        assert all(address % 4096 == 0 for address in memory.buffer_ptrs)


def test_a_tensor_at_an_address_of_the_gpu() -> None:
    source = torch.arange(64, dtype=torch.uint8, device=DEVICE)
    tensor = tensor_at(source.data_ptr() + 16, 32, DEVICE, source)
    assert (tensor.device, tensor.data_ptr()) == (DEVICE, source.data_ptr() + 16)
    assert tensor.tolist() == list(range(16, 48))
