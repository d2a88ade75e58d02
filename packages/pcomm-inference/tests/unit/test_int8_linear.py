"""Int8 weights: numbers, products, layers, and models whose linear layers are replaced."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pcomm.core.collectives.identity import IdentityCollectives
from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.core.layout import Layout
from pcomm.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from pcomm.core.testing.virtual import VirtualCollectives, run_virtual
from pcomm.inference.quantization import Int8Linear, quantize_int8
from pcomm.inference.quantization.int8_rows import quantize_rows

DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def meant(layer: Int8Linear) -> Tensor:
    """The weights of a layer in fp64, exactly."""
    return layer.weight_int8.double() * layer.scale.double().unsqueeze(1)


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
        Int8Linear(weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_a_dtype_without_room_for_scales_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedError, match="neither bf16 nor fp32 nor fp64"):
        Int8Linear(torch.ones(4, 32, dtype=dtype))
    with pytest.raises(UnsupportedError, match="a device that is no CPU"):
        Int8Linear(torch.ones(4, 32, device="meta"))


# Rows on both sides of the kernel's most; inputs that its parts of 16 divide, and others; a matrix
# of more numbers than are converted at once.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(5, 48), (1, 16), (37, 40), (4, 17), (3000, 400)])
def test_products_are_those_of_fp64(dtype: torch.dtype, outputs: int, inputs: int) -> None:
    weight, bias = drawn(outputs, inputs, dtype=dtype), drawn(outputs, dtype=dtype, seed=1)
    layer = Int8Linear(weight, nn.Parameter(bias))
    for rows in (1, 2, 4, 5, 16, 17, 40):
        x = drawn(rows, inputs, dtype=dtype, seed=rows)
        with torch.no_grad():
            found = layer(x)
        assert found.dtype == dtype
        exact = x.double() @ meant(layer).T + bias.double()
        bound = rounding_of(x, meant(layer), dtype) + torch.finfo(dtype).eps * bias.double().abs()
        assert ((found.double() - exact).abs() <= bound).all(), rows
        # And the whole error beside the weights as they were: half a step for each of them.
        step = layer.scale.double() * (0.5 + 1e-4)
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
    layers = {n: Int8Linear(drawn(8, n, dtype=torch.bfloat16)) for n in (8, 16, 40, 48)}
    with torch.inference_mode():
        for inputs, layer in layers.items():
            for rows in (0, 1, 16, 17):
                assert layer(torch.ones(rows, inputs, dtype=torch.bfloat16)).shape == (rows, 8)
    assert seen == [(1, 16), (16, 16), (1, 48), (16, 48)]


def test_a_row_in_bf16_has_the_same_bits_in_any_batch_up_to_16_and_in_any_above() -> None:
    layer = Int8Linear(drawn(70, 256, dtype=torch.bfloat16))
    x = drawn(64, 256, dtype=torch.bfloat16, seed=1)
    with torch.inference_mode():
        few, many = layer(x[:16]), layer(x)
        for rows in (1, 2, 3, 4, 5, 8, 15):
            assert torch.equal(layer(x[:rows]), few[:rows])
        for rows in (17, 31, 33, 50):
            assert torch.equal(layer(x[:rows]), many[:rows])


def test_a_layer_takes_any_strides_and_dimensions() -> None:
    layer = Int8Linear(drawn(6, 32), nn.Parameter(drawn(6)))
    x = drawn(32, 5, 3)
    expected = layer(x.permute(2, 1, 0).reshape(15, 32)).view(3, 5, 6)
    assert torch.equal(layer(x.permute(2, 1, 0)), expected)
    assert torch.equal(layer(x[:, 0, 0]), expected[0, 0])
    assert layer(torch.ones(0, 2, 32)).shape == (0, 2, 6)
    assert Int8Linear(torch.ones(0, 32))(torch.ones(2, 32)).shape == (2, 0)


def test_gradients_are_those_of_the_weights_that_are_meant() -> None:
    layer, x = Int8Linear(drawn(6, 32), nn.Parameter(drawn(6))), drawn(3, 32, seed=1)
    assert [name for name, _ in layer.named_parameters()] == ["bias"]
    for wants in (True, False):
        own, bias = x.clone().requires_grad_(wants), layer.bias
        assert bias is not None
        bias.grad = None
        layer.train()(own).square().sum().backward()
        theirs, their_bias = x.clone().requires_grad_(), bias.detach().clone().requires_grad_()
        F.linear(theirs, meant(layer).float(), their_bias).square().sum().backward()
        torch.testing.assert_close(bias.grad, their_bias.grad)
        if wants:
            torch.testing.assert_close(own.grad, theirs.grad)


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
    assert all(type(model.get_submodule(name)) is Int8Linear for name in ALL)
    # `out_proj` is a subclass of nn.Linear, whose weight attention reads by itself.
    assert not isinstance(model.mixer.out_proj, Int8Linear)
    # The same model with the weights that are meant; the table of the embedding stays.
    with torch.no_grad():
        other.head.weight = nn.Parameter(meant(model.head).float())
        other.inner[0].weight.copy_(meant(model.again))
        other.back.weight.copy_(meant(model.back))
        torch.testing.assert_close(model(ids), other(ids))


def test_what_is_skipped_or_not_named_stays() -> None:
    model = Block()
    assert quantize_int8(model, only=("back", "norm")) == ("back",)
    # A layer at two places stays at both.
    assert quantize_int8(model, skip=["inner"]) == ("head",)
    with pytest.raises(ConfigError, match="no linear layer in it"):
        quantize_int8(model, skip=["inn*", "mixer"])
    with pytest.raises(ConfigError, match=r"skip 'haed'(.|\n)*Did you mean 'head'"):
        quantize_int8(model, skip=["haed"])
    with pytest.raises(ConfigError, match="Int8Linear"):
        quantize_int8(nn.Linear(32, 8))


def test_a_layer_with_hooks_is_refused() -> None:
    model = Block()
    model.back.register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedError, match="layer back: hooks on it"):
        quantize_int8(model)


def test_copies_states_and_modes_are_those_of_any_module() -> None:
    torch.manual_seed(0)
    model, ids = Block().eval(), torch.arange(20)
    quantize_int8(model)
    assert not model.back.training
    expected = model(ids)
    twin = copy.deepcopy(model)
    model.back.weight_int8.zero_()
    assert torch.equal(twin(ids), expected)
    saved = twin.state_dict()
    assert saved["back.weight_int8"].dtype == torch.int8
    assert "back.weight" not in saved
    other = Block().eval()
    with pytest.raises(RuntimeError, match=r"Unexpected key(.|\n)*weight_int8"):
        other.load_state_dict(saved)
    quantize_int8(other)
    other.load_state_dict(saved)
    assert torch.equal(other(ids), expected)


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
            return layer(x), meant(layer)

    found = run_virtual(columns, size)
    weight = torch.cat([own for _, own in found])
    # Rows of the whole matrix have the scales that they have on one rank.
    assert torch.equal(weight, meant(Int8Linear(drawn(40, 48))))
    for y, _ in found:
        assert (y - (x.double() @ weight.T + bias)).abs().max() <= 1e-4

    def sums(collectives: VirtualCollectives) -> tuple[Tensor, Tensor]:
        layer = quantized_layers(collectives, RowParallelLinear)
        start = sum(Layout.balanced(48, size).sizes[: collectives.rank])
        with torch.inference_mode():
            return layer(x[:, start : start + layer.weight.shape[1]]), meant(layer)

    found = run_virtual(sums, size)
    weight = torch.cat([own for _, own in found], 1)
    for y, _ in found:
        assert (y - (x.double() @ weight.T + bias)).abs().max() <= 1e-4


def test_layers_of_several_ranks_are_for_inference_alone() -> None:
    def refused(collectives: VirtualCollectives) -> None:
        layer = quantized_layers(collectives, RowParallelLinear)
        with pytest.raises(UnsupportedError, match="a gradient of its input"):
            layer(torch.ones(2, 24, requires_grad=True))
        for kind in (ColumnParallelLinear, RowParallelLinear):
            with pytest.raises(UnsupportedError, match="sequence_parallel=True"):
                quantized_layers(collectives, kind, sequence_parallel=True)

    run_virtual(refused, 2)
    # On one rank both are plain.
    layer = quantized_layers(IdentityCollectives(), RowParallelLinear, sequence_parallel=True)
    layer(torch.ones(2, 48, requires_grad=True)).sum().backward()
