"""A mixture of experts against the plainest one: every expert on every token, weighted.

The reference is written here from the formulas, in fp64, and autograd differentiates it; the
block runs on threads that form the expert- and the tensor-parallel groups.
"""

# Shape suffixes: T tokens, D width, E experts, K experts per token, R rows.

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pcomm.core import Collectives, IdentityCollectives, Layout
from pcomm.core.collectives import SpyCollectives
from pcomm.core.errors import LayoutError
from pcomm.core.tensor_parallel import join_shards, param_layouts_of, take_shard
from pcomm.core.testing import run_virtual
from pcomm.core.testing.virtual import VirtualCollectives
from pcomm.integration.config.rules import validate
from pcomm.integration.config.sections import Config, ModelConfig
from pcomm.integration.models import experts as experts_module
from pcomm.integration.models import moe as moe_module
from pcomm.integration.models.experts import kernel_linear, loop_linear
from pcomm.integration.models.layers import LayerBuilder
from pcomm.integration.models.moe import Balance, Dispatch, MixtureOfExperts, count, token_layout

WIDTH, EXPERTS, ROW = 6, 4, 4
COEFFICIENT, ROWS_IN_BATCH = 0.3, 5
Weights = dict[str, Tensor]


def model(**changes: object) -> ModelConfig:
    base = ModelConfig(
        layers=1, width=WIDTH, heads=1, mlp_width=8, experts=EXPERTS, shared_expert_width=4
    )
    return validate(Config(model=dataclasses.replace(base, **changes)), 1).model


def weights(config: ModelConfig, *, shunned: int | None = None) -> Weights:
    """Large enough that no part of the block is lost in rounding."""
    generator = torch.Generator().manual_seed(5)
    block = MixtureOfExperts(LayerBuilder(config, IdentityCollectives(), dtype=torch.float64))
    found = {
        name: torch.randn(p.shape, generator=generator, dtype=torch.float64) / p.shape[-1] ** 0.5
        for name, p in block.named_parameters()
    }
    if shunned is not None:
        # Inputs have a first column of ones, so this expert's logit is far below the others.
        found["router.weight"][shunned, 0] = -50.0
    return found


