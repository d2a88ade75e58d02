"""Layers split over ranks against the plain layers, and breaks that must be noticed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from core_support.split_layers import LayerCase, compare_layer
from pcomm.core.collectives.autograd import differentiable, with_adjoint
from pcomm.core.collectives.protocol import Collectives
from pcomm.core.groups.communicators import communicator_of
from pcomm.core.layout import Layout, Run
from pcomm.core.tensor_parallel import linear
from pcomm.core.tensor_parallel import split as regions
from pcomm.core.tensor_parallel import vocabulary as embedding
from pcomm.core.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from pcomm.core.tensor_parallel.split import ParamLayout, join_shards
from pcomm.core.tensor_parallel.vocabulary import VocabularyParallelEmbedding
from pcomm.core.testing.assertions import assert_as_accurate, assert_close, assert_equal
from pcomm.core.testing.on_ranks import default_collectives, ranks
from pcomm.core.testing.virtual import run_virtual

UNEVEN = {2: (4, 3), 3: (5, 0, 2), 4: (1, 3, 0, 2)}


def cases(size: int) -> dict[str, LayerCase]:
    """Every layer in every mode, over uneven shares, one of them empty from three ranks on."""
    layout = Layout.uneven(UNEVEN[size])
    fused = Layout.sections([layout, Layout.balanced(6, size)])
    column, row = LayerCase("column", fused, bias=True), LayerCase("row", layout, bias=True)
    table = LayerCase("embedding", layout)
    return {
        "column": column,
        "column, no bias": replace(column, bias=False),
        "column, gathered": replace(column, layout=layout, gather_output=True),
        "column, sequence": replace(column, sequence_parallel=True),
        "column, sequence, gathered": replace(
            column, layout=layout, sequence_parallel=True, gather_output=True
        ),
        "row": row,
        "row, sections": replace(row, layout=fused, bias=False),
        "row, sequence": replace(row, sequence_parallel=True),
        "embedding": table,
        "embedding, sequence": replace(table, sequence_parallel=True),
    }


def check(case: LayerCase, collectives: Collectives, *, seed: int = 0) -> list[str]:
    """The layer does what the plain one does, up to the rounding of the sums, in every dtype.

    Returns:
        Names of the results that were compared, each dtype's after the other's.
    """
    names = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for found in compare_layer(case, collectives, dtype, seed=seed):
            # The longest sum is over inputs, outputs or tokens, then over ranks, then a bias.
            # A part of it may be rounded to the dtype once more, when a matrix product ends.
            terms = max(case.layout.length, case.width, case.tokens) + 2 * collectives.size + 1
            assert_close(found.actual, found.exact, num_terms=terms, magnitude=found.magnitude)
            names.append(found.name)
    return names


def check_accuracy(case: LayerCase, collectives: Collectives) -> None:
    """In single and half precision the layer is about as accurate as the plain one."""
    for dtype in (torch.float32, torch.bfloat16):
        for found in compare_layer(case, collectives, dtype):
            if dtype == torch.float32 or found.name == "output":
                # A sum over ranks is rounded once for each part, and once for each addition.
                terms = 2 * collectives.size
                assert_as_accurate(found.actual, found.plain, found.exact, num_terms=terms)


@pytest.mark.parametrize("name", cases(2))
@ranks(2)
def test_layers_equal_plain_layers_on_two_ranks(rank: int, name: str) -> None:
    check(cases(2)[name], default_collectives())
    check_accuracy(cases(2)[name], default_collectives())


@pytest.mark.parametrize("name", cases(4))
@ranks(4)
def test_layers_equal_plain_layers_on_four_ranks(rank: int, name: str) -> None:
    check(cases(4)[name], default_collectives())
    check_accuracy(cases(4)[name], default_collectives())


@st.composite
def layer_cases(draw: st.DrawFn) -> LayerCase:
    """Any layer over 2 to 4 ranks, its dimension cut anywhere and dealt out in any order."""
    size = draw(st.integers(2, 4))
    kind = draw(st.sampled_from(["column", "row", "embedding"]))
    gathered = kind == "column" and draw(st.booleans())
    if kind == "embedding" or gathered:
        sizes = draw(st.lists(st.integers(0, 4), min_size=size, max_size=size).filter(any))
        layout = Layout.uneven(sizes)
    else:
        own: list[list[Run]] = [[] for _ in range(size)]
        starts = range(0, draw(st.integers(1, 5)) * 2, 2)
        for start in draw(st.permutations(starts)):
            own[draw(st.integers(0, size - 1))].append(Run(start, start + 2))
        layout = Layout(len(starts) * 2, tuple(map(tuple, own)))
    return LayerCase(
        kind,
        layout,
        bias=kind != "embedding" and draw(st.booleans()),
        sequence_parallel=draw(st.booleans()),
        gather_output=gathered,
        tokens=size * draw(st.integers(0, 3)),
        width=draw(st.integers(1, 4)),
    )


@given(layer_cases(), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_layers_equal_plain_layers_however_they_are_cut(case: LayerCase, seed: int) -> None:
    size = case.layout.size
    compared = run_virtual(lambda collectives: check(case, collectives, seed=seed), size)
    gradients = ["input gradient"] * (case.kind != "embedding") + ["weight gradient"]
    gradients += ["bias gradient"] * case.bias
    assert compared == [3 * ["output", *gradients]] * size


@ranks(3)
def test_first_weights_are_parts_of_the_plain_layers(rank: int) -> None:
    layout = Layout.sections([Layout.uneven([2, 0, 3]), Layout.even(6, 3)])
    for build, plain, dim in (
        (lambda: ColumnParallelLinear(4, layout, default_collectives(), bias=True), (4, 11), 0),
        (lambda: RowParallelLinear(layout, 4, default_collectives(), bias=True), (11, 4), 1),
    ):
        torch.manual_seed(7)
        layer = build()
        torch.manual_seed(7)
        whole = nn.Linear(*plain)
        shares = default_collectives().all_gather(layer.weight, dim=dim, sizes=layout.sizes)
        assert_equal(
            join_shards(shares.split(layout.sizes, dim), layout, dim=dim), whole.weight.data
        )
        if dim == 1:
            assert_equal(layer.bias.data, whole.bias.data)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_replicated_tensors_are_split_and_gathered_along_any_dimension(dim: int) -> None:
    """Against autograd of the whole tensor: each gradient is counted once, on every rank."""
    layout = Layout.uneven(UNEVEN[3])
    shape = [2, 2, 2]
    shape[dim] = layout.length
    generator = torch.Generator().manual_seed(0)
    # Small integers, whose products and sums are exact.
    whole, factors, weights = torch.randint(-9, 10, (3, *shape), generator=generator).double()
    plain = whole.clone().requires_grad_()
    (plain * factors * weights).sum().backward()

    def check(collectives: Collectives) -> None:
        def own(tensor: Tensor) -> Tensor:
            return tensor.split(UNEVEN[3], dim)[collectives.rank]

        x = whole.clone().requires_grad_()
        shard = regions.split_replicated(x, layout, collectives, dim=dim)
        assert_equal(shard, own(whole))
        y = regions.gather_replicated(shard * own(factors), layout, collectives, dim=dim)
        assert_equal(y, whole * factors)
        (y * weights).sum().backward()
        assert x.grad is not None
        assert_equal(x.grad, plain.grad)

    run_virtual(check, 3)


def wrong_tokens(x: Tensor, collectives: Collectives) -> Tensor:
    share = x.shape[0] // collectives.size
    return regions.scatter_tokens(x.roll(share, 0), collectives)


def own_slice(gradient: Tensor, collectives: Collectives) -> Tensor:
    return gradient.chunk(collectives.size)[collectives.rank]


MUTANTS: dict[str, tuple[str, object, str, object]] = {
    "backward not reduced": ("column", linear, "enter", lambda x, c: x),
    "backward reduced twice": (
        "column",
        linear,
        "enter",
        lambda x, c: with_adjoint(x, lambda x: x, lambda g: c.all_reduce(c.all_reduce(g))),
    ),
    "forward not reduced": ("row", linear, "leave", lambda x, c: x),
    "backward of a sum reduced too": (
        "row",
        linear,
        "leave",
        lambda x, c: differentiable(c).all_reduce(x),
    ),
    "bias added on every rank": (
        "row",
        RowParallelLinear,
        "_split",
        lambda self, x: linear.leave(linear._linear(self, x), self.collectives),
    ),
    "gathered tokens: backward not reduced": (
        "column, sequence",
        linear,
        "gather_tokens",
        lambda x, c: with_adjoint(x, c.all_gather, lambda g: own_slice(g, c)),
    ),
    "another rank's tokens": ("row, sequence", linear, "scatter_tokens", wrong_tokens),
    "another rank's rows": ("embedding, sequence", embedding, "scatter_tokens", wrong_tokens),
    "bias gradient not called partial": (
        "row, sequence",
        linear,
        "ParamLayout",
        lambda layout=None, dim=0, has_partial_gradient=False: ParamLayout(layout, dim),
    ),
    "gathered columns: backward reduced": (
        "column, gathered",
        linear,
        "gather_replicated",
        lambda x, layout, c: differentiable(c).all_gather(x, dim=-1, sizes=layout.sizes),
    ),
    "rows looked up one too far": (
        "embedding",
        embedding,
        "first_position",
        lambda layout, rank: sum(layout.sizes[:rank]) + 1,
    ),
    "rows of others not masked": (
        "embedding",
        VocabularyParallelEmbedding,
        "_own_rows",
        lambda self, ids: nn.functional.embedding(
            (ids - self._first).clamp(0, max(0, self.weight.shape[0] - 1)), self.weight
        ),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_broken_layers_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, owner, attribute, broken = MUTANTS[name]
    monkeypatch.setattr(owner, attribute, broken)
    with pytest.raises(AssertionError, match="worst element"):
        run_virtual(lambda collectives: check(cases(2)[case], collectives), 2)


@ranks(3)
def test_without_gradients_a_token_has_the_same_bits_whatever_others_there_are(
    rank: int,
) -> None:
    collectives = default_collectives()
    torch.manual_seed(rank)
    for dtype in (torch.bfloat16, torch.float32):
        parts = torch.randn(5, 576).to(dtype)
        together = regions.add_up(parts.clone(), collectives, scatters_tokens=False)
        for place in range(5):
            own = parts[place : place + 1].clone()
            assert_equal(
                regions.add_up(own, collectives, scatters_tokens=False),
                together[place : place + 1],
            )


@ranks(2)
def test_a_block_is_two_all_reduces_of_torch_and_an_embedding_one(rank: int) -> None:
    assert dist.group.WORLD is not None
    collectives = communicator_of(dist.group.WORLD).collectives
    words, hidden = Layout.balanced(11, 2), Layout.even(8, 2)
    embedding = VocabularyParallelEmbedding(words, 4, collectives, check_ids=False)
    blocks = [
        layer
        for _ in range(2)
        for layer in (
            ColumnParallelLinear(4, hidden, collectives),
            RowParallelLinear(hidden, 4, collectives),
        )
    ]
    head = ColumnParallelLinear(4, words, collectives, gather_output=True)

    def logits(ids: Tensor) -> Tensor:
        x = embedding(ids)
        for layer in blocks:
            x = layer(x)
        out: Tensor = head(x)
        return out

    ids = torch.tensor([10, 3, 0])
    expected, calls = logits(ids).detach(), Counter[str]()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "all_gather_into_tensor", "all_gather_single"):
            run = getattr(dist, name, None)
            if run is not None:
                patch.setattr(
                    dist,
                    name,
                    lambda *a, _run=run, _name=name, **b: (calls.update([_name]), _run(*a, **b))[1],
                )
        with torch.inference_mode():
            found = logits(ids)
    assert_equal(found.clone(), expected)
    # One for the embedding, one for each row-parallel layer.
    assert calls["all_reduce"] == 3
    assert calls.total() <= 4
