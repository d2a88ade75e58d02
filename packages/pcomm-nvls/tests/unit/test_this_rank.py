"""The facts about this process, with a described CUDA and driver below."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from pcomm.core.doctor.report import CudaFacts, DeviceFacts
from pcomm.core.memory.backing import this_host
from pcomm.nvls import _capability as this_rank
from pcomm.nvls._capability import DIST, MULTICAST, ThisRank

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three GPUs, of which the second reaches the first, and has multicast alone."""
    devices = tuple(
        DeviceFacts("H100", (9, 0), 80 * 2**30, number == 1, False, 18, 18, frozenset({0}))
        for number in range(3)
    )
    monkeypatch.setattr(this_rank, "cuda_facts", lambda: CudaFacts("580", (13, 0), devices))
    monkeypatch.setattr(this_rank, "nvlink_domain", lambda uuid: f"domain of {uuid}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: (9, number))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=f"u{number}")
    )
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: other == 0)


@pytest.mark.usefixtures("gpus")
def test_the_facts_are_those_of_the_device_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ThisRank().facts(GPU)
    assert (found.is_cuda, found.architecture, found.device) == (True, "sm_91", "GPU-u1")
    assert (found.domain, found.unreachable) == ("domain of GPU-u1", ("GPU-u2",))
    assert (found.has_multicast, found.symmetric_memory_error) == (True, "")
    assert not found.shares_device
    # Without a number it is the current one; a host is the domain where NVML names none.
    monkeypatch.setattr(this_rank, "nvlink_domain", lambda uuid: "")
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    found = ThisRank().facts(torch.device("cuda"))
    assert (found.architecture, found.has_multicast, found.device) == ("sm_92", False, "GPU-u2")
    assert (found.domain, found.unreachable) == (this_host(), ("GPU-u1",))
    assert found.shares_device
    monkeypatch.setattr(this_rank, "cuda_facts", lambda: None)
    assert ThisRank().facts(GPU).has_multicast is None
    # A torch without symmetric memory, or with another interface.
    monkeypatch.setitem(sys.modules, "torch.distributed._symmetric_memory", SimpleNamespace())
    error = ThisRank().facts(GPU).symmetric_memory_error
    assert error == "it has no empty and no rendezvous"
    monkeypatch.setitem(sys.modules, "torch.distributed._symmetric_memory", None)
    assert "ModuleNotFoundError" in ThisRank().facts(GPU).symmetric_memory_error


def test_without_triton_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ThisRank().facts(CPU)
    assert found.triton
    assert found.level()[0] in (DIST, MULTICAST)
    monkeypatch.setitem(sys.modules, "triton", None)
    found = ThisRank().facts(CPU)
    assert (found.triton, found.architecture) == ("", "cpu")
    level, reason = found.level()
    assert level == DIST
    assert reason.startswith("Triton cannot be imported (ModuleNotFoundError: ")
