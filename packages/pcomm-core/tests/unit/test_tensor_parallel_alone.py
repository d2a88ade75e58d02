"""On one rank the layers are torch's own functions, and modules like all others."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import BuiltinFunctionType, FunctionType

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from core_support.split_model import SplitModel
from pcomm.core.collectives.identity import IdentityCollectives
from pcomm.core.collectives.protocol import Collectives
from pcomm.core.layout import Layout
from pcomm.core.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from pcomm.core.tensor_parallel.vocabulary import (
    VocabularyParallelEmbedding,
)
from pcomm.core.testing.assertions import assert_equal
from pcomm.core.testing.virtual import run_virtual

ALONE = IdentityCollectives()


def run(model: SplitModel) -> Tensor:
    ids = torch.tensor([3, 0, 11, 7])
    loss = model(ids, ids.roll(-1))
    loss.mean().backward()
    return loss.detach()


MODES = {
    "plain": {},
    "bias": {"bias": True},
    "gathered": {"gather_output": True},
    "sequence": {"sequence_parallel": True, "bias": True},
}


@pytest.fixture
def no_communication(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every function of torch.distributed raises, also where it was imported by name."""

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("communication or an autograd.Function on one rank")

    # By type(): one of the names is an object that warns when anything is asked of it.
    functions = {
        id(value): name
        for name, value in vars(dist).items()
        if not name.startswith("_") and type(value) in (FunctionType, BuiltinFunctionType)
    }
    assert {"all_reduce", "get_rank", "is_initialized"} <= set(functions.values())
    ours = [module for name, module in sys.modules.items() if name.startswith("pcomm.core")]
    for module in [dist, dist.distributed_c10d, *ours]:
        for name, value in list(vars(module).items()):
            if id(value) in functions:
                monkeypatch.setattr(module, name, refuse)
    monkeypatch.setattr(torch.autograd.Function, "apply", refuse)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_communicated_and_no_function_is_recorded(
    mode: str, no_communication: None
) -> None:
    model = SplitModel(ALONE, **MODES[mode])
    loss = run(model)
    assert loss.shape == (4,)
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_nor_where_no_gradient_is_asked_for(
    without: Callable[[], AbstractContextManager[None]], no_communication: None
) -> None:
    model, ids = SplitModel(ALONE, bias=True), torch.tensor([3, 0, 11, 7])
    expected = run(model)
    with without():
        assert_equal(model(ids, ids.roll(-1)).clone(), expected)


@pytest.mark.parametrize("mode", MODES)
def test_on_two_ranks_the_same_model_would_be_caught(mode: str, no_communication: None) -> None:
    def on_rank(collectives: Collectives) -> None:
        with pytest.raises(AssertionError, match=r"autograd\.Function on one rank"):
            run(SplitModel(collectives, **MODES[mode]))

    run_virtual(on_rank, 2)


def test_results_are_those_of_torchs_functions() -> None:
    model = SplitModel(ALONE, bias=True)
    ids = torch.tensor([3, 0, 11, 7])
    x = F.linear(F.embedding(ids, model.embedding.weight), model.column.weight, model.column.bias)
    assert model.row is not None
    x = F.linear(x.tanh(), model.row.weight, model.row.bias)
    logits = F.linear(x, model.head.weight, model.head.bias)
    expected = F.cross_entropy(logits, ids.roll(-1), reduction="none")
    assert_equal(run(model), expected.detach())


LAYERS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "column": (
        lambda: ColumnParallelLinear(4, Layout.even(6, 1), ALONE, bias=True),
        torch.ones(2, 4),
    ),
    "row": (lambda: RowParallelLinear(Layout.even(4, 1), 6, ALONE, bias=True), torch.ones(2, 4)),
    "embedding": (
        lambda: VocabularyParallelEmbedding(Layout.even(5, 1), 6, ALONE),
        torch.tensor([4, 0]),
    ),
}
each_layer = pytest.mark.parametrize("kind", LAYERS)


