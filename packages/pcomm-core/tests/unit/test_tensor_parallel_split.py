"""Split layers on virtual ranks: what they send, with gradients and without, and refuse."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode

from core_support.dispatch_modes import NestedModes
from core_support.split_layers import LayerCase
from pcomm.core.collectives.instrumented import SpyCollectives
from pcomm.core.collectives.protocol import Call, Collectives
from pcomm.core.errors import LayoutError
from pcomm.core.layout import Layout
from pcomm.core.tensor_parallel import vocabulary as embedding
from pcomm.core.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from pcomm.core.tensor_parallel.vocabulary import VocabularyParallelEmbedding
from pcomm.core.testing.assertions import assert_close, assert_equal
from pcomm.core.testing.virtual import VirtualCollectives, run_virtual

EVEN, UNEVEN = Layout.even(8, 2), Layout.uneven((5, 3))
# A case, and what it sends in the forward and in the backward.
CASES: dict[str, tuple[LayerCase, dict[str, int], dict[str, int]]] = {
    "column": (LayerCase("column", UNEVEN, bias=True), {}, {"all_reduce": 1}),
    "column, gathered": (
        LayerCase("column", UNEVEN, gather_output=True),
        {"all_gather": 1},
        {"all_reduce": 1},
    ),
    "row": (LayerCase("row", UNEVEN, bias=True), {"all_reduce": 1}, {}),
    "embedding": (LayerCase("embedding", UNEVEN), {"all_reduce": 1}, {}),
    "column, sequence": (
        LayerCase("column", UNEVEN, sequence_parallel=True),
        {"all_gather": 1},
        {"reduce_scatter": 1},
    ),
    **{
        f"{kind}, sequence": (
            LayerCase(kind, UNEVEN, bias=kind == "row", sequence_parallel=True),
            {"reduce_scatter": 1},
            {"all_gather": 1},
        )
        for kind in ("row", "embedding")
    },
}


def input_of(case: LayerCase, rank: int) -> Tensor:
    if case.kind == "embedding":
        return torch.arange(case.tokens) % case.layout.length
    wide = case.width if case.kind == "column" else case.layout.length
    x = torch.randn(case.tokens, wide, generator=torch.Generator().manual_seed(0))
    return case.own_input(x, rank).contiguous()


def refuse(*arguments: object, **options: object) -> None:
    raise AssertionError("an autograd.Function without gradients")


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", CASES)
def test_each_communicates_once_where_it_must_and_alike_without_gradients(
    name: str,
    without: Callable[[], AbstractContextManager[None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case, forward, backward = CASES[name]

    def on_rank(collectives: Collectives) -> None:
        spy = SpyCollectives(collectives)
        torch.manual_seed(collectives.rank)
        layer, x = case.build(spy, torch.float32), input_of(case, collectives.rank)
        before, leaf = x.clone(), x.clone()
        output = layer(leaf.requires_grad_() if leaf.is_floating_point() else leaf)
        expected = output.detach().clone()
        assert spy.counts == forward
        spy.clear()
        output.sum().backward()
        assert spy.counts == backward
        spy.clear()
        # The ranks are threads of one process: no one is in `layer` when a function is refused.
        collectives.all_reduce(torch.zeros(1))
        monkeypatch.setattr(torch.autograd.Function, "apply", refuse)
        collectives.all_reduce(torch.zeros(1))
        with without():
            found = layer(x)
        assert spy.counts == forward
        assert_equal(found.clone(), expected)
        assert_equal(x, before)

    run_virtual(on_rank, 2)


@pytest.mark.parametrize("kind", ["row", "embedding"])
def test_a_sum_is_added_up_in_place(kind: str) -> None:
    case = LayerCase(kind, UNEVEN)  # type: ignore[arg-type]

    def on_rank(collectives: Collectives) -> bool:
        class Seen(SpyCollectives):
            is_in_place = False

            def all_reduce(
                self, x: Tensor, *, op: Any = "sum", out: Tensor | None = None
            ) -> Tensor:
                self.is_in_place = out is x
                return super().all_reduce(x, op=op, out=out)

        spy = Seen(collectives)
        with torch.inference_mode():
            case.build(spy, torch.float32)(input_of(case, collectives.rank))
        return spy.is_in_place

    assert run_virtual(on_rank, 2) == [True] * 2


@pytest.mark.parametrize("tokens", [1, 5])
def test_any_number_of_tokens_is_decoded(tokens: int) -> None:
    """In the form without sequence parallelism, which has the same weights."""

    def on_rank(collectives: Collectives) -> None:
        for name in ("column", "row", "embedding"):
            case = replace(CASES[name][0], tokens=tokens)
            with torch.inference_mode():
                found = case.build(collectives, torch.float32)(input_of(case, collectives.rank))
            assert found.shape[0] == tokens
        if tokens == 1:
            return
        for name in ("row, sequence", "embedding, sequence"):
            case = replace(CASES[name][0], tokens=tokens)
            layer = case.build(collectives, torch.float32)
            with (
                torch.inference_mode(),
                pytest.raises(LayoutError, match="that decode"),
            ):
                layer(input_of(case, collectives.rank))

    run_virtual(on_rank, 2)


def test_ids_are_looked_at_unless_the_caller_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_rank(collectives: Collectives) -> None:
        ids = torch.tensor([7, 8])
        for checks in (True, False):
            layer = VocabularyParallelEmbedding(EVEN, 3, collectives, check_ids=checks)
            if checks:
                with pytest.raises(LayoutError, match="ids 7 to 8"):
                    layer(ids)
            else:
                with torch.inference_mode():
                    assert (layer(ids)[1] == 0).all()
                    assert (layer(ids)[0] != 0).all()

    run_virtual(on_rank, 2)
    monkeypatch.setattr(embedding, "check_ids", refuse)
    run_virtual(
        lambda c: VocabularyParallelEmbedding(EVEN, 3, c, check_ids=False)(torch.arange(8)), 2
    )


class Allocated(TorchDispatchMode):
    """The largest tensor with memory that was made."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and found.device.type != "meta":
            self.largest = max(self.largest, found.numel())
        return found


