"""Gradients lie in as little memory as they can: none that is stale, no copy that is not needed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from fsdp_support.trainings import (
    Block,
    SmallModel,
    accumulated_step,
    check_gradients,
    flat_groups,
    model_of,
    open_two,
    replicated,
    shard,
    tokens,
)
from pcomm.core.collectives.instrumented import SpyCollectives
from pcomm.core.collectives.protocol import Call, Collectives, Pending
from pcomm.core.testing.assertions import assert_equal
from pcomm.core.testing.on_ranks import ranks
from pcomm.fsdp._fully_shard import fully_shard
from pcomm.fsdp.runtime.param_group import ParamGroup
from pcomm.fsdp.settings import CommPolicy, Precision, ReshardPolicy, Roles
from pcomm.fsdp.sharded import Sharded

# -- gradients of shards -----------------------------------------------------------------------


class SumsCopies(SpyCollectives):
    """Hands gloo copies, since its thread lets go of memory a moment after the sum is there."""

    def start(self, call: Call) -> Pending:
        if call.operation != "all_reduce":
            return super().start(call)
        out, total = call.out, self.inner.all_reduce(call.x.clone(), op=call.op)
        result = total if out is None else out.copy_(total)
        return Pending(lambda: result)


both = pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=str)


@both
@pytest.mark.parametrize("clears", ["optimizer", "sharded"])
@ranks(2)
def test_no_old_gradient_is_held_when_the_next_forward_begins(
    rank: int, clears: str, sizes: tuple[int, int]
) -> None:
    with replicated(*sizes) as roles:
        assert roles.replicate is not None
        roles.replicate.collectives = SumsCopies(roles.replicate.collectives)
        model = SmallModel()
        sharded = fully_shard(model, roles, units=[Block])
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
        old: list[weakref.ref[torch.UntypedStorage]] = []
        held: list[int] = []

        def look(*_: object) -> None:
            held.append(sum(one() is not None for one in old))

        model.blocks[0].register_forward_pre_hook(look)
        for step in range(3):
            model.loss(tokens(step, 0, rank)).backward()
            optimizer.step()
            # A storage and what Python sees of it live equally long.
            gradients = [part.grad for part in sharded.parameters() if part.grad is not None]
            old = [weakref.ref(gradient.untyped_storage()) for gradient in gradients]
            del gradients
            assert len(old) == len(list(sharded.parameters()))
            look()
            (optimizer if clears == "optimizer" else sharded).zero_grad()
        model.loss(tokens(9, 0, rank))
        # In each forward, and before the gradients were cleared.
        assert held == [0, len(old), 0, len(old), 0, len(old), 0]


@both
@ranks(2)
def test_micro_batches_add_into_the_gradient_that_is_there(
    rank: int, sizes: tuple[int, int]
) -> None:
    reference, model = model_of(), model_of()
    with replicated(*sizes) as roles:
        sharded = fully_shard(model, roles, units=[Block])
        deposits: list[list[int]] = []
        for micro in range(3):
            # All are last ones, so that gradients of replicas are there after each.
            model.loss(tokens(0, micro, rank)).backward()
            (sum(reference.loss(tokens(0, micro, r)) for r in (0, 1)) / 2).backward()
            deposits.append([])
            for group in flat_groups(sharded):
                assert group.shard._gradient is not None
                at = group.shard._gradient.untyped_storage().data_ptr()
                deposits[-1].append(at)
                for part in group.shard.parameters:
                    assert part.grad is not None
                    assert part.grad.untyped_storage().data_ptr() == at
        assert deposits[0] == deposits[1] == deposits[2]
        assert len(set(deposits[0])) == len(sharded.plans)
        check_gradients(sharded, reference)


# -- whole gradients ---------------------------------------------------------------------------


class Addresses(SpyCollectives):
    """Notes where what is reduced lies."""

    def __init__(self, inner: Collectives) -> None:
        super().__init__(inner)
        self.reduced: list[int] = []

    def start(self, call: Call) -> Pending:
        if call.operation == "reduce_scatter":
            self.reduced.append(call.x.data_ptr())
        return super().start(call)


class Prefix(nn.Module):
    """Its gradient is a part of the memory of that of what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.weight, x])