@each_layer
def test_hooks_of_a_layer_are_called(kind: str) -> None:
    build, x = LAYERS[kind]
    layer, seen = build(), []
    handles = [
        layer.register_forward_pre_hook(lambda module, args: seen.append("before")),
        layer.register_forward_hook(lambda module, args, output: output * 2),
    ]
    if x.is_floating_point():
        # Of an input without a gradient torch has nothing to tell, and says so.
        x = x.clone().requires_grad_()
        handles += [
            layer.register_full_backward_pre_hook(lambda module, grads: seen.append("gradient")),
            layer.register_full_backward_hook(lambda module, inner, outer: seen.append("back")),
        ]
    doubled = layer(x)
    doubled.sum().backward()
    assert seen == ["before", *(["gradient", "back"] if x.is_floating_point() else [])]
    for handle in handles:
        handle.remove()
    assert_equal(doubled.detach(), layer(x).detach() * 2)


@pytest.mark.parametrize(
    "register",
    [
        nn.modules.module.register_module_forward_pre_hook,
        nn.modules.module.register_module_forward_hook,
        nn.modules.module.register_module_full_backward_hook,
    ],
)
def test_hooks_of_all_modules_are_called(register: Callable[..., object]) -> None:
    layer, seen = LAYERS["column"][0](), []
    handle = register(lambda module, *rest: seen.append(module))
    try:
        layer(torch.ones(2, 4, requires_grad=True)).sum().backward()
    finally:
        handle.remove()  # type: ignore[attr-defined]
    assert seen == [layer]


@each_layer
def test_forward_may_be_replaced(kind: str) -> None:
    build, x = LAYERS[kind]
    layer = build()

    class Doubled(type(layer)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    assert list(layer.state_dict()) == (["weight"] if kind == "embedding" else ["weight", "bias"])
    once = layer(x=x).detach()
    layer.__class__ = Doubled
    assert_equal(layer(x).detach(), once * 2)
    layer.forward = lambda x: once * 3  # type: ignore[method-assign]
    assert_equal(layer(x), once * 3)


@each_layer
def test_copies_have_parameters_of_their_own(kind: str) -> None:
    build, x = LAYERS[kind]
    layer = build()
    expected = layer(x).detach()
    stream = io.BytesIO()
    torch.save(layer, stream)
    stream.seek(0)
    for other in (
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(stream, weights_only=False),
    ):
        assert_equal(other(x).detach(), expected)
        with torch.no_grad():
            other.weight.zero_()
            other.weight += 1
        assert not torch.equal(other(x), expected)
        assert_equal(layer(x).detach(), expected)


@each_layer
def test_a_deleted_layer_is_freed_at_once(kind: str) -> None:
    gc.disable()
    try:
        layer = LAYERS[kind][0]()
        weight = weakref.ref(layer.weight)
        del layer
        assert weight() is None
    finally:
        gc.enable()


@each_layer
def test_parametrized_and_functional_parameters_are_used(kind: str) -> None:
    build, x = LAYERS[kind]
    layer = build()
    ones = {name: torch.ones_like(value) for name, value in layer.state_dict().items()}
    expected = torch.func.functional_call(layer, ones, (x,))
    assert not torch.equal(layer(x), expected)
    layer.load_state_dict(ones)
    assert_equal(layer(x).detach(), expected)
    parametrizations.weight_norm(layer)
    torch.testing.assert_close(layer(x).detach(), expected)
    layer(x).sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


def test_model_and_layer_compile_without_a_break() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    model, ids = SplitModel(ALONE, bias=True), torch.tensor([3, 0, 11, 7])
    expected = run(model)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert_equal(compiled(ids, ids.roll(-1)).detach(), expected)
    assert len(graphs) == 1

    layer, x = model.column, torch.ones(2, 4)
    expected = layer(x).detach()
    layer.compile(backend=backend, fullgraph=True)
    assert_equal(layer(x).detach(), expected)
    assert len(graphs) == 2