LAYERS: dict[str, Callable[..., torch.nn.Module]] = {
    "column": lambda c, **options: ColumnParallelLinear(4, EVEN, c, bias=True, **options),
    "row": lambda c, **options: RowParallelLinear(EVEN, 4, c, bias=True, **options),
    "embedding": lambda c, **options: VocabularyParallelEmbedding(EVEN, 4, c, **options),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_only_the_shard_of_a_rank_is_allocated(kind: str) -> None:
    nested = [NestedModes(2) for _ in range(2)]

    def on_rank(collectives: Collectives) -> tuple[int, int]:
        found = list[int]()
        options: dict[str, Any]
        for options, one in zip(({}, {"initialise": False}), nested, strict=True):
            allocated = Allocated()
            with one(collectives.rank, allocated):
                layer = LAYERS[kind](collectives, dtype=torch.bfloat16, **options)
            found.append(allocated.largest)
            assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
                name: tuple(p.shape) for name, p in LAYERS[kind](collectives).named_parameters()
            }
            assert all(p.dtype == torch.bfloat16 and p.is_contiguous() for p in layer.parameters())
        whole, shard = found
        return whole, shard

    assert run_virtual(on_rank, 2) == [(32, 16)] * 2
    assert not is_in_torch_dispatch_mode()