def inputs(num_tokens: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x_TD = torch.randn(num_tokens, WIDTH, generator=generator, dtype=torch.float64)
    x_TD[:, 0] = 1.0
    return x_TD


def dense(config: ModelConfig, w: Weights, x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Output, and the balance loss with its coefficient."""
    probabilities_TE = (x_TD @ w["router.weight"].T).softmax(-1)
    chosen = (
        probabilities_TE >= probabilities_TE.sort(-1).values[:, -config.experts_per_token, None]
    )
    weights_TE = torch.where(chosen, probabilities_TE, 0.0)
    if config.experts_per_token > 1:
        weights_TE = weights_TE / weights_TE.sum(-1, keepdim=True)
    y_TD = torch.zeros_like(x_TD)
    for e in range(config.experts):
        gate, up = (x_TD @ w["experts.gate_up"][e].T).chunk(2, -1)
        y_TD = y_TD + weights_TE[:, e, None] * ((F.silu(gate) * up) @ w["experts.down"][e].T)
    if config.shared_expert_width:
        gate, up = (x_TD @ w["shared.gate_up.weight"].T).chunk(2, -1)
        y_TD = y_TD + (F.silu(gate) * up) @ w["shared.down.weight"].T
    loss = x_TD.new_zeros(())
    for row in range(len(x_TD) // ROW):
        part = slice(row * ROW, (row + 1) * ROW)
        share_E = chosen[part].double().mean(0) / config.experts_per_token
        loss = loss + config.experts * (share_E * probabilities_TE[part].mean(0)).sum()
    return y_TD, COEFFICIENT * loss / ROWS_IN_BATCH


def dense_results(
    config: ModelConfig, w: Weights, x_TD: Tensor, upstream_TD: Tensor, *, has_balance: bool = True
) -> Weights:
    """Output, loss and all gradients of `sum(upstream * output) + balance loss`."""
    leaves = {name: value.clone().requires_grad_() for name, value in w.items()}
    x_TD = x_TD.clone().requires_grad_()
    y_TD, loss = dense(config, leaves, x_TD)
    loss = loss * has_balance
    ((upstream_TD * y_TD).sum() + loss).backward()
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return {"x": x_TD.grad, "y": y_TD.detach(), "loss": loss.detach(), **gradients}


def on_this_rank(
    config: ModelConfig,
    w: Weights,
    x_TD: Tensor,
    upstream_TD: Tensor,
    *,
    tensor_parallel: Collectives,
    expert_parallel: Collectives,
    sequence_parallel: bool = False,
    rows_T: Tensor | None = None,
    same_rows: Collectives | None = None,
    num_rows: int = 0,
) -> Weights:
    """The same from the block, with this rank's shards of the weights."""
    block = MixtureOfExperts(
        LayerBuilder(
            config, tensor_parallel, sequence_parallel, dtype=torch.float64, experts=expert_parallel
        )
    )
    ranks = {"dense": tensor_parallel.rank, "expert": expert_parallel.rank}
    for (name, parameter), param_layout in zip(
        block.named_parameters(), param_layouts_of(block).values(), strict=True
    ):
        shard = w[name]
        if param_layout.layout is not None:
            shard = take_shard(
                shard, param_layout.layout, ranks[param_layout.scope], dim=param_layout.dim
            )
        parameter.data = shard.clone()
    balance = None
    if rows_T is not None:
        balance = Balance(
            rows_T, num_rows, ROW, ROWS_IN_BATCH, COEFFICIENT, same_rows or IdentityCollectives()
        )
    x_TD = x_TD.clone().requires_grad_()
    y_TD = block(x_TD, balance)
    (upstream_TD * y_TD).sum().backward()
    gradients = {name: p.grad for name, p in block.named_parameters()}
    loss = y_TD.new_zeros(()) if balance is None else COEFFICIENT * balance.total()
    return {"x": x_TD.grad, "y": y_TD.detach(), "loss": loss, **gradients}


def assert_same(mine: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert set(mine) == set(expected)
    for name, value in expected.items():
        worst = float((mine[name] - value).abs().max()) if value.numel() else 0.0
        assert worst <= 1e-12 * max(1.0, float(value.abs().max())), f"{name}: off by {worst:.1e}"


def compare_alone(**changes: object) -> None:
    config = model(**changes)
    w, x_TD, upstream_TD = weights(config), inputs(3 * ROW), inputs(3 * ROW, seed=2)
    mine = on_this_rank(
        config,
        w,
        x_TD,
        upstream_TD,
        tensor_parallel=IdentityCollectives(),
        expert_parallel=IdentityCollectives(),
        rows_T=torch.arange(3 * ROW) // ROW,
        num_rows=3,
    )
    assert_same(mine, dense_results(config, w, x_TD, upstream_TD))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"experts_per_token": 1},
        {"experts_per_token": 4},
        {"shared_expert_width": 0},
        {"experts": 7, "experts_per_token": 3, "expert_width": 5},
    ],
    ids=str,
)
def test_one_rank_equals_the_dense_computation(changes):
    compare_alone(**changes)