class Positions(nn.Module):
    """Its gradient is, in another shape, that of what comes in: the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.view(4, 4)


def square() -> nn.Module:
    return nn.Linear(4, 4, bias=False)


# Elements that two ranks cannot share equally, so that there is padding.
def narrow() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3, bias=False), nn.ZeroPad1d((0, 1)))


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "square": square,
    "prefix": Prefix,
    "positions": Positions,
    "narrow": narrow,
}


@pytest.mark.parametrize(
    ("kind", "reduces", "reduce_dtype", "is_as_made"),
    [
        pytest.param("square", "micro_batch", None, [True] * 6, id="all there is"),
        pytest.param("square", "step", None, [True] * 3, id="all there is, reduced once"),
        pytest.param("square", "micro_batch", torch.float64, [False] * 6, id="another format"),
        pytest.param("narrow", "micro_batch", None, [False, False, True] * 2, id="with padding"),
        pytest.param("prefix", "micro_batch", None, [False, False, True] * 2, id="part of another"),
        pytest.param("prefix", "step", None, [False, False, True], id="part, reduced once"),
        pytest.param(
            "positions",
            "micro_batch",
            None,
            [False, False, True] * 2,
            id="all of another",
        ),
    ],
)
@ranks(2)
def test_a_gradient_is_copied_unless_it_is_all_there_is(
    rank: int,
    kind: str,
    reduces: Literal["micro_batch", "step"],
    reduce_dtype: torch.dtype | None,
    is_as_made: list[bool],
) -> None:
    """For each weight, last first, whether what is reduced lies where autograd made it."""

    def model_of() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(square(), BUILDERS[kind](), BUILDERS[kind]())

    def batch(micro: int, r: int) -> Tensor:
        return torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * micro + r))

    reference, model = model_of().double(), model_of()
    with open_two() as groups:
        reduce = groups["dp", "reduce"]
        spy = reduce.collectives = Addresses(reduce.collectives)
        sharded = fully_shard(
            model,
            Roles(groups["dp", "gather"], reduce),
            units=list(model),
            reshard=ReshardPolicy("use", reduces),
            precision=Precision(reduce_dtype=reduce_dtype),
        )
        made: list[int] = []
        for group in flat_groups(sharded):
            group.unsharded.parameters[0].register_hook(
                lambda gradient: made.append(gradient.data_ptr())
            )
        # One backward for all: torch, too, adds to a gradient that another one lies in.
        everything = [batch(micro, r).double() for micro in range(2) for r in (0, 1)]
        (sum(reference(x).square().mean() for x in everything) / 2).backward()
        for micro in range(2):
            with sharded.accumulate(is_last=micro == 1):
                model(batch(micro, rank)).square().mean().backward()
        for name, gradient in sharded.full_gradients().items():
            expected = reference.get_parameter(name).grad
            # Sums of a few dozen products of fp32 numbers of about one.
            torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=1e-6, msg=name)
    # What is reduced once was made in the first micro-batch, and added to in the second.
    first = made[: len(spy.reduced)]
    assert [a == b for a, b in zip(spy.reduced, first, strict=True)] == is_as_made


@ranks(2)
def test_a_gradient_that_is_not_dense_is_copied(rank: int) -> None:
    """Autograd makes gradients dense for dense parameters; a caller that sets one need not."""
    with open_two() as groups:
        model = nn.Sequential(square())
        sharded = shard(model, groups, units=[nn.Linear])
        (group,) = flat_groups(sharded)

        def give(gradient: Tensor) -> int:
            group.unsharded.parameters[0].grad = gradient
            return gradient.data_ptr()

        expected = torch.arange(16.0).view(4, 4)
        for make, is_taken in ((lambda: expected.t().clone(), False), (expected.clone, True)):
            at = give(make())
            group.gradients.expect()
            group.gradients.take(0)
            assert group.gradients._buffer is not None
            assert (group.gradients._buffer.data_ptr() == at) == is_taken
            assert_equal(group.plan.full_view(group.gradients._buffer, 0), make())
            group.reset()


def gradient_storages(sharded: Sharded) -> list[int]:
    """Where gradients of whole units are, that are filled or on their way."""
    buffers = [one for group in flat_groups(sharded) for one in group.gradients.buffers]
    return [one.untyped_storage().data_ptr() for one in buffers]


@pytest.mark.parametrize(
    "reshard", [ReshardPolicy.zero3(), ReshardPolicy.zero1()], ids=["zero3", "zero1"]
)
@ranks(2)
def test_no_gradient_buffer_has_two_owners(rank: int, reshard: ReshardPolicy) -> None:
    """Looked at whenever a reduce starts or has ended.

    Buffers of one size come back while those of another are taken, and are then taken one after
    another: a buffer that came back twice would be one too many.
    """
    model = SmallModel(num_blocks=12)
    for block in model.blocks[4:8]:
        block.up, block.down = nn.Linear(5, 31), nn.Linear(31, 5, bias=False)
    most = 0
    with open_two() as groups:
        comm = CommPolicy(inflight_reduce=3)
        sharded = shard(model, groups, comm=comm, reshard=reshard)

        def looked_at(method: str, group: ParamGroup) -> None:
            act = getattr(group.gradients, method)

            def look() -> None:
                nonlocal most
                act()
                used = gradient_storages(sharded)
                assert len(set(used)) == len(used), f"{method} of {group.plan.name}"
                most = max(most, len(used))

            setattr(group.gradients, method, look)

        for group in flat_groups(sharded):
            for method in ("reduce", "wait_reduce"):
                looked_at(method, group)
        for _ in range(2):
            accumulated_step(model, sharded)
    # Several at once, or the test sees nothing.
    assert most >= 3