@pytest.mark.parametrize("gathered", [False, True])
def test_second_derivatives_equal_those_of_the_plain_layers(gathered: bool) -> None:
    """A gradient penalty, whose own gradient goes through each border three times."""
    generator = torch.Generator().manual_seed(0)
    layout = Layout.uneven([2, 3])
    up, down = torch.randn(2, 4, 5, generator=generator).double()
    x = torch.randn(6, 4, generator=generator).double().requires_grad_()

    def slope_of_penalty(output: Tensor, x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(output.pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(slope.pow(2).sum(), x)[0]

    hidden = (x @ up).tanh()
    expected = slope_of_penalty(hidden if gathered else hidden @ down.t(), x)

    def on_rank(collectives: VirtualCollectives) -> None:
        mine = x.detach().clone().requires_grad_()
        positions = layout.positions(collectives.rank)
        column = ColumnParallelLinear(
            4, layout, collectives, gather_output=gathered, dtype=torch.float64
        )
        column.load_state_dict({"weight": up.t()[positions]})
        own = column(mine).tanh()
        if not gathered:
            row = RowParallelLinear(layout, 4, collectives, dtype=torch.float64)
            row.load_state_dict({"weight": down[:, positions]})
            own = row(own)
        # Five chained sums of at most 6 terms, each magnified by the sums before it.
        assert_close(slope_of_penalty(own, mine), expected, num_terms=6**3)

    run_virtual(on_rank, 2)


def test_autocast_gives_the_dtype_of_the_plain_layer() -> None:
    def on_rank(collectives: VirtualCollectives) -> None:
        layer = RowParallelLinear(Layout.even(4, 2), 3, collectives, bias=True)
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(torch.ones(2, 2)).dtype == torch.bfloat16

    run_virtual(on_rank, 2)


class _WithRoom(SpyCollectives):
    """Hands out memory as collectives between which ranks read each other's do, and checks it."""

    def __init__(self, inner: Collectives) -> None:
        super().__init__(inner)
        self.asked: list[tuple[str, tuple[int, ...]]] = []
        self.room: Tensor | None = None

    def empty_input(self, operation: str, shape: Sequence[int], like: Tensor) -> Tensor:
        self.asked.append((operation, tuple(shape)))
        self.room = like.new_full(tuple(shape), math.nan)
        return self.room

    def run(self, call: Call) -> Tensor:
        if self.room is not None:
            assert call.x is self.room
            assert call.out is None
            # Other ranks, and the operations after this one, write there.
            result, self.room = super().run(call).clone(), None
            call.x.fill_(math.nan)
            return result
        return super().run(call)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_product_is_written_where_the_collectives_read_it(sequence_parallel: bool) -> None:
    name = "reduce_scatter" if sequence_parallel else "all_reduce"

    # Torch keeps for each thread whether it records gradients.
    @torch.no_grad()
    def on_rank(plain: VirtualCollectives) -> None:
        collectives = _WithRoom(plain)
        torch.manual_seed(0)
        given = {"weight": torch.randn(4, 4), "bias": torch.randn(4)}
        row, model = (
            RowParallelLinear(EVEN, 4, one, bias=True, sequence_parallel=sequence_parallel)
            for one in (collectives, plain)
        )
        for layer in (row, model):
            layer.load_state_dict(given)
        for shape in ((6, 4), (2, 3, 4)):
            x = torch.randn(*shape)
            assert_equal(row(x), model(x))
            assert collectives.asked.pop() == (name, shape)
        # What torch gives no place for: other strides, autocast, gradients, another product.
        x = torch.randn(4, 6).t()
        assert_equal(row(x), model(x))
        with torch.autocast("cpu", torch.bfloat16):
            assert_equal(row(x.contiguous()), model(x.contiguous()))
        with torch.enable_grad():
            assert row(x.contiguous()).requires_grad
        for layer in (row, model):
            layer.replace_weight(_Doubled())
        assert_equal(row(x.contiguous()), model(x.contiguous()))
        assert collectives.asked == []

    run_virtual(on_rank, 2)


class _Doubled:
    nbytes = 0

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return 2 * x


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda c: ColumnParallelLinear(4, Layout.even(6, 3), c), "a layout over 3 ranks"),
        (lambda c: RowParallelLinear(Layout.whole(4, 2), 4, c), "several ranks hold"),
        (
            lambda c: ColumnParallelLinear(
                4, Layout.sections([Layout.even(4, 2)] * 2), c, gather_output=True
            ),
            "not lie one after another",
        ),
        (
            lambda c: VocabularyParallelEmbedding(Layout.sections([Layout.even(4, 2)] * 2), 4, c),
            "not lie one after another",
        ),
        (
            lambda c: VocabularyParallelEmbedding(Layout.even(4, 2), 4, c)(torch.tensor([1, 4])),
            "ids 1 to 4",
        ),
        (
            lambda c: RowParallelLinear(Layout.even(4, 2), 4, c, sequence_parallel=True)(
                torch.zeros(3, 2)
            ),
            "3 positions over 2 ranks",
        ),
    ],
)
def test_mistakes_are_refused_on_every_rank(build: object, words: str) -> None:
    def on_rank(collectives: VirtualCollectives) -> None:
        with pytest.raises(LayoutError, match=words):
            build(collectives)  # type: ignore[operator]

    run_virtual(on_rank, 2)
