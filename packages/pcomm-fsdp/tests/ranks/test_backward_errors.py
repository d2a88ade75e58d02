"""An error on one rank ends the wait of the others at once; on all ranks, they go on."""

from __future__ import annotations

import gc
import weakref
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

from fsdp_support.trainings import (
    TOKENS,
    Recompute,
    SmallModel,
    accumulated_step,
    flat_groups,
    open_two,
    shard,
    step_on_tokens,
    throw,
)
from pcomm.core.errors import PcommError, PeerError, UnsupportedError
from pcomm.core.testing.on_ranks import ranks
from pcomm.fsdp.runtime import hooks
from pcomm.fsdp.runtime.fsdp_runtime import FsdpRuntime
from pcomm.fsdp.settings import CommPolicy, ReshardPolicy

HEARD = r"an error on rank 0: .*backward raised, within unit 'blocks.1'"


class Raising(torch.autograd.Function):
    """A layer of the user's whose backward has a mistake; no hook of ours sees it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise ArithmeticError("a bad gradient")


class WrongShape(torch.autograd.Function):
    """The same, noticed by autograd's own C++."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].new_zeros(3, 2)


def break_backward(
    model: SmallModel, fault: type[torch.autograd.Function]
) -> torch.utils.hooks.RemovableHandle:
    """From here on the backward of the second block raises."""
    return model.blocks[1].down.register_forward_hook(lambda _m, _x, y: fault.apply(y))


def break_step(model: SmallModel, where: str) -> torch.utils.hooks.RemovableHandle:
    """From here on a forward or a backward raises."""
    if where == "backward":
        return break_backward(model, Raising)
    return model.blocks[2].up.register_forward_hook(throw)


FAULTS = {"python": (Raising, ArithmeticError), "autograd": (WrongShape, RuntimeError)}


@pytest.mark.parametrize(
    ("recompute", "where"),
    [("no", "python"), ("no", "autograd"), ("blocks", "autograd"), ("reentrant", "python")],
)
@ranks(2)
def test_one_rank_raises_in_a_later_backward(rank: int, recompute: Recompute, where: str) -> None:
    """Without the failure flag rank 1 waits until the pool of ranks ends it, and the test fails."""
    model = SmallModel(recompute=recompute)
    with open_two() as groups:
        sharded = shard(model, groups)
        step_on_tokens(model, sharded)
        fault, own = FAULTS[where]
        handle = break_backward(model, fault) if rank == 0 else None
        with pytest.raises(PeerError if rank else own) as caught:
            step_on_tokens(model, sharded)
        if rank:
            caught.match(HEARD)
        else:
            # The error of the user, and not one of ours in its place.
            assert not isinstance(caught.value, PcommError)
            handle.remove()
        with pytest.raises(PcommError, match="step after an error"):
            step_on_tokens(model, sharded)


@pytest.mark.parametrize("checks", [True, False])
@ranks(2)
def test_one_rank_raises_in_the_first_backward(rank: int, checks: bool) -> None:
    model = SmallModel()
    with open_two() as groups:
        sharded = shard(model, groups, comm=CommPolicy(checks_first_step=checks))
        if rank == 0:
            break_backward(model, Raising)
        with pytest.raises(PeerError if rank else ArithmeticError) as caught:
            step_on_tokens(model, sharded)
        if rank:
            caught.match("rank 0.*backward raised, within unit 'blocks.1'")


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("is_first", [True, False])
@ranks(2)
def test_all_ranks_raise_and_go_on(rank: int, is_first: bool, where: str) -> None:
    torch.manual_seed(0)
    model = SmallModel()
    with open_two() as groups:
        sharded = shard(model, groups)
        losses = [] if is_first else [step_on_tokens(model, sharded)]
        for _ in range(2):
            handle = break_step(model, where)
            with pytest.raises(ArithmeticError):
                step_on_tokens(model, sharded)
            # At once, and not only when the next step begins.
            assert sharded.memory()["gathered"] == 0
            parts = zip(model.parameters(), sharded.parameters(), strict=True)
            assert all(p.numel() == q.numel() for p, q in parts)
            handle.remove()
            losses.append(step_on_tokens(model, sharded))
        assert len(set(losses)) == 1


def never_ends() -> NoReturn:
    """What a wait for a peer that does not come ends with."""
    raise PeerError("fsdp: gather of blocks.2", found="no peer", why="It died.", fix="Restart.")


@ranks(2)
def test_a_collective_that_never_ended(rank: int) -> None:
    """The ranks have issued the same collectives, so that nothing but this tells them to stop."""
    model = SmallModel()
    with open_two() as groups:
        sharded = shard(model, groups)
        step_on_tokens(model, sharded)
        handle = break_step(model, "forward")
        if rank == 0:
            flat_groups(sharded)[3].drain = never_ends  # type: ignore[method-assign]
        with pytest.raises(ArithmeticError):
            step_on_tokens(model, sharded)
        # It may still write into what was gathered: only the other rank gives memory back.
        assert (sharded.memory()["gathered"] > 0) is (rank == 0)
        assert len(list(sharded.parameters())) == len(list(model.parameters()))
        handle.remove()
        for _ in range(2):
            with pytest.raises(PeerError, match="collectives that some ranks never joined"):
                step_on_tokens(model, sharded)


@ranks(2)
def test_a_backward_that_ends_leaves_nothing_behind(rank: int) -> None:
    """Nothing sounds, and what autograd held is gone without the help of the collector."""
    model = SmallModel()
    made: list[weakref.ref[object]] = []
    failures: list[BaseException] = []
    build, fail = hooks._BackwardEnd.__init__, FsdpRuntime.fail

    def note(self: hooks._BackwardEnd, runtime: FsdpRuntime) -> None:
        build(self, runtime)
        made.append(weakref.ref(self))

    hooks._BackwardEnd.__init__ = note
    FsdpRuntime.fail = lambda self, error: failures.append(error)
    gc.disable()
    try:
        with open_two() as groups:
            sharded = shard(model, groups)
            for _ in range(3):
                step_on_tokens(model, sharded)
            with torch.no_grad():
                model.loss(TOKENS)
    finally:
        hooks._BackwardEnd.__init__, FsdpRuntime.fail = build, fail
        gc.enable()
    assert len(made) == 3
    assert all(one() is None for one in made)
    assert not failures


@pytest.mark.parametrize("where", ["forward", "backward"])
@ranks(2)
def test_one_rank_raises_while_the_other_is_a_micro_batch_ahead(rank: int, where: str) -> None:
    """Where gradients are reduced once a step, nothing holds a rank up between micro-batches."""
    model = SmallModel()
    with open_two() as groups:
        sharded = shard(model, groups, reshard=ReshardPolicy.zero1())

        for _ in range(2):
            accumulated_step(model, sharded)
        if rank == 0:
            break_step(model, where)
        with pytest.raises(PeerError if rank else ArithmeticError):
            accumulated_step(model, sharded)


@ranks(2)
def test_sparse_gradients_are_refused(rank: int) -> None:
    model = SmallModel()
    model.embedding.sparse = True
    with open_two() as groups:
        sharded = shard(model, groups)
        with pytest.raises(UnsupportedError, match=r"embedding\.weight: a sparse"):
            step_on_tokens(model, sharded)
