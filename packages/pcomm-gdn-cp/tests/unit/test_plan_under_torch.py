"""Layers with a plan under what training does around them, each beside one rank that does the same.

Recomputation, autocast, second derivatives, gradients of odd strides, several micro-batches under
way, one plan for several dtypes. Three ranks, packs with empty documents and with single tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gdn_cp_bench.slow_decay import relative_error
from gdn_cp_support.planned_mixers import in_pack_order, mixer, sum_over_ranks, weights_of
from pcomm.core.testing.virtual import VirtualCollectives, run_virtual
from pcomm.gdn_cp import AttentionSpec, GdnSpec, Mamba2Spec, Plan, Spec, make_plan

SIZE, DIM = 3, 6
GDN, MAMBA, ATTENTION = GdnSpec(3, 6, 3, 5), Mamba2Spec(6, 3, 3, 5), AttentionSpec(6, 3, 4)
EVEN, ODD = (0, 48, 48, 96), (0, 1, 2, 3, 3, 40, 41, 96)
# Documents of attention are never cut, and the maps of Mamba-2 are numbers.
CASES = [
    (GDN, "heads"),
    (GDN, "docs"),
    (GDN, "state"),
    (GDN, "gather"),
    (MAMBA, "state"),
    (ATTENTION, "docs"),
]
# Roundings of values near one, in another order.
BOUND = 1e-12

Layer = Callable[[Tensor], Tensor]
Run = Callable[[Layer, Tensor, Tensor], Tensor]


def tensor_of(seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(EVEN[-1], DIM, generator=generator, dtype=torch.float64).to(dtype)


def result(
    plan: Plan, spec: Spec, run: Run, dtype: torch.dtype = torch.float64
) -> tuple[list[Tensor], list[Tensor]]:
    """Output and gradient of this rank's tokens, and this rank's part of the weights' gradients.

    Args:
        plan: For `spec`.
        spec: The mixer.
        run: The loss from the layer, its input, and what is to arrive at its output.
        dtype: Of everything.
    """
    weights = weights_of(spec, DIM, dtype=dtype)
    x = plan.shard(tensor_of(1, dtype)).clone().requires_grad_()
    outputs: list[Tensor] = []

    def layer(x: Tensor) -> Tensor:
        outputs.append(mixer(plan, spec, x, weights))
        return outputs[-1]

    run(layer, x, plan.shard(tensor_of(2, dtype))).backward()
    leaves = [x, *weights.values()]
    grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    return [outputs[0].detach(), grads[0]], grads[1:]


def distance(
    spec: Spec, strategy: Any, pack: tuple[int, ...], run: Run, dtype: torch.dtype = torch.float64
) -> float:
    """Between three ranks and one."""
    layout: Any = "contiguous" if pack == ODD else "zigzag"

    def on_rank(collectives: VirtualCollectives) -> tuple[Plan, Any]:
        plan = make_plan(pack, collectives, spec, strategy=strategy, layout=layout, hidden_dim=DIM)
        return plan, result(plan, spec, run, dtype)

    found = run_virtual(on_rank, SIZE)
    expected = result(make_plan(pack, (0, 1), spec), spec, run, dtype)
    layout_of_tokens = found[0][0].tokens
    tokens = [in_pack_order(layout_of_tokens, [r[0][i] for _, r in found]) for i in range(2)]
    sums = sum_over_ranks([r[1] for _, r in found])
    return relative_error([*tokens, *sums], [*expected[0], *expected[1]])


def plainly(layer: Layer, x: Tensor, upstream: Tensor) -> Tensor:
    return (layer(x) * upstream).sum()


def recomputed(layer: Layer, x: Tensor, upstream: Tensor, reenters: bool = False) -> Tensor:
    y: Tensor = checkpoint(layer, x, use_reentrant=reenters)
    return (y * upstream).sum()


def with_expanded_gradients(layer: Layer, x: Tensor, upstream: Tensor) -> Tensor:
    return layer(x).sum()


def with_transposed_gradients(layer: Layer, x: Tensor, upstream: Tensor) -> Tensor:
    return (layer(x).t().contiguous() * upstream.t()).sum()


def twice_under_way(layer: Layer, x: Tensor, upstream: Tensor) -> Tensor:
    """Two micro-batches, of which the first one's gradients come first."""
    first, second = layer(x), layer(x.flip(1))
    (first * upstream).sum().backward(retain_graph=True)
    return (second * upstream).sum()


def after_an_evaluation(layer: Layer, x: Tensor, upstream: Tensor) -> Tensor:
    with torch.inference_mode():
        layer(x.detach().clone())
    with torch.no_grad():
        evaluated = layer(x)
    y = layer(x)
    assert torch.equal(y, evaluated)
    return (y * upstream).sum()


