"""Layers with packed or int8 weights as modules: names, inputs, conversions, gradients, errors."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.core.layout import Layout
from pcomm.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, WeightProduct
from pcomm.core.testing import run_virtual
from pcomm.inference.layers import Int8Weight, pack_weights, quantize_int8
from pcomm.inference.layers.packed_weight import FewRowsWeight, PackedWeight

Replace = Callable[..., tuple[str, ...]]
FORMS = [pytest.param(pack_weights, id="packed"), pytest.param(quantize_int8, id="int8")]


class Model(nn.Module):
    """Something that is converted before the layers, and layers with and without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(512)
        self.first = nn.Linear(512, 512)
        self.second = nn.Linear(512, 512, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(self.norm(x)).relu())


def replaced(replace: Replace) -> Model:
    torch.manual_seed(0)
    model = Model().requires_grad_(False)
    assert replace(model) == ("first", "second")
    return model


def is_replaced(model: nn.Module) -> bool:
    return any("weight_product" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("replace", FORMS)
@pytest.mark.parametrize(
    ("only", "fix"),
    [
        ("secnd", "Did you mean 'second'"),
        (["first", "secnd"], "Did you mean 'second'"),
        # A module, but no such layer; and a part of a name.
        (["norm"], "Known here: 'first', 'second'"),
        (["sec"], "Did you mean 'second'"),
    ],
)
def test_a_name_of_no_layer_is_refused_and_nothing_is_replaced(
    replace: Replace, only: Any, fix: str
) -> None:
    model = Model()
    with pytest.raises(ConfigError, match=rf"only '(secnd|norm|sec)'(.|\n)*{fix}"):
        replace(model, only=only)
    assert not is_replaced(model)


@pytest.mark.parametrize("replace", FORMS)
def test_a_string_is_one_name(replace: Replace) -> None:
    model = Model()
    assert replace(model, only="second") == ("second",)
    # Again: it is a layer, and has its form already.
    assert replace(model, only="second") == ()
    assert quantize_int8(Model(), skip="first") == ("second",)


def products() -> list[tuple[str, WeightProduct, torch.dtype]]:
    made: list[tuple[str, WeightProduct, torch.dtype]] = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        weight = torch.randn(24, 32).to(dtype)
        made.append((f"int8 {dtype}", Int8Weight(weight), dtype))
        if dtype == torch.float32:
            made.append(("packed", PackedWeight(weight), dtype))
            made.append(("doubled", PackedWeight(weight, doubles_one_row=True), dtype))
        if dtype == torch.bfloat16:
            made.append(("few rows", FewRowsWeight(weight), dtype))
            made.append(("in blocks", FewRowsWeight(weight, batch_invariant=True), dtype))
    return made


# Multiples and parts of the width, with as many elements as rows of the width would have; rows on
# both sides of each number from which another kernel is used; and no rows at all.
SHAPES = [
    *[(), (0,), (16,), (48,), (64,), (1, 48), (1, 64), (2, 16), (17, 16), (17, 64), (33, 64)],
    *[(40, 48), (65, 16), (70, 64), (1, 1, 64), (2, 2, 16), (3, 2, 48), (0, 16), (0, 48)],
    *[(2, 0, 48), (2, 0, 64), (4, 2, 0), (2, 0)],
]


@torch.inference_mode()
@pytest.mark.parametrize("has_bias", [True, False])
def test_an_input_of_another_width_is_refused_in_every_shape(has_bias: bool) -> None:
    for name, product, dtype in products():
        bias = torch.randn(24).to(dtype) if has_bias else None
        for shape in SHAPES:
            x = torch.randn(shape).to(dtype)
            # As torch refuses it.
            with pytest.raises(RuntimeError):
                F.linear(x, torch.empty(24, 32, dtype=dtype))
            with pytest.raises(ConfigError, match=r"32 inputs(.|\n)*give inputs"):
                product(x, bias)
        for shape in ((32,), (0, 32), (2, 0, 32), (3, 1, 32)):
            assert product(torch.ones(shape, dtype=dtype), bias).shape == (*shape[:-1], 24), name


@torch.inference_mode()
def test_an_input_on_another_device_or_of_another_dtype_is_refused() -> None:
    for _, product, dtype in products():
        # Of more rows and fewer than the kernels for few of them take.
        for rows in (0, 3, 70):
            with pytest.raises(ConfigError, match=f"an input of {dtype} on meta"):
                product(torch.empty(rows, 32, dtype=dtype, device="meta"), None)
            with pytest.raises(ConfigError, match=r"an input of torch\.float16 on cpu"):
                product(torch.empty(rows, 32, dtype=torch.float16), None)


@torch.inference_mode()
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_fake_input_has_the_shape_that_torch_gives_it() -> None:
    for name, product, dtype in products():
        for rows in (1, 3, 70):
            with FakeTensorMode(allow_non_fake_inputs=True):
                found = product(torch.empty(rows, 32, dtype=dtype), None)
            assert isinstance(found, FakeTensor), name
            assert (found.shape, found.dtype) == ((rows, 24), dtype)
        # And as a linear layer of torch that is not fake refuses it, torch does.
        with FakeTensorMode(), pytest.raises(AssertionError, match="FakeTensors"):
            product(torch.empty(3, 32, dtype=dtype), None)


UNCHANGED: list[Callable[[nn.Module], object]] = [
    lambda model: model.to("cpu"),
    lambda model: model.to(torch.float32),
    lambda model: model.float(),
    lambda model: model.cpu(),
    lambda model: model.eval(),
    lambda model: model.train(),
    lambda model: model.share_memory(),
    lambda model: model.requires_grad_(True),
    lambda model: model.zero_grad(),
]
CONVERSIONS: list[Callable[[nn.Module], object]] = [
    lambda model: model.half(),
    lambda model: model.bfloat16(),
    lambda model: model.double(),
    lambda model: model.to(torch.bfloat16),
    lambda model: model.to("meta"),
    lambda model: model.to_empty(device="meta"),
]


def tensors_of(model: nn.Module) -> list[tuple[str, torch.dtype, torch.device, int]]:
    named = (*model.named_parameters(), *model.named_buffers())
    return [(name, one.dtype, one.device, one.data_ptr()) for name, one in named]


@pytest.mark.parametrize("replace", FORMS)
@pytest.mark.parametrize("call", UNCHANGED)
def test_what_changes_nothing_is_done(
    replace: Replace, call: Callable[[nn.Module], object]
) -> None:
    model, x = replaced(replace), torch.randn(3, 512)
    other = copy.deepcopy(model)
    with torch.inference_mode():
        expected = model(x)
        call(model)
        call(model.first)
        assert torch.equal(model(x), expected)
        # A copy, and what is done to it, is apart from the model.
        call(other)
        assert torch.equal(other(x), expected)
        del model
        assert torch.equal(other.to("cpu")(x), expected)


@pytest.mark.parametrize("replace", FORMS)
@pytest.mark.parametrize("call", CONVERSIONS)
def test_a_conversion_is_refused_before_a_layer_has_changed(
    replace: Replace, call: Callable[[nn.Module], object]
) -> None:
    model = replaced(replace)
    for layer in (model.first, model.second):
        before = tensors_of(layer)
        for one in (layer, copy.deepcopy(layer), model, nn.Sequential(model)):
            with pytest.raises(UnsupportedError, match="a conversion to"):
                call(one)
        assert tensors_of(layer) == before


def test_layers_over_ranks_refuse_conversions_too() -> None:
    def on_rank(collectives: Any) -> None:
        hidden = Layout.even(64, collectives.size)
        layers = nn.ModuleList(
            [
                ColumnParallelLinear(32, hidden, collectives, bias=True),
                RowParallelLinear(hidden, 32, collectives, bias=True),
            ]
        )
        layers.to(torch.float32).requires_grad_(False)
        quantize_int8(layers)
        before = tensors_of(layers)
        for one in (layers, *layers):
            one.to("cpu")
            with pytest.raises(UnsupportedError, match=r"a conversion to torch\.float16"):
                one.half()
        assert tensors_of(layers) == before

    for size in (1, 2):
        run_virtual(on_rank, size)


def test_torch_save_keeps_int8_and_refuses_packed_weights() -> None:
    model, x = replaced(quantize_int8), torch.randn(3, 512)
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    with torch.inference_mode():
        assert torch.equal(loaded(x), model(x))
    with pytest.raises(UnsupportedError, match="a conversion to"):
        loaded.half()
    with pytest.raises(UnsupportedError, match="made for one processor"):
        torch.save(replaced(pack_weights), io.BytesIO())


@pytest.mark.parametrize("replace", FORMS)
def test_another_parameter_in_the_place_of_a_replaced_weight_is_refused(replace: Replace) -> None:
    model = replaced(replace)
    model.first.weight = model.first.weight
    held = model.first.weight
    with pytest.raises(UnsupportedError, match="another parameter `weight`"):
        model.first.weight = nn.Parameter(torch.ones(512, 512))
    assert model.first.weight is held


def twice(layer: nn.Module) -> None:
    class Twice(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight * 2

    parametrize.register_parametrization(layer, "weight", Twice())


def multiply_by_weight(layer: Any) -> object:
    return F.linear(torch.randn(3, 512), layer.weight, layer.bias)


def add_to_data(layer: Any) -> None:
    # As an adapter is merged into its layer.
    layer.weight.data += torch.ones(512, 512)


USES_OF_NUMBERS: list[Callable[[Any], object]] = [
    *(twice, multiply_by_weight, add_to_data, parametrizations.weight_norm),
    lambda layer: torch.randn(3, 512) @ layer.weight.T,
    lambda layer: nn.init.zeros_(layer.weight),
    lambda layer: layer.reset_parameters(),
    lambda layer: torch.no_grad()(layer.weight.copy_)(torch.ones(512, 512)),
    lambda layer: nn.utils.parameters_to_vector(layer.parameters()),
]


@pytest.mark.parametrize("replace", FORMS)
@pytest.mark.parametrize("use", USES_OF_NUMBERS)
def test_a_use_of_the_numbers_that_are_gone_is_refused(
    replace: Replace, use: Callable[[nn.Module], object]
) -> None:
    """Torch computes with a parameter on `meta`, and gives what lies in memory, or does nothing."""
    model, x = replaced(replace), torch.randn(3, 512)
    expected = model(x)
    for one in (model, copy.deepcopy(model)):
        with pytest.raises(UnsupportedError, match="of the weight of a linear layer"):
            use(one.first)
        assert torch.equal(one(x), expected)
    # What it says of itself it says on.
    weight = model.first.weight
    assert (weight.shape, weight.numel(), weight.dtype) == ((512, 512), 512 * 512, torch.float32)
    assert repr(weight)


@pytest.mark.parametrize("replace", FORMS)
def test_another_weight_for_one_call_is_refused(replace: Replace) -> None:
    model, x = replaced(replace), torch.randn(3, 512)
    expected, own = model(x), dict[str, Tensor](model.named_parameters())
    for other in (torch.zeros(512, 512), nn.Parameter(torch.zeros(512, 512), requires_grad=False)):
        with pytest.raises(UnsupportedError, match="another parameter `weight`"):
            functional_call(model, {"second.weight": other}, (x,))
    assert torch.equal(functional_call(model, own, (x,)), expected)
    bias = torch.ones(512)
    assert torch.equal(
        functional_call(model.first, {"bias": bias}, (x,)),
        model.first.weight_product(x, bias),  # type: ignore[operator]
    )


def test_a_tied_head_that_is_parametrised_is_refused_when_it_is_called() -> None:
    embedding, head = nn.Embedding(600, 512), nn.Linear(512, 600, bias=False)
    head.weight = embedding.weight.requires_grad_(False)
    pack_weights(nn.ModuleList([embedding, head]))
    twice(head)
    with pytest.raises(UnsupportedError, match="another parameter `weight`"):
        head(torch.randn(2, 512))


@pytest.mark.parametrize("records_gradients", [True, False])
def test_a_model_with_int8_weights_can_be_compiled(records_gradients: bool) -> None:
    model, x = replaced(quantize_int8), torch.randn(3, 512)
    with torch.set_grad_enabled(records_gradients):
        compiled = torch.compile(model, backend="eager")
        assert torch.equal(compiled(x), model(x))


@pytest.mark.parametrize("replace", FORMS)
def test_a_layer_is_not_pruned(replace: Replace) -> None:
    model = replaced(replace)
    with pytest.raises(UnsupportedError, match="ones_like of the weight of a linear layer"):
        prune.l1_unstructured(model.first, "weight", 0.5)
    # Torch took the parameter away before it met the error.
    with pytest.raises(UnsupportedError, match="another parameter `weight`"):
        model(torch.randn(3, 512))


@pytest.mark.parametrize("replace", FORMS)
def test_a_call_that_would_lose_a_gradient_is_refused(replace: Replace) -> None:
    model, x = replaced(replace), torch.randn(3, 512)
    model.first(x)
    model.first.bias.requires_grad_(True)
    with pytest.raises(UnsupportedError, match="a parameter 'bias' that requires a gradient"):
        model.first(x)
    model.first.bias.requires_grad_(False)
    # One that was asked for by hand, of a weight that is not there.
    model.second.requires_grad_(True)
    with pytest.raises(UnsupportedError, match="a parameter 'weight' that requires a gradient"):
        model.second(x)
    # None is lost where none is recorded, whatever requires one.
    with torch.no_grad():
        assert not model.second(x.requires_grad_(True)).requires_grad
    # An adapter in front of the layer is refused, and one beside it is trained.
    model = replaced(replace)
    lora = nn.Linear(512, 512, bias=False)
    x = torch.randn(3, 512)
    with pytest.raises(UnsupportedError, match="an input"):
        model.first(lora(x))
    (model.first(x) + lora(x)).sum().backward()
    torch.testing.assert_close(lora.weight.grad, x.sum(0).expand(512, 512))


def test_a_tied_head_refuses_to_lose_the_gradient_of_the_embedding() -> None:
    embedding, head = nn.Embedding(600, 512), nn.Linear(512, 600, bias=False)
    head.weight = embedding.weight
    pack_weights(nn.ModuleList([embedding, head]))
    with pytest.raises(UnsupportedError, match="a parameter 'weight' that requires a gradient"):
        head(torch.randn(2, 512))


def test_an_error_at_a_later_layer_leaves_all_layers_as_they_were() -> None:
    def spoilt(change: Callable[[nn.Linear], object]) -> Model:
        change((model := Model()).second)
        return model

    def with_nan(layer: nn.Linear) -> None:
        with torch.no_grad():
            layer.weight[300, 5] = float("nan")

    replacements = (quantize_int8, partial(pack_weights, batch_invariant=True))
    for replace, change, error in (
        (quantize_int8, with_nan, ConfigError),
        (quantize_int8, nn.Module.half, UnsupportedError),
        (replacements[1], nn.Module.half, UnsupportedError),
        (replacements[1], partial(nn.Module.to, device="meta"), UnsupportedError),
    ):
        model, x = spoilt(change), torch.randn(2, 512)
        expected = model.first(x)
        with pytest.raises(error):
            replace(model)
        assert not is_replaced(model)
        assert torch.equal(model.first(x), expected)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("replace", [partial(pack_weights, batch_invariant=True), quantize_int8])
def test_transformers_cannot_resize_a_replaced_head(replace: Replace, is_tied: bool) -> None:
    transformers = pytest.importorskip("transformers", reason="its models are resized here")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(
        vocab_size=64, num_attention_heads=2, tie_word_embeddings=is_tied, **sizes
    )
    model, ids = transformers.LlamaForCausalLM(config).eval(), torch.arange(9)[None]
    kept = copy.deepcopy(model)
    layers = replace(model)
    assert "lm_head" in layers
    with torch.inference_mode():
        expected = model(ids).logits
        for one in (model, copy.deepcopy(model)):
            with pytest.raises(UnsupportedError, match="resize_token_embeddings: a model"):
                one.resize_token_embeddings(70)
            one.tie_weights()
            assert one.get_input_embeddings().num_embeddings == 64
            assert torch.equal(one(ids).logits, expected)
    # With a head as it was, it is right.
    assert replace(kept, only=[name for name in layers if name != "lm_head"])
    kept.resize_token_embeddings(70, mean_resizing=False)
    with torch.inference_mode():
        found = kept(ids).logits
    assert found.shape == (1, 9, 70)
    rounding = 1e-4 if replace is not quantize_int8 else 0.05
    torch.testing.assert_close(found[..., :64], expected, rtol=rounding, atol=rounding)
