"""Layers under `torch.compile`: the graph is left wherever a plan or a core is asked for something.

That happens in Dynamo, before any backend, so `aot_eager` shows it, which also traces the backward
as Inductor's does. Inductor, which then spends half a minute on C++ for each layer on a CPU, is not
run here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from gdn_cp_bench.slow_decay import relative_error
from gdn_cp_support.planned_mixers import layer_stack, weights_of, world
from pcomm.core.groups.group import Group
from pcomm.core.testing.on_ranks import ranks
from pcomm.gdn_cp import AttentionSpec, GdnSpec, Mamba2Spec, Plan, Spec, make_plan

DIM = 6
GDN, MAMBA, ATTENTION = GdnSpec(2, 4, 3, 5), Mamba2Spec(4, 3, 2, 5), AttentionSpec(4, 2, 4)
# Equal numbers of tokens in other sequences, as from one micro-batch to the next.
FEW = [(0, 48, 48, 96), (0, 24, 96), (0, 8, 16, 96), (0, 40, 56, 96)]
# A single sequence is a shape that torch never takes as variable: one more compilation.
PACKS = [*FEW, (0, 96), (0, 16, 80, 96)]
# Of torch, where Dynamo looks at tensors between two graphs; an error in tests only.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
# What a compiler may do: add in another order. In fp64, of values near one.
BOUND = 1e-12


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def step(layer: Callable[[Plan, Tensor], Tensor], plan: Plan, leaves: list[Tensor]) -> list[Tensor]:
    """Output and gradients for this rank's part of a fixed input."""
    generator = torch.Generator().manual_seed(1)
    shape = (plan.tokens.num_tokens, DIM)
    whole, upstream = (torch.randn(shape, generator=generator).double() for _ in range(2))
    x = plan.shard(whole).clone().requires_grad_()
    y = layer(plan, x)
    return [y.detach(), *torch.autograd.grad(y, [x, *leaves], plan.shard(upstream))]


def layers_of(specs: list[Spec]) -> tuple[Callable[[Plan, Tensor], Tensor], list[Tensor]]:
    weights = [weights_of(spec, DIM) for spec in specs]

    def layers(plan: Plan, x: Tensor) -> Tensor:
        return layer_stack(plan, specs, x, weights)

    return layers, [leaf for own in weights for leaf in own.values()]


@pytest.mark.parametrize(
    ("spec", "packs"),
    # They differ in what a layer computes, and less in what a compiler sees of the exchange.
    [
        pytest.param(GDN, FEW, id="GDN"),
        pytest.param(GDN, PACKS, id="GDN, more packs", marks=pytest.mark.soak),
        pytest.param(MAMBA, PACKS, id="Mamba-2", marks=pytest.mark.soak),
        pytest.param(ATTENTION, PACKS, id="attention", marks=pytest.mark.soak),
    ],
)
def test_a_compiled_layer_is_the_layer(spec: Spec, packs: list[tuple[int, ...]]) -> None:
    layers, leaves = layers_of([spec])
    compiled = torch.compile(layers, backend="aot_eager")
    compilations = []
    for pack in packs:
        plan = make_plan(pack, (0, 1), spec)
        actual, expected = step(compiled, plan, leaves), step(layers, plan, leaves)
        assert relative_error(actual, expected) < BOUND
        compilations.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert compilations[0] > 0
    # Another pack is not another graph, but for the shapes that Dynamo then takes as variable.
    assert compilations[1] == compilations[3]
    assert compilations[-1] == compilations[-2]


@pytest.mark.parametrize(
    "strategies",
    # A compiler sees no more of a strategy than which operations it needs; `docs` with a document
    # that is cut needs all of them.
    [("docs",), ("heads", "state", "gather")],
    ids="+".join,
)
@pytest.mark.soak
@ranks(2, leaves="tqdm's monitor, which torch.compile starts, lives as long as the process")
def test_compiled_layers_on_two_ranks_are_the_layers(rank: int, strategies: list[str]) -> None:
    torch._dynamo.reset()
    group = Group.from_process_group("cp", world())
    layers, leaves = layers_of([GDN])
    # How backward is traced is seen on one rank.
    compiled: Any = torch.compile(layers, backend="eager", dynamic=False)
    for strategy in strategies:
        plan = make_plan((0, 72, 96), group, GDN, strategy=strategy, layout="contiguous")  # type: ignore[arg-type]
        actual, expected = step(compiled, plan, leaves), step(layers, plan, leaves)
        assert relative_error(actual, expected) < BOUND
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    torch._dynamo.reset()


def test_a_whole_graph_is_refused_in_words() -> None:
    layers, leaves = layers_of([ATTENTION])
    plan = make_plan(PACKS[0], (0, 1), ATTENTION)
    compiled = torch.compile(layers, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"Plan\.enter"):
        step(compiled, plan, leaves)