RUNS: list[Run] = [
    recomputed,
    partial(recomputed, reenters=True),
    with_expanded_gradients,
    with_transposed_gradients,
    twice_under_way,
    after_an_evaluation,
]


@pytest.mark.parametrize(("spec", "strategy"), CASES, ids=str)
@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.soak)])
def test_three_ranks_are_one(spec: Spec, strategy: str, every: int) -> None:
    """Each run with one of two packs, which change places from case to case; or every second."""
    case = CASES.index((spec, strategy))
    for number, run in list(enumerate(RUNS, case))[case % every :: every]:
        # Else those of a case would all have one pack.
        number = number if every == 1 else number // 2
        error = distance(spec, strategy, (EVEN, ODD)[number % 2], run)
        assert error < BOUND, run


@pytest.mark.parametrize(
    ("spec", "strategy", "dtype"),
    [*((*case, torch.bfloat16) for case in CASES), (GDN, "state", torch.float16)],
    ids=str,
)
def test_half_precision_is_as_near_as_its_roundings(
    spec: Spec, strategy: str, dtype: torch.dtype
) -> None:
    """Weights' gradients are sums of three roundings instead of one; a lost state is off by 1."""
    assert distance(spec, strategy, ODD, plainly, dtype) < 6 * torch.finfo(dtype).eps


@pytest.mark.parametrize(("spec", "strategy"), CASES, ids=str)
def test_autocast_is_that_of_one_rank(spec: Spec, strategy: str) -> None:
    def run(layer: Layer, x: Tensor, upstream: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
        return (y * upstream).sum()

    assert distance(spec, strategy, ODD, run, torch.float32) < 6 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("strategy", ["heads", "docs", "state", "gather"])
def test_one_plan_serves_several_dtypes(strategy: Any) -> None:
    """One after another and back again; what is kept from one dtype must fit the next."""
    bounds = {torch.float32: 1e-4, torch.bfloat16: 6 * torch.finfo(torch.bfloat16).eps}
    kinds = [torch.float32, torch.bfloat16, torch.float64, torch.float32]

    def on_rank(collectives: VirtualCollectives) -> tuple[Plan, list[list[Tensor]]]:
        plan = make_plan(EVEN, collectives, GDN, strategy=strategy)
        return plan, [result(plan, GDN, plainly, dtype)[0] for dtype in kinds]

    found = run_virtual(on_rank, SIZE)
    for n, dtype in enumerate(kinds):
        expected, _ = result(make_plan(EVEN, (0, 1), GDN), GDN, plainly, dtype)
        plans = [plan for plan, _ in found]
        actual = [in_pack_order(plans[0].tokens, [r[n][i] for _, r in found]) for i in range(2)]
        assert {x.dtype for x in actual} == {dtype}
        assert relative_error(actual, expected) < bounds.get(dtype, BOUND)


@pytest.mark.parametrize("spec", [GDN, ATTENTION], ids=["gdn", "attention"])
@pytest.mark.parametrize("strategy", ["heads", "docs", "gather", "state"])
def test_second_derivatives_pass_through_what_moves(spec: Spec, strategy: Any) -> None:
    """Of the movement alone: the convolution and the recurrences say that they have one only."""
    if strategy == "state" and not spec.state:
        strategy = "heads"

    def derivatives(plan: Plan) -> list[Tensor]:
        x = plan.shard(tensor_of(1)).clone().requires_grad_()
        entered = plan.enter(spec, x)
        sections = [
            entered.repeat(1, section.width)[:, : section.width] ** 2 for section in spec.sections
        ]
        # Head by head, of the section that has the heads of the output, each as wide.
        output = plan.to_heads(spec, sections)[2 if spec is GDN else 0] ** 3
        y = plan.leave(spec, plan.from_heads(spec, output))
        # Another way from the input to the loss: a movement that is left out would raise nothing.
        loss = (y.sum(1) * plan.shard(tensor_of(2))[:, 0]).sum() + (x**3).sum()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        (second,) = torch.autograd.grad((grad**2).sum(), x)
        return [grad.detach(), second]

    def on_rank(collectives: VirtualCollectives) -> tuple[Plan, list[Tensor]]:
        plan = make_plan(EVEN, collectives, spec, strategy=strategy)
        return plan, derivatives(plan)

    found = run_virtual(on_rank, SIZE)
    actual = [in_pack_order(found[0][0].tokens, [d[i] for _, d in found]) for i in range(2)]
    expected = derivatives(make_plan(EVEN, (0, 1), spec))
    assert relative_error(actual, expected) < BOUND
