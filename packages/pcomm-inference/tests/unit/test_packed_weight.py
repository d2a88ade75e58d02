"""Packed weights: the products of `F.linear`, the same for a row in every batch."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pcomm.core import Collectives, Layout
from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from pcomm.core.testing import assert_equal, run_virtual
from pcomm.inference.layers import pack_weights
from pcomm.inference.layers.packed_weight import PackedWeight

# Inputs on both sides of the number from which oneDNN adds up a single row in another order.
SIZES = [(64, 256), (576, 1024), (2048, 1025), (576, 1536), (11008, 1536), (2048, 3072)]


def weight_and_rows(outputs: int, inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    weight = torch.randn(outputs, inputs) / inputs**0.5
    return weight.to(dtype), torch.randn(70, inputs).to(dtype)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_products_are_those_of_f_linear(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    weight, rows = weight_and_rows(outputs, inputs, dtype)
    bias = torch.randn(outputs).to(dtype)
    product = PackedWeight(weight)
    for count in (1, 2, 7, 64):
        found, expected = product(rows[:count], bias), F.linear(rows[:count], weight, bias)
        # Products are rounded to bf16 once; in fp32 the order of `inputs` terms is another.
        rounding = torch.finfo(dtype).eps * (1 if dtype == torch.bfloat16 else inputs)
        assert found.shape == expected.shape
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected, rtol=rounding, atol=rounding)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_a_row_has_the_same_bits_in_every_batch(
    outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    weight, rows = weight_and_rows(outputs, inputs, dtype)
    product = PackedWeight(weight)
    together = product(rows, None)
    for count in (1, 2, 3, 8, 16, 33):
        assert torch.equal(product(rows[:count], None), together[:count]), count


@torch.inference_mode()
def test_inputs_of_any_shape_and_stride() -> None:
    weight, rows = weight_and_rows(64, 1536, torch.bfloat16)
    product = PackedWeight(weight)
    wide = torch.randn(6, 2 * 1536).bfloat16()
    for x in (
        rows[0],
        rows[None, :1],
        rows[:0],
        rows[:6].view(2, 3, -1),
        wide[:, ::2],
        wide[:1, ::2],
    ):
        assert torch.equal(product(x, None), F.linear(x, weight))


def two_layers(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(256, 512), nn.SiLU(), nn.Linear(512, 256, bias=False)).to(dtype)


@torch.inference_mode()
def test_a_model_of_the_readers_own_computes_the_same_without_its_weights() -> None:
    model = two_layers()
    x = torch.randn(3, 256).bfloat16()
    expected = model(x)
    weights = [weakref.ref(model[0].weight), weakref.ref(model[2].weight)]
    assert pack_weights(model) == ("0", "2")
    gc.collect()
    assert all(weight() is None for weight in weights)
    assert model[0].weight.shape == (512, 256)
    assert model[0].weight.dtype == torch.bfloat16
    assert torch.equal(model(x), expected)
    assert torch.equal(copy.deepcopy(model)(x), expected)
    assert pack_weights(model) == ()


@torch.inference_mode()
def test_what_gains_nothing_or_cannot_be_packed_stays() -> None:
    class Own(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    model = nn.ModuleList(
        [
            nn.Linear(8, 8, dtype=torch.bfloat16),
            nn.Linear(256, 256, dtype=torch.float32),
            nn.Linear(512, 512, dtype=torch.float64),
            Own(512, 512, dtype=torch.bfloat16),
            nn.Linear(512, 512, device="meta"),
            torch.nn.utils.parametrizations.weight_norm(nn.Linear(512, 512)),
        ]
    )
    assert pack_weights(model) == ()
    # The sizes from which each dtype is packed.
    large = nn.ModuleList(
        [nn.Linear(128, 128, dtype=torch.bfloat16), nn.Linear(512, 512, dtype=torch.float32)]
    )
    assert pack_weights(large) == ("0", "1")


@torch.inference_mode()
def test_a_weight_that_the_embedding_keeps_and_one_that_two_layers_share() -> None:
    embedding, head = nn.Embedding(300, 256), nn.Linear(256, 300, bias=False)
    model = nn.ModuleList([embedding, head]).bfloat16()
    head.weight = embedding.weight
    x = torch.randn(2, 256).bfloat16()
    expected = F.linear(x, embedding.weight)
    pack_weights(model)
    assert torch.equal(head(x), expected)
    assert embedding(torch.tensor([7])).isfinite().all()
    first, second = nn.Linear(256, 256), nn.Linear(256, 256)
    second.weight = first.weight
    both = nn.ModuleList([first, second]).bfloat16()
    assert pack_weights(both) == ("0", "1")
    assert first.weight_product is second.weight_product


def test_torch_functions_around_a_packed_layer_are_refused() -> None:
    model = two_layers()
    state = model.state_dict()
    pack_weights(model)
    with pytest.raises(UnsupportedError, match=r"state_dict: 0\.weight of a linear layer"):
        model.state_dict()
    with pytest.raises(UnsupportedError, match=r"load_state_dict: 0\.weight"):
        model.load_state_dict(state)
    with pytest.raises(UnsupportedError, match="made for one processor"):
        pickle.dumps(model)
    with pytest.raises(UnsupportedError, match="no backward"):
        model(torch.randn(3, 256, dtype=torch.bfloat16, requires_grad=True))
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_bias_that_changes_is_added() -> None:
    model = two_layers()
    pack_weights(model)
    x = torch.randn(3, 256).bfloat16()
    before = model[0](x)
    model[0].bias = nn.Parameter(model[0].bias + 100)
    assert (model[0](x) - before).min() > 98
    model[0].bias = None
    assert (model[0](x) - before).abs().max() < 2


def test_other_dtypes_and_compilers_are_refused_by_name() -> None:
    model = two_layers()
    pack_weights(model)
    with pytest.raises(ConfigError, match=r"an input of torch\.float32"):
        model(torch.randn(3, 256))

    def compiling() -> bool:
        return True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", compiling)
        with pytest.raises(UnsupportedError, match="graph that is being traced"):
            model(torch.randn(3, 256).bfloat16())


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("gather_output", [True, False])
def test_tensor_parallel_layers(size: int, gather_output: bool) -> None:
    hidden = Layout.even(512, size)
    torch.manual_seed(0)
    x = torch.randn(5, 256).bfloat16()

    @torch.inference_mode()
    def on_rank(collectives: Collectives) -> tuple[list[Tensor], list[Tensor]]:
        column = ColumnParallelLinear(
            256, hidden, collectives, bias=True, gather_output=gather_output, dtype=torch.bfloat16
        )
        row = RowParallelLinear(hidden, 256, collectives, bias=True, dtype=torch.bfloat16)
        rows_of_row = torch.randn(5, 512 // size).bfloat16()
        plain = [column(x), row(rows_of_row)]
        assert pack_weights(nn.ModuleList([column, row])) == ("0", "1")
        return plain, [column(x), row(rows_of_row)]

    for plain, packed in run_virtual(on_rank, size):
        assert_equal(packed, plain)
