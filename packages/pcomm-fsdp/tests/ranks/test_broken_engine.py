"""After a collective that never ended, memory stays where it is and no rank goes on."""

from __future__ import annotations

from typing import NoReturn

import pytest
from torch import nn

from fsdp_support.trainings import (
    TOKENS,
    SmallModel,
    flat_groups,
    open_two,
    shard,
    step_on_tokens,
    throw,
)
from pcomm.core.errors import PeerError
from pcomm.core.testing.on_ranks import ranks
from pcomm.fsdp.runtime.param_group import ParamGroup
from pcomm.fsdp.settings import CommPolicy, ReshardPolicy
from pcomm.fsdp.sharded import Sharded


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
        handle = model.blocks[2].up.register_forward_hook(throw)
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
def test_the_same_error_without_it_is_no_end(rank: int) -> None:
    """What the test above would find if its error were not the reason."""
    model = SmallModel()
    with open_two() as groups:
        sharded = shard(model, groups)
        step_on_tokens(model, sharded)
        handle = model.blocks[2].up.register_forward_hook(throw)
        with pytest.raises(ArithmeticError):
            step_on_tokens(model, sharded)
        assert sharded.memory()["gathered"] == 0
        handle.remove()
        step_on_tokens(model, sharded)


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
            sharded.zero_grad()
            for number in range(2):
                with sharded.accumulate(is_last=number == 1):
                    model.loss(TOKENS).backward()
    # Several at once, or the test sees nothing.
    assert most >= 3
