"""Every strategy against one process that has the whole batch, and against torch FSDP2.

In fp64, where the order of sums leaves 1e-12 and every mistake leaves more.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2

from fsdp_support.trainings import STRATEGIES, SmallModel, model_of, open_two, shard, tokens
from pcomm.core.testing.on_ranks import ranks
from pcomm.fsdp.settings import CommPolicy, ReshardPolicy
from pcomm.fsdp.sharded import Sharded

STEPS, MICRO = 3, 2
MAX_NORM = 0.3


def optimizer_of(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.03, weight_decay=0.1)  # type: ignore[arg-type]


def one_process(size: int, **options: object) -> tuple[list[float], list[float], SmallModel]:
    """Losses and gradient norms by step, and the model afterwards."""
    model = model_of(**options)
    optimizer = optimizer_of(model.parameters())
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for micro in range(MICRO):
            loss = sum(model.loss(tokens(step, micro, rank)) for rank in range(size)) / size
            loss.backward()  # type: ignore[union-attr]
            total += loss.item()  # type: ignore[union-attr]
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        losses.append(total)
    return losses, norms, model


def torch_fsdp2(rank: int, size: int, **options: object) -> dict[str, Tensor]:
    """Parameters after the same steps with torch's own sharding."""
    model = model_of(**options)
    mesh = init_device_mesh("cpu", (size,))
    for block in model.blocks:
        fsdp2(block, mesh=mesh)
    fsdp2(model, mesh=mesh)
    optimizer = optimizer_of(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(MICRO):
            model.loss(tokens(step, micro, rank)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    return {name: p.full_tensor() for name, p in model.named_parameters()}


def train_sharded(
    model: SmallModel, sharded: Sharded, rank: int
) -> tuple[list[float], list[float]]:
    """Losses of this rank and gradient norms by step."""
    optimizer = optimizer_of(sharded.parameters())
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for micro in range(MICRO):
            with sharded.accumulate(is_last=micro == MICRO - 1):
                loss = model.loss(tokens(step, micro, rank))
                loss.backward()
            total += loss.item()
        norms.append(sharded.clip_grad_norm(MAX_NORM).item())
        optimizer.step()
        losses.append(total)
    return losses, norms


def check(
    rank: int, size: int, reshard: ReshardPolicy, *, with_fsdp2: bool = True, **options: object
) -> str:
    """Compare, and return the schedule's fingerprint."""
    comm = options.pop("comm", CommPolicy())
    expected_losses, expected_norms, expected = one_process(size, **options)
    model = model_of(**options)
    with open_two(size) as groups:
        sharded = shard(model, groups, reshard=reshard, comm=comm)
        losses, norms = train_sharded(model, sharded, rank)
        mean = (
            groups["dp", "gather"].collectives.all_reduce(torch.tensor(losses, dtype=torch.float64))
            / size
        )
        torch.testing.assert_close(mean.tolist(), expected_losses, rtol=1e-11, atol=0)
        torch.testing.assert_close(norms, expected_norms, rtol=1e-10, atol=0)
        state = sharded.full_state_dict()
        assert sharded.schedule is not None
        fingerprint = sharded.schedule.fingerprint
    assert list(state) == list(expected.state_dict())
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-10, msg=name)
    if with_fsdp2:
        for name, value in torch_fsdp2(rank, size, **options).items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-10, msg=name)
    return fingerprint


# Each strategy once, and where it is sharded over how many ranks matters, which is how parameters
# are cut and gathered, each number of ranks.
@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_two_ranks(rank: int, strategy: str) -> None:
    check(rank, 2, STRATEGIES[strategy], with_fsdp2=False)


@pytest.mark.parametrize("strategy", ["zero3", "zero2"])
@ranks(3)
def test_three_ranks(rank: int, strategy: str) -> None:
    check(rank, 3, STRATEGIES[strategy], with_fsdp2=strategy == "zero3")


@ranks(4)
def test_four_ranks(rank: int) -> None:
    check(rank, 4, STRATEGIES["zero3"], with_fsdp2=False)


@pytest.mark.parametrize("recompute", ["blocks", "reentrant", "inside", "all blocks at once"])
@ranks(2)
def test_recompute(rank: int, recompute: str) -> None:
    found = check(rank, 2, ReshardPolicy.zero3(), with_fsdp2=False, recompute=recompute)
    if recompute in ("blocks", "inside"):
        # Computing again does not change the schedule.
        assert found == check(rank, 2, ReshardPolicy.zero3(), with_fsdp2=False)


@ranks(3)
def test_tied(rank: int) -> None:
    check(rank, 3, STRATEGIES["zero3"], is_tied=True)


@ranks(2)
def test_tied_and_kept(rank: int) -> None:
    check(rank, 2, STRATEGIES["zero1"], is_tied=True, with_fsdp2=False)


@pytest.mark.parametrize(
    "comm",
    [
        CommPolicy(prefetch=0),
        CommPolicy(prefetch=3, inflight_reduce=1),
        CommPolicy(prefetch=4, prefetch_bytes=1),
        CommPolicy(prefetch_backward=0),
        CommPolicy(prefetch=0, prefetch_backward=2),
        CommPolicy(separate="never"),
    ],
    ids=str,
)
@ranks(2)
def test_policies(rank: int, comm: CommPolicy) -> None:
    check(rank, 2, ReshardPolicy.zero3(), with_fsdp2=False, comm=comm)


@ranks(3)
def test_rows_that_are_cut(rank: int) -> None:
    """Without padding three ranks cut them; and none of them waits for the others to agree."""
    comm = CommPolicy(max_padding=0.0, checks_first_step=False)
    check(rank, 3, ReshardPolicy.zero3(), with_fsdp2=False, comm=comm)
