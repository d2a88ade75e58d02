"""Bytes sent and memory held by real steps are those of the formulas."""

from __future__ import annotations

import pytest
import torch

from fsdp_support.trainings import (
    MICRO_BATCHES,
    STRATEGIES,
    Block,
    SmallModel,
    flat_groups,
    model_of,
    open_two,
    shard,
    step_of,
    tokens,
)
from pcomm.core.collectives.instrumented import SpyCollectives
from pcomm.core.groups.open_groups import open_groups
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.topology import Topology
from pcomm.fsdp._fully_shard import fully_shard
from pcomm.fsdp.settings import CommPolicy, Precision, Roles


@pytest.mark.parametrize(
    ("strategy", "prefetch"),
    [("zero3", 0), ("zero3", 1), ("zero3", 2), ("zero3, reduced once", 1), ("zero2", 2),
     ("zero1", 0)],
)  # fmt: skip
@ranks(2)
def test_bytes_are_those_of_the_formula(rank: int, strategy: str, prefetch: int) -> None:
    """(N - 1) / N P b for each gather and each reduce."""
    reshard = STRATEGIES[strategy]
    with open_two() as groups:
        gather, reduce = groups["dp", "gather"], groups["dp", "reduce"]
        gathers = gather.collectives = SpyCollectives(gather.collectives)
        reduces = reduce.collectives = SpyCollectives(reduce.collectives)
        model = model_of(torch.float32)
        precision = Precision(torch.bfloat16, torch.float32)
        sharded = fully_shard(
            model,
            Roles(gather, reduce),
            units=[Block],
            reshard=reshard,
            comm=CommPolicy(prefetch=prefetch),
            precision=precision,
        )
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
        step_of(model, sharded, 0, rank)
        optimizer.step()
        gathers.clear()
        reduces.clear()
        step_of(model, sharded, 1, rank)
    root, *blocks = sharded.plans
    elements = {plan.name: plan.layout.length for plan in sharded.plans}
    total, block = sum(elements.values()), elements["blocks.0"]
    assert len(blocks) == 4
    if reshard.keep == "use":
        # Forward and backward of each micro-batch; the root stays, and so do the last units of
        # forward, which backward needs first.
        gathered = MICRO_BATCHES * (2 * total - elements[root.name] - (1 + prefetch) * block)
    else:
        gathered = total
    reduced = total * (MICRO_BATCHES if reshard.reduce == "micro_batch" else 1)
    assert gathers.sent_bytes == gathered * 2 // 2, strategy
    assert reduces.sent_bytes == reduced * 4 // 2, strategy
    assert set(gathers.counts) == {"all_gather"}
    assert set(reduces.counts) == {"reduce_scatter"}


@pytest.mark.parametrize(("prefetch", "backward"), [(0, None), (1, None), (2, None), (2, 0)])
@ranks(2)
def test_memory_is_given_back(rank: int, prefetch: int, backward: int | None) -> None:
    with open_two() as groups:
        model = SmallModel(num_blocks=7).double()
        comm = CommPolicy(prefetch=prefetch, inflight_reduce=2, prefetch_backward=backward)
        sharded = shard(model, groups, comm=comm)
        root, block = (plan.gathered_bytes for plan in sharded.plans[:2])
        gathered, gradients, in_backward = [], [], []

        def look(*_: object) -> None:
            memory = sharded.memory()
            gathered.append(memory["gathered"])
            gradients.append(memory["gradients"])
            taken = [one for group in flat_groups(sharded) for one in group.gradients.buffers]
            assert len({one.data_ptr() for one in taken}) == len(taken), "a buffer is used twice"

        def look_in_backward(*_: object) -> None:
            look()
            in_backward.append(gathered[-1])

        for one in model.blocks:
            one.down.register_forward_hook(look)
            one.norm.register_full_backward_hook(look_in_backward)
        for _ in range(2):
            in_backward.clear()
            assert sharded.memory()["gathered"] == sharded.memory()["gradients"] == 0
            model.loss(tokens(0, 0, rank)).backward()
            sharded.zero_grad()
        assert max(gathered) == root + (1 + prefetch) * block
        # The last ones of forward are still there; those after them come as backward says.
        depth = prefetch if backward is None else backward
        assert max(in_backward[1 + prefetch :]) == root + (1 + depth) * block
        # One that is filled, two on their way, and the root's, which fills up all along.
        assert max(gradients) <= root + 3 * block
        num_bytes = sum(
            plan.layout.shard_length * plan.main_dtype.itemsize for plan in sharded.plans
        )
        assert sharded.memory() == {
            "shards": num_bytes,
            "gathered": 0,
            "gradients": 0,
            "shard gradients": 0,
        }


@pytest.mark.parametrize("limit", ["less", "as much", "none"])
@ranks(2)
def test_a_budget_of_bytes_is_kept_by_a_real_step(rank: int, limit: str) -> None:
    """Both sides of what two units need, in bytes of what is gathered."""
    reference = model_of()
    (sum(reference.loss(tokens(0, 0, r)) for r in (0, 1)) / 2).backward()
    with open_groups(Topology({"dp": 2}), ["dp"]) as groups:
        roles = Roles(groups["dp"], groups["dp"])
        block = fully_shard(model_of(), roles, units=[Block]).plans[1].gathered_bytes
        budget = {"less": 2 * block - 1, "as much": 2 * block, "none": None}[limit]
        model = model_of()
        comm = CommPolicy(prefetch=3, prefetch_bytes=budget)
        sharded = fully_shard(model, roles, units=[Block], comm=comm)
        root = sharded.plans[0].gathered_bytes
        model.loss(tokens(0, 0, rank)).backward()
        sharded.zero_grad()
        seen: list[int] = []
        model.blocks[0].norm.register_forward_hook(
            lambda *_: seen.append((sharded.memory()["gathered"] - root) // block)
        )
        model.loss(tokens(0, 0, rank)).backward()
        # In forward and in backward: the one in use, and one, two or three ahead.
        assert seen[0] == {"less": 2, "as much": 3, "none": 4}[limit]
        for name, gradient in sharded.full_gradients().items():
            expected = reference.get_parameter(name).grad
            torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-14, msg=name)
