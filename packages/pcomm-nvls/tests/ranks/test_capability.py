"""The vote of a group, with each rank failing in turn, and workspaces that fall back together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from core_support.mappings import shared_mappings
from nvls_support.emulation import emulate, opened
from pcomm import nvls
from pcomm.core.control.without_control import control_of_group
from pcomm.core.errors import UnsupportedError
from pcomm.core.groups.group import Group
from pcomm.core.testing import assert_equal, ranks
from pcomm.core.testing.on_ranks import default_group
from pcomm.nvls._capability import RankFacts

HOPPER = RankFacts(
    is_cuda=True, triton="3.6.0", domain="one host", compute_capability=(9, 0), has_multicast=True
)


class Described:
    """A probe of a rank that a test describes."""

    def __init__(self, answer: RankFacts | Exception) -> None:
        self.answer = answer

    def facts(self, device: torch.device) -> RankFacts:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def of_rank(rank: int, **changes: Any) -> RankFacts:
    return replace(HOPPER, device=f"GPU-{rank}", **changes)


# What the failing rank has; the level of the group, and words of its reason, which name that rank.
FAILURES: list[tuple[dict[str, Any] | Exception, int, str]] = [
    ({"compute_capability": None}, 0, "rank {rank}: no CUDA device"),
    ({"compute_capability": (8, 9)}, 0, "rank {rank}: compute capability of sm_89 is below 9.0"),
    ({"symmetric_memory_error": "no such module"}, 0, "rank {rank}: torch has no symmetric"),
    ({"triton": "", "triton_error": "ImportError: x"}, 0, "rank {rank}: Triton cannot be"),
    ({"triton": "3.5.1"}, 0, "rank {rank}: Triton 3.5.1 is older than 3.6"),
    ({"is_cuda": False}, 0, "rank {rank}: tensors are on the CPU: set TRITON_INTERPRET=1"),
    ({"is_emulated": True}, 0, "rank {rank}: TRITON_INTERPRET=1 is set"),
    (OSError("the driver is gone\nand more"), 0, "rank {rank}: OSError: the driver is gone"),
    ({"domain": "another host"}, 0, "rank {rank}: another host"),
    ({"compute_capability": (10, 0)}, 0, "rank {rank}: sm_100"),
    ({"device": "GPU-{other}"}, 0, "are on one device"),
    ({"unreachable": ("GPU-{other}",)}, 0, "the device of rank {rank} cannot access that of"),
    ({"has_multicast": False}, 1, "rank {rank}: the driver reports no multicast"),
    ({"has_multicast": None}, 1, "rank {rank}: the driver is too old"),
    ({"shares_device": True}, 1, "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES is set"),
    ({}, 2, ""),
]


def filled(value: Any, **names: int) -> Any:
    if isinstance(value, tuple):
        return tuple(filled(one, **names) for one in value)
    return value.format(**names) if isinstance(value, str) else value


@ranks(2)
def test_what_one_rank_cannot_do_none_does_and_all_know_why(rank: int) -> None:
    from pcomm.nvls._capability import capability

    group = Group.from_process_group("tp", default_group())
    for failing in range(2):
        for failure, level, words in FAILURES:
            names = {"rank": failing, "other": 1 - failing}
            answer: RankFacts | Exception = of_rank(rank)
            if rank == failing and isinstance(failure, Exception):
                answer = failure
            elif rank == failing and isinstance(failure, dict):
                changes = {key: filled(value, **names) for key, value in failure.items()}
                answer = replace(of_rank(rank), **changes)
            found = capability(group, device=torch.device("cuda"), probe=Described(answer))
            told = (found.multicast, found.peers)
            assert told == (level == 2, level >= 1), (failing, failure, found)
            reason = found.multicast_reason if level == 1 else found.peers_reason
            assert words.format(**names) in reason, (failing, failure, reason)
            assert found.is_usable == (level > 0)
            # Equal on all ranks, reasons too.
            control_of_group(group).agree("found", [repr(found)])


@ranks(2)
def test_processes_without_a_gpu_say_how_to_emulate(rank: int) -> None:
    import os

    from pcomm.nvls._capability import ThisRank, capability

    group = Group.from_process_group("tp", default_group())
    if os.environ.get("TRITON_INTERPRET") != "1":
        found = capability(group, device=torch.device("cpu"))
        assert found.peers_reason == "ranks 0, 1: tensors are on the CPU: set TRITON_INTERPRET=1 " \
            "to emulate"  # fmt: skip
    emulate()
    from pcomm.nvls._capability import capability as emulated_capability

    found = emulated_capability(group, device="cpu")
    assert (found.multicast, found.peers, found.architecture) == (True, True, "emulated")
    if not torch.cuda.is_available():
        level, reason = ThisRank().facts(torch.device("cuda")).level()
        assert level == 0
        assert reason


def fail_in_open(stage: str, rank: int) -> Any:
    """A patch under which a stage of opening symmetric memory fails on this rank."""
    from pcomm.core.memory.backing import SharedFileMemory

    def fail(*_: object) -> str:
        raise UnsupportedError(f"test: {stage}", found=f"rank {rank}", why="It is.", fix="None.")

    return mock.patch.object(SharedFileMemory, stage, fail)


def fail_of_memory(stage: str, rank: int) -> Any:
    """The same with an error that is not told in four parts, as torch has them."""
    from pcomm.core.memory.backing import SharedFileMemory

    full = torch.cuda.OutOfMemoryError("CUDA out of memory. Tried\nto allocate")
    return mock.patch.object(SharedFileMemory, stage, side_effect=full)


def fail_in_preparation(stage: str, rank: int) -> Any:
    from pcomm.nvls.workspace import memory as opening

    def fail(*_: object) -> tuple[int, str]:
        if stage == "_level":
            return 1, "no address here"
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried\nto allocate")

    return mock.patch.object(opening, stage, fail)


# Where a rank fails; whether the memory is still used, and words of the reason on that rank.
STAGES: list[tuple[Callable[[str, int], Any], str, bool, str]] = [
    (fail_in_open, "allocate", False, "test: allocate: rank {rank}"),
    (fail_in_open, "rendezvous", False, "test: rendezvous: rank {rank}"),
    (fail_of_memory, "rendezvous", False, "OutOfMemoryError: CUDA out of memory. Tried"),
    (fail_in_preparation, "_prepare", False, "rank {rank}: OutOfMemoryError: CUDA out of memory."),
    (fail_in_preparation, "_level", True, "rank {rank}: no address here"),
]


@ranks(2)
def test_a_rank_that_gets_no_memory_takes_all_to_the_fallback(rank: int) -> None:
    emulate()
    x, before = torch.arange(8.0) + 8 * rank, shared_mappings()
    for patch, stage, is_usable, words in STAGES:
        for failing in range(2):
            with patch(stage, rank) if rank == failing else nullcontext():
                workspace = opened(4096)
            with workspace:
                found = workspace.capability
                assert (found.multicast, found.peers) == (False, is_usable)
                assert (workspace.memory is not None) == is_usable
                assert "\n" not in found.multicast_reason
                assert len(shared_mappings() - before) == is_usable
                if rank == failing or patch is fail_in_preparation:
                    assert words.format(rank=failing) in found.multicast_reason
                gathered = nvls.all_gather_into_tensor(x, workspace=workspace)
                assert_equal(gathered, torch.arange(16.0))
                assert workspace.num_launches == is_usable
                if not is_usable:
                    with pytest.raises(UnsupportedError, match="no pointers to peers"):
                        nvls.all_gather_into_tensor(x, workspace=workspace, strict=True)
            assert not shared_mappings() - before


def test_a_group_of_one_and_one_that_is_too_large() -> None:
    from pcomm.nvls._capability import _RankReport, _together, capability

    found = capability(Group("tp", (0,), None))
    assert not found.is_usable
    assert found.peers_reason == "one rank moves nothing"
    for size in (72, 73):
        told = [_RankReport("sm_100", "", "rack", f"GPU-{i}") for i in range(size)]
        found = _together(range(size), [2] * size, told)
        assert found.multicast == found.peers == (size == 72)
        assert (size == 72) or found.peers_reason == "73 ranks, and at most 72 reach each other"
    levels = [0] * 70 + [2, 0]
    told = [_RankReport("cpu", "no CUDA device", "rack") for _ in levels]
    found = _together(range(72), levels, told)
    assert found.peers_reason.startswith("ranks 0, 1, 2,")
    found = _together(range(72), [0] * 72, told)
    assert found.peers_reason == "ranks 0 to 71: no CUDA device"
