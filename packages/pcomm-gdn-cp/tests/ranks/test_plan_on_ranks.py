"""Plans on gloo ranks: layers against one process, and packs that differ between ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pcomm.core.collectives.spy import SpyCollectives
from pcomm.core.errors import DivergenceError, LayoutError, PeerError
from pcomm.core.group import Group
from pcomm.core.testing.ranks import ranks
from pcomm.gdn_cp.plan import make_plan
from pcomm.gdn_cp.specs import AttentionSpec, GdnSpec, Mamba2Spec, Spec
from pcomm.gdn_cp.testing.planned_mixers import mixer, weights_of
from pcomm.gdn_cp.testing.slow_decay import relative_error

DIM = 6
PACK = (0, 48, 48, 96, 192, 240)
SPECS: list[Spec] = [GdnSpec(2, 4, 3, 5), Mamba2Spec(4, 3, 2, 5), AttentionSpec(4, 2, 4)]
# Roundings of values near one, over some hundred additions in another order: 1e-14 in fp64, and
# 1e-5 in fp32; a state or a gradient that is lost changes the first digit.
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-4}


def world() -> Group:
    assert dist.group.WORLD is not None
    return Group.from_process_group("cp", dist.group.WORLD)


def check_layers(mode: str, layout: str, dtype: torch.dtype) -> None:
    """Three layers in a row, forward and every gradient, as on one process."""
    generator = torch.Generator().manual_seed(5)
    shape = (PACK[-1], DIM)
    hidden, upstream = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    group = world()
    plan = make_plan(
        PACK,
        group,
        SPECS,
        layout=layout,
        mode=mode,
        hidden_dim=DIM,
        verify=True,  # type: ignore[arg-type]
    )
    results = []
    for current in (plan, make_plan(PACK, (0, 1), SPECS)):
        x = current.shard(hidden).clone().requires_grad_()
        weights = [weights_of(spec, DIM, dtype=dtype, seed=i) for i, spec in enumerate(SPECS)]
        y = x
        for spec, own in zip(SPECS, weights, strict=True):
            y = y + mixer(current, spec, y, own)
        leaves = [x, *(leaf for own in weights for leaf in own.values())]
        grads = torch.autograd.grad(y, leaves, current.shard(upstream), materialize_grads=True)
        results.append((y.detach(), grads))
    (y, grads), (whole_y, whole_grads) = results
    totals = [group.collectives.all_reduce(grad) for grad in grads[1:]]
    actual = [y, grads[0], *totals]
    expected = [plan.shard(whole_y), plan.shard(whole_grads[0]), *whole_grads[1:]]
    assert relative_error(actual, expected) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("mode", ["heads", "docs", "state", "gather", "auto"])
@ranks(2)
def test_two_ranks_are_one(rank: int, mode: str, layout: str, dtype: torch.dtype) -> None:
    check_layers(mode, layout, dtype)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("mode", ["docs", "state"])
@ranks(3)
def test_three_ranks_are_one(rank: int, mode: str, layout: str) -> None:
    check_layers(mode, layout, torch.float64)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("mode", ["heads", "docs", "state", "gather"])
@ranks(4)
def test_four_ranks_are_one(rank: int, mode: str, layout: str) -> None:
    check_layers(mode, layout, torch.float64)


@pytest.mark.parametrize("num_sequences", [1, 7, 60])
@ranks(2)
def test_heads_are_one_exchange_each_way_whatever_the_number_of_sequences(
    rank: int, num_sequences: int
) -> None:
    spec = SPECS[0]
    group = world()
    spy = SpyCollectives(group.collectives)
    plan = make_plan(tuple(range(0, 8 * num_sequences + 1, 8)), spy, spec, mode="heads")
    sections = [torch.randn(4 * num_sequences, s.width).requires_grad_() for s in spec.sections]
    output = plan.from_heads(spec, plan.to_heads(spec, sections)[2] * 2)
    assert spy.counts == {"all_to_all": 2}
    output.sum().backward()
    assert spy.counts == {"all_to_all": 4}
    assert spy.sent_bytes == 2 * plan.traffic(spec).sent_bytes


@ranks(3)
def test_packs_that_differ_between_ranks_are_refused_on_all_of_them(rank: int) -> None:
    pack = (0, 12, 24) if rank != 2 else (0, 24, 24)
    group = world()
    with pytest.raises(DivergenceError, match=r"'cu_seqlens\[1\] = 12', rank 2 has .* = 24'"):
        make_plan(pack, group, SPECS[0], mode="state", verify=True)
    # Nobody is left waiting: the next plan is made as if nothing had happened.
    assert make_plan((0, 12, 24), group, SPECS[0], mode="state", verify=True).modes == ("state",)


@ranks(3)
def test_an_error_on_one_rank_is_one_on_all(rank: int) -> None:
    pack = (0, 12, 24) if rank != 1 else (0, 13, 24)
    kind, words = (LayoutError, "13 tokens") if rank == 1 else (PeerError, "rank 1: LayoutError")
    with pytest.raises(kind, match=words):
        make_plan(pack, world(), SPECS[0], mode="state", verify=True)
