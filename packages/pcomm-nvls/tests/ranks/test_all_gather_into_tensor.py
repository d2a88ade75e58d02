"""All-gather under emulation, against torch.distributed: every dtype, dimension and algorithm."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nvls_support.emulation import opened
from nvls_support.refusals import refused
from pcomm import nvls
from pcomm.core.control.agreement import agree_in_group
from pcomm.core.errors import (
    ClosedError,
    ConfigError,
    LayoutError,
    PeerError,
    PeerTimeoutError,
    UnsupportedError,
)
from pcomm.core.groups.group import Group
from pcomm.core.testing import ranks
from pcomm.core.testing.on_ranks import default_group

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.uint8, torch.bool]


def shard(generator, rank, dtype, shape):
    """Bytes that differ between ranks and calls; any bit pattern but for booleans."""
    torch.manual_seed(generator.randrange(1 << 30) * 8 + rank)
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (num_bytes,), dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def run_cases(rank: int, size: int, num_cases: int) -> None:
    group, generator = Group.from_process_group("tp", default_group()), random.Random(size)
    with opened(1 << 20) as workspace:
        for case in range(num_cases):
            dtype, dim = generator.choice(DTYPES), generator.choice([0, -1, 1])
            # With many rows a thread moves four vectors at a time.
            rows = generator.choice([*range(1, 9), 260])
            columns = 16 * generator.randrange(1, 9)
            algo = generator.choice(["multimem", "p2p", "dist"])
            shape = (rows, columns) if dim != 1 else (rows, 2, columns)
            x = shard(generator, rank, dtype, shape)
            if generator.random() < 0.3:
                x = x.transpose(0, 1).contiguous().transpose(0, 1)
            if generator.randrange(size * 3) == rank:
                time.sleep(0.01)
            inner = group.collectives.all_gather(x, dim=dim)
            out = torch.empty_like(inner) if generator.random() < 0.5 else None
            found = nvls.all_gather_into_tensor(
                x, out=out, workspace=workspace, dim=dim, algo=algo if dim != 1 else "auto"
            )
            assert same_bits(found, inner), (case, dtype, dim, algo, shape)
            assert out is None or found is out


@ranks(2)
def test_two_ranks_gather_what_torch_gathers(rank: int) -> None:
    run_cases(rank, 2, 24)


@ranks(3)
def test_three_ranks_gather_what_torch_gathers(rank: int) -> None:
    run_cases(rank, 3, 8)


@pytest.mark.soak
@ranks(4)
def test_four_ranks_gather_what_torch_gathers(rank: int) -> None:
    run_cases(rank, 4, 10)


@ranks(8)
def test_eight_ranks_gather_what_torch_gathers(rank: int) -> None:
    run_cases(rank, 8, 3)


@ranks(2)
def test_bad_input_is_refused_on_all_ranks_and_the_workspace_goes_on(rank: int) -> None:
    x = torch.full((4, 8), rank, dtype=torch.float32)
    with opened(1 << 12) as workspace:
        with pytest.raises(UnsupportedError, match="no backward"):
            nvls.all_gather_into_tensor(x.clone().requires_grad_(), workspace=workspace)
        with pytest.raises(LayoutError, match="a result of shape"):
            nvls.all_gather_into_tensor(x, out=torch.empty(4, 8), workspace=workspace)
        refused(LayoutError, "dim=2", nvls.all_gather_into_tensor, x, workspace=workspace, dim=2)
        with pytest.raises(ConfigError, match="nccl"):
            nvls.all_gather_into_tensor(x, workspace=workspace, algo="nccl")  # type: ignore[arg-type]
        with pytest.raises(UnsupportedError, match="slot"):
            nvls.all_gather_into_tensor(torch.zeros(1 << 11), workspace=workspace, strict=True)
        # One byte more than 16: the choice of all ranks is torch.distributed.
        odd = torch.full((17,), rank, dtype=torch.uint8)
        assert nvls.all_gather_into_tensor(odd, workspace=workspace).tolist() == [0] * 17 + [1] * 17
        assert "multiple of 16" in workspace.explain(question_of(odd))
        assert nvls.all_gather_into_tensor(x[:, :0], workspace=workspace).shape == (8, 0)
        found = nvls.all_gather_into_tensor(x, workspace=workspace, algo="p2p")
        assert found[:, 0].tolist() == [0.0] * 4 + [1.0] * 4
    refused(ClosedError, "workspace is closed", nvls.all_gather_into_tensor, x, workspace=workspace)
    refused(ConfigError if rank else PeerError, "max_bytes", opened, 0 if rank else 1 << 12)


def question_of(x: Tensor) -> Any:
    from pcomm.nvls.policy.choose import CollectiveRequest

    return CollectiveRequest("all_gather_into_tensor", x.nbytes, x.dtype)


@ranks(2)
def test_a_rank_that_does_not_come_is_named(rank: int) -> None:
    group = Group.from_process_group("tp", default_group())
    x = torch.full((4, 8), float(rank))
    with opened(1 << 12) as workspace:
        # What the first call imports may take one rank longer than the time below.
        nvls.all_gather_into_tensor(x, workspace=workspace, algo="multimem")
    with opened(1 << 12, timeout_s=1.0) as workspace:
        nvls.all_gather_into_tensor(x, workspace=workspace, algo="multimem")
        if rank == 0:
            for _ in range(2):
                with pytest.raises(PeerTimeoutError, match=r"rank 1 did not signal within 1 s"):
                    nvls.all_gather_into_tensor(x, workspace=workspace, algo="multimem")
        agree_in_group(group, "test: rank 0 is through", [])


@ranks(2)
def test_a_late_rank_may_read_what_was_queued_after_a_failure_and_then_raises(rank: int) -> None:
    """As the page on these operations says: what was returned before an error may be wrong."""
    group = Group.from_process_group("tp", default_group())

    def run(number: int) -> list[float]:
        x = torch.full((4, 8), 10.0 * number + rank)
        whole = nvls.all_gather_into_tensor(x, workspace=workspace, algo="multimem")
        return whole.view(2, -1).mean(1).tolist()

    with opened(1 << 12) as workspace:
        run(0)
    with opened(1 << 12, timeout_s=1.0) as workspace:
        # The blocks of a device signal before one of them has failed; here one comes after another.
        launch = workspace.launcher.run
        workspace.launcher.run = lambda one: launch(replace(one, num_blocks=1))  # type: ignore[method-assign]
        assert run(0) == [0.0, 1.0]
        if rank == 0:
            # The host of a GPU has queued all of these before the first has failed.
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(workspace, "check", lambda: None)
                for number in (1, 2, 3):
                    run(number)
            refused(PeerTimeoutError, "rank 1 did not signal", workspace.check)
        agree_in_group(group, "test: rank 0 has queued", [])
        if rank == 1:
            # Of operation 3, which has the slot of operation 1.
            assert run(1) == [30.0, 11.0]
            refused(PeerTimeoutError, "rank 0 did not signal", run, 2)
        agree_in_group(group, "test: rank 1 is through", [])
