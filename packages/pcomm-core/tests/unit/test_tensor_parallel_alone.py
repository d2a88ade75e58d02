"""On one rank the layers are torch's own functions, and modules like all others."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import BuiltinFunctionType, FunctionType

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from pcomm.core.collectives.identity import IdentityCollectives
from pcomm.core.collectives.protocol import Collectives
from pcomm.core.groups.communicators import communicator_of, new_collectives
from pcomm.core.layout import Layout
from pcomm.core.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from pcomm.core.tensor_parallel.vocabulary import (
    VocabularyParallelEmbedding,
    vocabulary_parallel_cross_entropy,
)
from pcomm.core.testing.assertions import assert_equal
from pcomm.core.testing.virtual import run_virtual

ALONE = IdentityCollectives()


class Model(nn.Module):
    """Every layer in one mode, from token ids to a loss per token."""

    def __init__(
        self,
        collectives: Collectives = ALONE,
        *,
        bias: bool = False,
        gather_output: bool = False,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        size, self.collectives = collectives.size, collectives
        self.words, hidden = Layout.even(12, size), Layout.even(4 if gather_output else 8, size)
        split = {"bias": bias, "sequence_parallel": sequence_parallel}
        self.embedding = VocabularyParallelEmbedding(
            self.words, 4, collectives, sequence_parallel=sequence_parallel
        )
        self.column = ColumnParallelLinear(
            4, hidden, collectives, gather_output=gather_output, **split
        )
        self.row = None if gather_output else RowParallelLinear(hidden, 4, collectives, **split)
        self.head = ColumnParallelLinear(4, self.words, collectives, **split)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.column(self.embedding(ids)).tanh()
        logits = self.head(x if self.row is None else self.row(x))
        return vocabulary_parallel_cross_entropy(logits, targets, self.words, self.collectives)


def run(model: Model) -> Tensor:
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
    model = Model(**MODES[mode])
    loss = run(model)
    assert loss.shape == (4,)
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_nor_where_no_gradient_is_asked_for(
    without: Callable[[], AbstractContextManager[None]], no_communication: None
) -> None:
    model, ids = Model(bias=True), torch.tensor([3, 0, 11, 7])
    expected = run(model)
    with without():
        assert_equal(model(ids, ids.roll(-1)).clone(), expected)


@pytest.mark.parametrize("mode", MODES)
def test_on_two_ranks_the_same_model_would_be_caught(mode: str, no_communication: None) -> None:
    def on_rank(collectives: Collectives) -> None:
        with pytest.raises(AssertionError, match=r"autograd\.Function on one rank"):
            run(Model(collectives, **MODES[mode]))

    run_virtual(on_rank, 2)


@pytest.fixture
def world_of_one() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_real_collective_would_be_caught(
    world_of_one: dist.ProcessGroup, request: pytest.FixtureRequest
) -> None:
    before = communicator_of(world_of_one).collectives
    request.getfixturevalue("no_communication")
    with pytest.raises(AssertionError, match="communication"):
        before.all_reduce(torch.zeros(1))
    with pytest.raises(AssertionError, match="communication"):
        new_collectives(world_of_one)


def test_results_are_those_of_torchs_functions() -> None:
    model = Model(bias=True)
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
def test_input_may_be_named(kind: str) -> None:
    build, x = LAYERS[kind]
    layer = build()
    assert_equal(layer(x=x).detach(), layer(x).detach())


@each_layer
def test_forward_may_be_replaced(kind: str) -> None:
    build, x = LAYERS[kind]
    layer = build()

    class Doubled(type(layer)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    once = layer(x).detach()
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
def test_state_has_torchs_names(kind: str) -> None:
    names = ["weight"] if kind == "embedding" else ["weight", "bias"]
    assert list(LAYERS[kind][0]().state_dict()) == names


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

    model, ids = Model(bias=True), torch.tensor([3, 0, 11, 7])
    expected = run(model)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert_equal(compiled(ids, ids.roll(-1)).detach(), expected)
    assert len(graphs) == 1

    layer, x = model.column, torch.ones(2, 4)
    expected = layer(x).detach()
    layer.compile(backend=backend, fullgraph=True)
    assert_equal(layer(x).detach(), expected)
    assert len(graphs) == 2