def compare_expert_parallel(sizes: list[int], shunned: int | None = None) -> None:
    """Rank r has `sizes[r]` of the tokens, and the r-th of equal stretches of the experts."""
    config, size = model(shared_expert_width=0), len(sizes)
    w = weights(config, shunned=shunned)
    x_TD, upstream_TD = inputs(sum(sizes)), inputs(sum(sizes), seed=2)
    row_T = torch.arange(sum(sizes)) // ROW
    parts = [part.split(sizes) for part in (x_TD, upstream_TD, row_T)]

    def run(group: VirtualCollectives) -> Weights:
        x, upstream, rows = (part[group.rank] for part in parts)
        return on_this_rank(
            config,
            w,
            x,
            upstream,
            tensor_parallel=IdentityCollectives(),
            expert_parallel=group,
            rows_T=rows,
            same_rows=group,
            num_rows=-(-sum(sizes) // ROW),
        )

    found = run_virtual(run, size)
    joined = {name: torch.cat([one[name] for one in found]) for name in ("x", "y")}
    for name in ("router.weight", "loss"):
        joined[name] = torch.stack([one[name] for one in found]).sum(0)
    spread = Layout.even(EXPERTS, size)
    for name in ("experts.gate_up", "experts.down"):
        joined[name] = join_shards([one[name] for one in found], spread)
    assert_same(joined, dense_results(config, w, x_TD, upstream_TD))
    if shunned is not None:
        assert not joined["experts.down"][shunned].any()
        assert joined["experts.down"].any()


UNEVEN = {
    "even": [8, 8],
    "uneven": [11, 5],
    "a rank without tokens": [0, 12],
    "one expert a rank": [4, 3, 0, 5],
}


@pytest.mark.parametrize("shunned", [None, 0, 3], ids=["", "no rows for 0", "no rows for 3"])
@pytest.mark.parametrize("sizes", UNEVEN.values(), ids=UNEVEN)
def test_expert_parallel_ranks_equal_the_dense_computation(sizes, shunned):
    compare_expert_parallel(sizes, shunned)


@pytest.mark.parametrize("has_expert_parallel", [False, True], ids=["ep1", "ep2"])
@pytest.mark.parametrize(
    ("num_tokens", "sequence_parallel"),
    [(8, True), (8, False), (5, False), (1, False)],
    ids=["sequence", "replicated", "uneven", "one token"],
)
def test_tensor_parallel_ranks_equal_the_dense_computation(
    num_tokens, sequence_parallel, has_expert_parallel
):
    """Every token is routed once, also where each rank has all of them, and one has none to do."""
    config = model()
    w, x_TD, upstream_TD = weights(config), inputs(num_tokens), inputs(num_tokens, seed=2)
    # A balance loss wants whole rows.
    num_rows = 0 if num_tokens % ROW else num_tokens // ROW
    tokens, hidden = token_layout(num_tokens, 2), Layout.even(4, 2)

    def run(group: VirtualCollectives) -> Weights:
        def own(x: Tensor) -> Tensor:
            return take_shard(x, tokens, group.rank)

        x, upstream = (own(t) if sequence_parallel else t for t in (x_TD, upstream_TD))
        return on_this_rank(
            config,
            w,
            x,
            upstream,
            tensor_parallel=group,
            expert_parallel=group if has_expert_parallel else IdentityCollectives(),
            sequence_parallel=sequence_parallel,
            rows_T=own(torch.arange(num_tokens) // ROW) if num_rows else None,
            same_rows=group,
            num_rows=num_rows,
        )

    found = run_virtual(run, 2)
    joined = {name: sum(one[name] for one in found) for name in ("router.weight", "loss")}
    for name in ("experts.gate_up", "experts.down"):
        shards = [one[name] for one in found]
        joined[name] = (
            join_shards(shards, Layout.even(EXPERTS, 2))
            if has_expert_parallel
            else (shards[0] + shards[1])
        )
    for name, layout, dim in (
        ("shared.gate_up.weight", Layout.sections([hidden, hidden]), 0),
        ("shared.down.weight", hidden, 1),
    ):
        joined[name] = join_shards([one[name] for one in found], layout, dim=dim)
    for name in ("x", "y"):
        first, second = (one[name] for one in found)
        if sequence_parallel:
            joined[name] = torch.cat([first, second])
        else:
            assert torch.equal(first, second)
            joined[name] = first
    assert_same(joined, dense_results(config, w, x_TD, upstream_TD, has_balance=num_rows > 0))


BREAKS: dict[str, tuple[object, str, object]] = {
    "weights not renormalised": (moe_module.Router, "forward", lambda self, x: _unscaled(self, x)),
    "a rank's last token dropped": (
        moe_module.Dispatch,
        "bring_back",
        lambda self, y: _zero_last(_BRING_BACK(self, y)),
    ),
    "balance loss ignored": (moe_module, "with_side_loss", lambda x, loss: x),
    "experts mixed up": (moe_module.Dispatch, "send", lambda self, x: _SEND(self, x).flip(0)),
}
_BRING_BACK: Callable[..., Tensor] = Dispatch.bring_back
_SEND: Callable[..., Tensor] = Dispatch.send
_ROUTE = moe_module.Router.forward


def _zero_last(y_TKD: Tensor) -> Tensor:
    return torch.cat([y_TKD[:-1], torch.zeros_like(y_TKD[-1:])])


def _unscaled(router: moe_module.Router, x_TD: Tensor) -> object:
    routing = _ROUTE(router, x_TD)
    return routing._replace(weights_TK=routing.probabilities_TE.gather(1, routing.experts_TK))


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_piece_is_noticed(name, monkeypatch):
    monkeypatch.setattr(*BREAKS[name])
    with pytest.raises(AssertionError, match="off by"):
        compare_expert_parallel([8, 8])


def test_tokens_travel_once_each_way():
    """Forward: counts, rows there, rows back. Backward: rows there and back, no counts."""
    config = model(shared_expert_width=0)
    w, x_TD = weights(config), inputs(8)

    def run(group: VirtualCollectives) -> tuple[list[object], list[object], list[int]]:
        spy = SpyCollectives(group)
        block = MixtureOfExperts(
            LayerBuilder(config, IdentityCollectives(), dtype=torch.float64, experts=spy)
        )
        mine = x_TD.split([5, 3])[group.rank].clone().requires_grad_()
        block.router.weight.data = w["router.weight"].clone()
        experts_TK = block.router(mine).experts_TK
        others = int((experts_TK // 2 != group.rank).sum())
        y = block(mine)
        forward = list(spy.calls)
        spy.clear()
        y.sum().backward()
        return forward, list(spy.calls), [experts_TK.numel(), others]

    for forward, backward, (rows, others) in run_virtual(run, 2):
        assert [call.operation for call in forward + backward] == ["all_to_all"] * 5
        counts, there, back = forward
        assert counts.input_shape == (EXPERTS,)
        assert there.input_shape == (rows, WIDTH)
        assert there.sent_bytes == others * WIDTH * 8
        # Backward takes the same ways, the other way round.
        assert [call.input_shape for call in backward] == [there.input_shape, back.input_shape]
        assert [call.sent_bytes for call in backward] == [there.sent_bytes, back.sent_bytes]


def test_alone_nothing_is_sent_and_nothing_is_waited_for():
    spy = SpyCollectives(IdentityCollectives())
    config = model()
    block = MixtureOfExperts(LayerBuilder(config, IdentityCollectives(), experts=spy))
    block(inputs(3).float()).sum().backward()
    assert spy.calls == []


def test_balance_adds_up_integers_once():
    """One all-reduce of as many counts as rows have experts, none in backward."""
    config = model(shared_expert_width=0)

    def run(group: VirtualCollectives) -> tuple[list[object], list[object]]:
        spy = SpyCollectives(group)
        block = MixtureOfExperts(
            LayerBuilder(config, IdentityCollectives(), dtype=torch.float64, experts=group)
        )
        balance = Balance(torch.arange(6) // ROW, 3, ROW, ROWS_IN_BATCH, COEFFICIENT, spy)
        y_TD = block(inputs(6), balance)
        forward = list(spy.calls)
        y_TD.sum().backward()
        return forward, spy.calls[len(forward) :]

    for forward, backward in run_virtual(run, 2):
        assert [(c.operation, c.input_shape) for c in forward] == [("all_reduce", (3 * EXPERTS,))]
        assert backward == []


def test_a_block_that_is_computed_again_in_backward_has_the_same_gradients():
    config = model()
    block = MixtureOfExperts(LayerBuilder(config, IdentityCollectives(), dtype=torch.float64))
    found = []
    for again in (False, True):
        block.zero_grad()
        rows_T = torch.arange(8) // ROW
        balance = Balance(rows_T, 2, ROW, ROWS_IN_BATCH, COEFFICIENT, IdentityCollectives())
        x_TD = inputs(8).requires_grad_()
        y_TD = (
            checkpoint(block, x_TD, balance, use_reentrant=False) if again else block(x_TD, balance)
        )
        total = balance.total()
        y_TD.square().sum().backward()
        found.append([y_TD.detach(), total, x_TD.grad, *(p.grad for p in block.parameters())])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@given(
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    experts_per_rank=st.integers(1, 3),
    top_k=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_every_row_reaches_its_expert_and_comes_back(sizes, experts_per_rank, top_k, seed):
    """Rows carry their own number, and what comes back is that number and the expert met."""
    num_experts = experts_per_rank * len(sizes)
    top_k = min(top_k, num_experts)
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(sum(sizes), num_experts, generator=generator)
    chosen = scores.argsort(-1)[:, :top_k]
    tokens = torch.arange(sum(sizes), dtype=torch.float64).unsqueeze(1)
    parts = list(zip(tokens.split(sizes), chosen.split(sizes), strict=True))

    def run(group: VirtualCollectives) -> Tensor:
        mine, experts_TK = parts[group.rank]
        dispatch = Dispatch.plan(experts_TK, num_experts, group)
        rows = dispatch.send(mine)
        first = group.rank * experts_per_rank
        ids = torch.arange(first, first + experts_per_rank)
        met = ids.repeat_interleave(dispatch.row_counts_e).double().unsqueeze(1)
        return dispatch.bring_back(torch.cat([rows, met], 1))

    back = torch.cat(run_virtual(run, len(sizes)))
    assert torch.equal(back[..., 0], tokens.expand(-1, top_k))
    assert torch.equal(back[..., 1], chosen.double())


def test_counts_are_those_of_bincount():
    values = torch.tensor([3, 1, 3, 0, 3])
    assert torch.equal(count(values, 6), torch.bincount(values, minlength=6))


@pytest.mark.parametrize("counts", [[3, 0, 5], [0, 0, 8], [8, 0, 0]], ids=str)
def test_the_kernel_and_the_loop_agree(counts):
    """torch runs the kernel's operation on the CPU as well, in fp32."""
    generator = torch.Generator().manual_seed(3)
    results = []
    for function in (loop_linear, kernel_linear):
        generator.manual_seed(3)
        x_NI = torch.randn(8, 16, generator=generator, requires_grad=True)
        weight_EOI = torch.randn(3, 8, 16, generator=generator, requires_grad=True)
        y_NO = function(x_NI, weight_EOI, torch.tensor(counts))
        y_NO.backward(torch.randn(8, 8, generator=generator))
        results.append((y_NO.detach(), x_NI.grad, weight_EOI.grad))
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-5)


def test_a_block_runs_on_the_kernel(monkeypatch):
    """Gradients reach the kernel in a form that it takes, and leave the same numbers."""
    block = MixtureOfExperts(LayerBuilder(model(width=16), IdentityCollectives()))
    generator = torch.Generator().manual_seed(1)
    x_TD = torch.randn(9, 16, generator=generator)
    found = []
    for has_kernel in (False, True):
        monkeypatch.setattr(experts_module, "has_grouped_kernel", lambda *_, has=has_kernel: has)
        block.zero_grad()
        y_TD = block(x_TD)
        y_TD.sum().backward()
        found.append([y_TD.detach(), *(p.grad for p in block.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_experts_that_do_not_divide_are_refused():
    group = VirtualCollectives(0, 3, [], None)  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="4 positions over 3 ranks"):
        MixtureOfExperts(LayerBuilder(model(), IdentityCollectives(), experts=group))


def test_autocast_computes_experts_in_bf16_and_routes_in_fp32():
    config = model(experts_per_token=2)
    block = MixtureOfExperts(LayerBuilder(config, IdentityCollectives()))
    for name, value in weights(config).items():
        block.get_parameter(name).data = value.float()
    x_TD = inputs(12).float().requires_grad_()
    exact = block(x_TD)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = block(x_TD)
        assert torch.equal(block.router(x_TD).experts_TK, block.router(x_TD.detach()).experts_TK)
        assert block.router(x_TD).weights_TK.dtype == torch.float32
    assert rounded.dtype == torch.bfloat16
    # A chain of two products and a weighted sum, each rounded to 8 bits.
    assert (rounded - exact).abs().max() < 2**-5 * exact.abs().max()
    rounded.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in block.parameters())
