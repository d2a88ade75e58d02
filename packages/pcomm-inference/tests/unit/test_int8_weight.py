"""Int8 weights: numbers, products, and models whose linear layers have them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.core.layout import Layout
from pcomm.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from pcomm.core.testing.virtual import VirtualCollectives, run_virtual
from pcomm.inference.layers import Int8Weight, quantize_int8
from pcomm.inference.layers.int8_weight import quantize_rows

DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def meant(product: Int8Weight) -> Tensor:
    """The weights that the numbers stand for in fp64, exactly."""
    return product.numbers_OI.double() * product.scales_O.double().unsqueeze(1)


def product_of(layer: nn.Module) -> Int8Weight:
    product = layer.weight_product
    assert isinstance(product, Int8Weight)
    return product


def rounding_of(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Bound of the rounding of `x weight^T + bias`.

    Sums are made in fp32 or wider; results are rounded when they are stored, scaled, and added to
    a bias.
    """
    sums = torch.finfo(torch.promote_types(dtype, torch.float32)).eps * x.shape[-1]
    magnitude = x.double().abs() @ weight.double().abs().T
    return sums * magnitude + 2 * torch.finfo(dtype).eps * (magnitude + 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_is_off_by_at_most_half_a_scale(dtype: torch.dtype) -> None:
    # More elements than are converted at once; rows of all magnitudes, of zeros, and too small.
    weight = (drawn(1030, 1024) * 10 ** drawn(1030, 1, seed=1)).to(dtype)
    weight[3], weight[1027] = 0, torch.finfo(dtype).smallest_normal / 2**6
    numbers, scales = quantize_rows(weight)
    assert numbers.dtype == torch.int8
    assert int(numbers.max()) == -int(numbers.min()) == 127
    assert (scales > 0).all()
    assert scales.dtype == dtype
    scales = scales.double().unsqueeze(1)
    # The quotient that is rounded to a number is itself rounded to fp32.
    off = (weight.double() - numbers.double() * scales).abs() / scales
    assert off.max() <= 0.5 + 127 * torch.finfo(torch.float32).eps
    # Scales are no larger than they need to be, so that no step is lost.
    largest = weight.double().abs().amax(1, keepdim=True)
    is_seen = (largest > 0) & (largest / 127 > torch.finfo(dtype).smallest_normal)
    assert (scales / (largest / 127))[is_seen].max() <= 1 + torch.finfo(dtype).eps
    # A row and its negative have negative numbers.
    assert torch.equal(quantize_rows(-weight)[0], -numbers)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_no_numbers_are_refused(value: float) -> None:
    weight = drawn(4, 32)
    weight[2, 5] = value
    with pytest.raises(ConfigError, match="NaN or infinity"):
        Int8Weight(weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_a_dtype_without_room_for_scales_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedError, match="neither bf16 nor fp32 nor fp64"):
        Int8Weight(torch.ones(4, 32, dtype=dtype))
    with pytest.raises(UnsupportedError, match="a device that is no CPU"):
        Int8Weight(torch.ones(4, 32, device="meta"))


# Rows on both sides of the kernel's most; inputs that its parts of 16 divide, and others; a matrix
# of more numbers than are converted at once.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(5, 48), (1, 16), (37, 40), (4, 17), (3000, 400)])
def test_products_are_those_of_fp64(dtype: torch.dtype, outputs: int, inputs: int) -> None:
    weight, bias = drawn(outputs, inputs, dtype=dtype), drawn(outputs, dtype=dtype, seed=1)
    product = Int8Weight(weight)
    for rows in (1, 2, 4, 5, 16, 17, 40):
        x = drawn(rows, inputs, dtype=dtype, seed=rows)
        found = product(x, bias)
        assert found.dtype == dtype
        exact = x.double() @ meant(product).T + bias.double()
        bound = rounding_of(x, meant(product), dtype) + torch.finfo(dtype).eps * bias.double().abs()
        assert ((found.double() - exact).abs() <= bound).all(), rows
        # And the whole error beside the weights as they were: half a step for each of them.
        step = product.scales_O.double() * (0.5 + 1e-4)
        exact = x.double() @ weight.double().T + bias.double()
        bound = bound + x.double().abs().sum(1, keepdim=True) * step
        assert ((found.double() - exact).abs() <= bound).all(), rows


def test_the_kernel_sees_up_to_16_rows_of_inputs_in_parts_of_16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # With other numbers of inputs it reads behind the end of the weights, and the process dies.
    seen, kernel = [], torch._weight_int8pack_mm

    def noted(x: Tensor, *others: Tensor) -> Tensor:
        seen.append(tuple(x.shape))
        return kernel(x, *others)

    monkeypatch.setattr(torch, "_weight_int8pack_mm", noted)
    products = {n: Int8Weight(drawn(8, n, dtype=torch.bfloat16)) for n in (8, 16, 40, 48)}
    with torch.inference_mode():
        for inputs, product in products.items():
            for rows in (0, 1, 16, 17):
                x = torch.ones(rows, inputs, dtype=torch.bfloat16)
                assert product(x, None).shape == (rows, 8)
    assert seen == [(1, 16), (16, 16), (1, 48), (16, 48)]


def test_activations_lie_anywhere_and_have_the_dtype_of_the_scales() -> None:
    product, memory = Int8Weight(drawn(300, 64, dtype=torch.bfloat16)), drawn(130).bfloat16()
    for offset in (0, 1, 4, 8, 32):
        x = memory[offset : offset + 64].view(1, 64)
        assert torch.equal(product(x, None), product(x.clone(), None))
    for rows in (1, 17):
        with pytest.raises(ConfigError, match=r"an input of torch\.float32"):
            product(torch.ones(rows, 64), None)
    assert Int8Weight(torch.ones(3, 0))(torch.ones(2, 5, 0), None).equal(torch.zeros(2, 5, 3))


def test_a_row_in_bf16_has_the_same_bits_in_any_batch_up_to_16_and_in_any_above() -> None:
    product = Int8Weight(drawn(70, 256, dtype=torch.bfloat16))
    x = drawn(64, 256, dtype=torch.bfloat16, seed=1)
    few, many = product(x[:16], None), product(x, None)
    for rows in (1, 2, 3, 4, 5, 8, 15):
        assert torch.equal(product(x[:rows], None), few[:rows])
    for rows in (17, 31, 33, 50):
        assert torch.equal(product(x[:rows], None), many[:rows])


def test_inputs_have_any_strides_and_dimensions() -> None:
    product, bias = Int8Weight(drawn(6, 32)), drawn(6)
    x = drawn(32, 5, 3)
    expected = product(x.permute(2, 1, 0).reshape(15, 32), bias).view(3, 5, 6)
    assert torch.equal(product(x.permute(2, 1, 0), bias), expected)
    assert torch.equal(product(x[:, 0, 0], bias), expected[0, 0])
    assert product(torch.ones(0, 2, 32), None).shape == (0, 2, 6)
    assert Int8Weight(torch.ones(0, 32))(torch.ones(2, 32), None).shape == (2, 0)
    # 6 rows of 32 numbers, and their scales in fp32.
    assert product.nbytes == 6 * 32 + 6 * 4


class Block(nn.Module):
    """A reader's model: a layer used twice, an output layer with the weight of the embedding."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 32, dtype=dtype)
        self.norm = nn.LayerNorm(32, dtype=dtype)
        self.inner = nn.Sequential(nn.Linear(32, 48, dtype=dtype), nn.ReLU())
        self.back = nn.Linear(48, 32, bias=False, dtype=dtype)
        self.again = self.inner[0]
        self.mixer = nn.MultiheadAttention(32, 2, dtype=dtype)
        self.head = nn.Linear(32, 20, bias=False, dtype=dtype)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.embedding(ids))
        x = x + self.back(self.inner(x)) + self.back(self.again(x).relu())
        return self.head(x + self.mixer(x, x, x)[0])


ALL = ("inner.0", "again", "back", "head")


def test_linear_layers_are_replaced_and_nothing_else() -> None:
    torch.manual_seed(0)
    model = Block().eval()
    other, ids = copy.deepcopy(model), torch.arange(20)
    table = model.embedding.weight
    assert quantize_int8(model) == ALL
    assert model.inner[0] is model.again
    assert model.embedding.weight is table
    for name in ALL:
        assert isinstance(model.get_submodule(name).weight_product, Int8Weight)
    # `out_proj` is a subclass of nn.Linear, whose weight attention reads by itself.
    assert not hasattr(model.mixer.out_proj, "weight_product")
    # The same model with the weights that are meant; the table of the embedding stays.
    with torch.no_grad():
        other.head.weight = nn.Parameter(meant(product_of(model.head)).float())
        other.inner[0].weight.copy_(meant(product_of(model.again)))
        other.back.weight.copy_(meant(product_of(model.back)))
        torch.testing.assert_close(model(ids), other(ids))


def test_what_is_skipped_or_not_named_stays() -> None:
    model = Block()
    assert quantize_int8(model, only=("back",)) == ("back",)
    # A layer at two places stays at both, and one that is quantised is no linear layer any more.
    assert quantize_int8(model, skip=["inner"]) == ("head",)
    with pytest.raises(ConfigError, match="no linear layer in it"):
        quantize_int8(model, skip=["inn*", "mixer"])
    with pytest.raises(ConfigError, match=r"skip 'haed'(.|\n)*Did you mean 'head'"):
        quantize_int8(model, skip=["haed"])
    assert quantize_int8(nn.Linear(32, 8)) == ("",)


def test_a_layer_keeps_its_hooks_and_its_copies_compute_the_same() -> None:
    torch.manual_seed(0)
    model, ids = Block().eval(), torch.arange(20)
    seen: list[str] = []
    model.back.register_forward_hook(lambda *_: seen.append("back"))
    quantize_int8(model)
    assert not model.back.training
    with torch.inference_mode():
        expected = model(ids)
        assert seen == ["back", "back"]
        assert torch.equal(copy.deepcopy(model)(ids), expected)
        x, loaded = drawn(2, 32), pickle.loads(pickle.dumps(model.again))
        assert torch.equal(loaded(x), model.again(x))


def test_states_and_gradients_are_refused() -> None:
    model = Block()
    saved = model.state_dict()
    quantize_int8(model, skip=["inner", "head", "mixer"])
    with pytest.raises(UnsupportedError, match=r"state_dict: back\.weight of a linear layer"):
        model.state_dict()
    with pytest.raises(UnsupportedError, match=r"load_state_dict: back\.weight of a linear layer"):
        model.load_state_dict(saved)
    with pytest.raises(UnsupportedError, match="has no backward"):
        model(torch.arange(20))


def quantized_layers(collectives: Any, kind: type[nn.Module], **options: Any) -> nn.Module:
    """This rank's part of a layer of 24 inputs and 40 outputs, in a model of its own."""
    layout = Layout.balanced(40 if kind is ColumnParallelLinear else 48, collectives.size)
    sizes = (48, layout) if kind is ColumnParallelLinear else (layout, 40)
    layer = kind(*sizes, collectives, bias=True, **options)
    with torch.no_grad():
        whole, bias = drawn(40, 48), drawn(40, seed=1)
        start = sum(layout.sizes[: collectives.rank])
        own = slice(start, start + layout.sizes[collectives.rank])
        is_column = kind is ColumnParallelLinear
        layer.weight.copy_(whole[own] if is_column else whole[:, own])
        layer.bias.copy_(bias[own] if is_column else bias)
    model = nn.ModuleDict({"layer": layer})
    quantize_int8(model)
    return model["layer"]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("rows", [2, 19])
def test_layers_of_several_ranks_have_scales_of_their_shares(size: int, rows: int) -> None:
    x, bias = drawn(rows, 48, seed=2), drawn(40, seed=1).double()

    def columns(collectives: VirtualCollectives) -> tuple[Tensor, Tensor]:
        layer = quantized_layers(collectives, ColumnParallelLinear, gather_output=True)
        with torch.inference_mode():
            return layer(x), meant(product_of(layer))

    found = run_virtual(columns, size)
    weight = torch.cat([own for _, own in found])
    # Rows of the whole matrix have the scales that they have on one rank.
    assert torch.equal(weight, meant(Int8Weight(drawn(40, 48))))
    for y, _ in found:
        assert (y - (x.double() @ weight.T + bias)).abs().max() <= 1e-4

    def sums(collectives: VirtualCollectives) -> tuple[Tensor, Tensor]:
        layer = quantized_layers(collectives, RowParallelLinear)
        start = sum(Layout.balanced(48, size).sizes[: collectives.rank])
        with torch.inference_mode():
            own = x[:, start : start + layer.weight.shape[1]]
            return layer(own), meant(product_of(layer))

    found = run_virtual(sums, size)
    weight = torch.cat([own for _, own in found], 1)
    for y, _ in found:
        assert (y - (x.double() @ weight.T + bias)).abs().max() <= 1e-4
