"""Forms of weights: the products of `F.linear`, and whose rows depend on how many there are."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pcomm.core import Collectives, Layout
from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, WeightProduct
from pcomm.core.testing import assert_equal, run_virtual
from pcomm.inference.layers import pack_weights, quantize_int8
from pcomm.inference.layers.packed_weight import (
    FewRowsWeight,
    PackedWeight,
    check_batch_invariant,
    invariant_weight,
    packed_weight,
    uses_bf16_tiles,
)

# What oneDNN does here, also where ONEDNN_MAX_CPU_ISA keeps it from instructions that are there.
HAS_BF16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
PACKED = torch.bfloat16 if HAS_BF16 else torch.float32
packs_bf16 = pytest.mark.skipif(
    not HAS_BF16, reason="oneDNN has no products of bf16 with these instructions"
)
DTYPES = [pytest.param(torch.bfloat16, marks=packs_bf16), torch.float32]

# Inputs on both sides of the number from which oneDNN adds up a single row in another order.
# Of 1,000, single rows have few elements of other bits with AVX-512 without BF16.
SIZES = [
    (64, 256),
    (256, 1000),
    (128, 1024),
    (256, 1025),
    (576, 1536),
    *(pytest.param(*size, marks=pytest.mark.soak) for size in [(11008, 1536), (2048, 3072)]),
]


def weight_and_rows(outputs: int, inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    weight = torch.randn(outputs, inputs) / inputs**0.5
    return weight.to(dtype), torch.randn(70, inputs).to(dtype)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_products_are_those_of_f_linear(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    weight, rows = weight_and_rows(outputs, inputs, dtype)
    bias = torch.randn(outputs).to(dtype)
    products: list[WeightProduct] = [PackedWeight(weight)]
    if dtype == torch.bfloat16:
        products += [FewRowsWeight(weight), FewRowsWeight(weight, batch_invariant=True)]
    for product in products:
        # On both sides of the numbers from which few rows are computed otherwise.
        for count in (0, 1, 2, 7, 32, 33, 64, 65):
            found, expected = product(rows[:count], bias), F.linear(rows[:count], weight, bias)
            # Products are rounded to bf16 once; in fp32 the order of `inputs` terms is another.
            rounding = torch.finfo(dtype).eps * (1 if dtype == torch.bfloat16 else inputs)
            assert found.shape == expected.shape
            assert found.dtype == dtype
            assert found.is_contiguous()
            torch.testing.assert_close(found, expected, rtol=rounding, atol=rounding)


@torch.inference_mode()
@pytest.mark.instructions
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_a_row_has_the_same_bits_in_every_batch(
    outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    weight, rows = weight_and_rows(outputs, inputs, dtype)
    product = PackedWeight(weight)
    assert product.is_batch_invariant == (dtype == torch.float32 or not uses_bf16_tiles())
    # AMX has one order of sums for up to 32 rows, and others for more.
    most = 70 if product.is_batch_invariant else 32
    together = product(rows[:most], None)
    for count in (1, 2, 3, 8, 16, 31, 33):
        count = min(count, most)
        assert torch.equal(product(rows[:count], None), together[:count]), count


@torch.inference_mode()
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(
    ("outputs", "inputs"), [*SIZES, (16, 16), (17, 33), (64, 65), (8, 4096), (4096, 8), (63, 259)]
)
@pytest.mark.skipif(not uses_bf16_tiles(), reason="oneDNN does not multiply by AMX here")
def test_few_rows_by_tiles_have_the_bits_of_a_packed_weight(
    outputs: int, inputs: int, has_bias: bool
) -> None:
    weight, rows = weight_and_rows(outputs, inputs, torch.bfloat16)
    bias = torch.randn(outputs).bfloat16() if has_bias else None
    together = PackedWeight(weight)(rows[:32], bias)
    product = FewRowsWeight(weight)
    for count in (1, 2, 3, 5, 8, 16, 17, 31, 32):
        assert torch.equal(product(rows[:count], bias), together[:count]), count
        assert torch.equal(product(rows[32 - count : 32], bias), together[32 - count :]), count


@torch.inference_mode()
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (32, 128), (65, 64), (5, 24), (1, 1)])
@pytest.mark.skipif(not uses_bf16_tiles(), reason="oneDNN does not multiply by AMX here")
def test_rows_of_small_weights_by_tiles_have_the_same_bits_in_every_batch(
    outputs: int, inputs: int
) -> None:
    # On both sides of the size from which torch leaves a single row to oneDNN. Without oneDNN one
    # element in some ten thousand has other bits.
    for _ in range(40):
        weight, rows = weight_and_rows(outputs, inputs, torch.bfloat16)
        bias = torch.randn(outputs).bfloat16()
        product = FewRowsWeight(weight, batch_invariant=True)
        together = product(rows, bias)
        assert torch.equal(product(rows[:14], bias), together[:14])
        for row in range(len(rows)):
            assert torch.equal(product(rows[row : row + 1], bias), together[row : row + 1])


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Threads of torch for the time of a test."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@torch.inference_mode()
@pytest.mark.instructions
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [64, 576, 1024])
def test_activations_of_a_row_are_those_that_it_has_alone_on_two_threads(
    width: int, dtype: torch.dtype
) -> None:
    # Torch gives a thread 32,768 elements or more: on both sides of that.
    for count in (2, 31, 33, 71, 577, 1025):
        rows = torch.randn(count, width).to(dtype)
        for activation in (F.silu, partial(F.gelu, approximate="tanh"), torch.sigmoid):
            alone = torch.cat([activation(row[None].clone()) for row in rows])
            assert torch.equal(activation(rows), alone), (count, activation)


@torch.inference_mode()
@pytest.mark.instructions
@packs_bf16
def test_one_row_of_many_weights_has_the_bits_that_it_has_among_others() -> None:
    # Where bf16 is emulated one in six such weights has an element whose single row differs.
    for _ in range(40):
        weight, rows = weight_and_rows(1024, 1024, torch.bfloat16)
        product = PackedWeight(weight)
        assert torch.equal(product(rows[:1], None), product(rows[:3], None)[:1])


@torch.inference_mode()
@pytest.mark.instructions
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [(576, 1536), (256, 1000), pytest.param(2048, 1536, marks=pytest.mark.soak)],
)
def test_a_batch_invariant_layer_gives_a_row_the_same_bits_among_any_number(
    outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    layer = nn.Linear(inputs, outputs, dtype=dtype)
    # Bf16 without oneDNN is added up row by row, and stays as it is.
    assert pack_weights(layer, batch_invariant=True) == (
        ("",) if HAS_BF16 or dtype == torch.float32 else ()
    )
    check_batch_invariant(layer)
    rows = torch.randn(257, inputs).to(dtype)
    together = layer(rows)
    for count in (1, 2, 4, 15, 16, 17, 32, 33, 36, 37, 63, 64, 65, 128, 200, 256):
        assert torch.equal(layer(rows[:count]), together[:count]), count
        # Other neighbours, and another place among them.
        assert torch.equal(layer(rows[-count:]), together[-count:]), count
    assert torch.equal(layer(rows[:66].view(2, 33, -1)), together[:66].view(2, 33, -1))


@torch.inference_mode()
@packs_bf16
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_tiles", [True, False])
def test_only_bf16_by_tiles_is_computed_in_blocks_of_32_rows(
    has_tiles: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: has_tiles)
    by_tiles = has_tiles and dtype == torch.bfloat16
    weight, rows = weight_and_rows(64, 1536, dtype)
    seen = list[int]()
    multiply = torch.mm

    def count(weight: Tensor, x_IM: Tensor) -> Tensor:
        seen.append(x_IM.shape[1])
        return multiply(weight, x_IM)

    monkeypatch.setattr(torch, "mm", count)
    product = invariant_weight(weight)
    assert product is not None
    assert product.is_batch_invariant
    assert isinstance(product, FewRowsWeight if by_tiles else PackedWeight)
    for num_rows, blocks in ((32, [32]), (34, [32, 2]), (70, [32, 32, 6])):
        seen.clear()
        x = rows[:num_rows]
        torch.testing.assert_close(product(x, None), F.linear(x, weight))
        assert seen == (blocks if by_tiles else [])
    if by_tiles:
        # Without a promise about bits, all at once up to 64.
        for num_rows, calls in ((64, [64]), (65, [])):
            seen.clear()
            FewRowsWeight(weight)(rows[:num_rows], None)
            assert seen == calls


@packs_bf16
@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (None, True),
        ("avx512_core_amx", True),
        ("AVX512_CORE_AMX_FP16", True),
        ("DEFAULT", True),
        ("AVX512_CORE_FP16", False),
        ("avx512_core_bf16", False),
        ("AVX2", False),
    ],
)
def test_few_rows_are_multiplied_by_the_weight_as_it_lies_where_tiles_are_used(
    limit: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: True)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.delenv("DNNL_MAX_CPU_ISA", raising=False)
    if limit is not None:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    weight = torch.randn(128, 256).bfloat16()
    assert uses_bf16_tiles() == expected
    kind = FewRowsWeight if expected else PackedWeight
    assert isinstance(packed_weight(weight, most_rows=1), kind)
    assert isinstance(packed_weight(weight, most_rows=16), kind)
    for most_rows in (17, None):
        assert isinstance(packed_weight(weight, most_rows=most_rows), PackedWeight)
    layer = nn.Linear(256, 128, dtype=torch.bfloat16)
    held = layer.weight.data_ptr()
    assert pack_weights(layer, most_rows=1) == ("",)
    product = layer.weight_product
    assert isinstance(product, kind)
    if isinstance(product, FewRowsWeight):
        # The very weight, of which no copy was made.
        assert product._weight_OI.data_ptr() == held


def test_layers_whose_rows_depend_on_each_other_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def model() -> nn.Sequential:
        return nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4))

    packed = model()
    assert pack_weights(packed, batch_invariant=True) == ("0", "2")
    check_batch_invariant(packed)
    # What gains nothing by itself was left as it is, and of int8 few rows have another kernel.
    pack_weights(plain := model())
    quantize_int8(quantised := model())
    for other, layer, found in ((plain, "2", "its weight"), (quantised, "0", "Int8Weight")):
        with pytest.raises(ConfigError, match=f"layer '{layer}' multiplies with {found}"):
            check_batch_invariant(other)
    for dtype in (torch.float16, torch.float64):
        with pytest.raises(UnsupportedError, match=f"a weight of {dtype}"):
            pack_weights(model().to(dtype), batch_invariant=True)
    with pytest.raises(UnsupportedError, match="on meta"):
        pack_weights(model().to("meta"), batch_invariant=True)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(UnsupportedError, match="aarch64"):
        pack_weights(model(), batch_invariant=True)


def test_experts_whose_weights_are_stacked_are_refused_and_convolutions_are_not() -> None:
    transformers = pytest.importorskip("transformers", reason="its experts are refused here")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64}
    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        num_experts=2,
        num_experts_per_tok=1,
        **sizes,
    )
    model = transformers.Qwen3MoeForCausalLM(config)
    pack_weights(model, batch_invariant=True)
    with pytest.raises(ConfigError, match=r"stacked weights 'model\.layers\.0\.mlp\.experts\."):
        check_batch_invariant(model)
    check_batch_invariant(nn.Conv1d(64, 64, 4, groups=64))


@packs_bf16
def test_weights_that_were_packed_without_blocks_are_refused_where_they_are_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = nn.Linear(256, 256, dtype=torch.bfloat16)
    for has_tiles in (True, False):
        monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: has_tiles)  # noqa: B023
        pack_weights(one := copy.deepcopy(layer))
        if has_tiles:
            with pytest.raises(ConfigError, match="multiplies with PackedWeight"):
                check_batch_invariant(one)
        else:
            check_batch_invariant(one)
        pack_weights(other := copy.deepcopy(layer), batch_invariant=True)
        check_batch_invariant(other)


@pytest.mark.instructions
@pytest.mark.skipif(HAS_BF16, reason="oneDNN has products of bf16 with these instructions")
def test_weights_in_bf16_stay_as_they_are_where_they_cannot_be_packed() -> None:
    weight = torch.randn(128, 256).bfloat16()
    assert packed_weight(weight) is None
    with pytest.raises(RuntimeError):
        PackedWeight(weight)
    assert pack_weights(nn.Linear(256, 128, dtype=torch.bfloat16)) == ()


@torch.inference_mode()
@packs_bf16
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
        # Rounded to bf16 once, of sums that may be in another order.
        rounding = torch.finfo(torch.bfloat16).eps
        torch.testing.assert_close(
            product(x, None), F.linear(x, weight), rtol=rounding, atol=rounding
        )


def two_layers(dtype: torch.dtype = PACKED) -> nn.Sequential:
    return nn.Sequential(nn.Linear(256, 1024), nn.SiLU(), nn.Linear(1024, 256, bias=False)).to(
        dtype
    )


@torch.inference_mode()
@packs_bf16
def test_a_model_of_the_readers_own_computes_the_same_without_its_weights() -> None:
    model = two_layers()
    x = torch.randn(3, 256).bfloat16()
    expected = model(x)
    weights = [weakref.ref(model[0].weight), weakref.ref(model[2].weight)]
    assert pack_weights(model) == ("0", "2")
    gc.collect()
    assert all(weight() is None for weight in weights)
    assert model[0].weight.shape == (1024, 256)
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
    assert pack_weights(large) == (("0", "1") if HAS_BF16 else ("1",))


@torch.inference_mode()
@packs_bf16
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
    # One parameter, without memory.
    assert first.weight is second.weight
    assert first.weight.is_meta
    # One after the other: the first call leaves the weight to the other layer.
    first, second = nn.Linear(128, 128), nn.Linear(128, 128)
    second.weight = first.weight
    both = nn.ModuleList([first, second]).bfloat16()
    for name in ("0", "1"):
        assert pack_weights(both, only=(name,)) == (name,)
        assert first.weight is second.weight


@torch.inference_mode()
def test_a_copy_of_a_weight_for_few_rows_is_apart_from_it_and_a_pickle_is_refused() -> None:
    weight, rows = weight_and_rows(300, 256, torch.bfloat16)
    product = FewRowsWeight(weight, batch_invariant=True)
    copied = copy.deepcopy(product)
    expected = product(rows, None)
    # As an embedding that is tied to a head, which the product follows.
    weight.mul_(2)
    assert torch.equal(copied(rows, None), expected)
    assert torch.equal(product(rows, None), 2 * expected)
    assert copied.is_batch_invariant
    with pytest.raises(UnsupportedError, match="pickle of a packed weight"):
        pickle.dumps(product)
    # Nothing to multiply by, and a bias.
    empty = FewRowsWeight(torch.empty(5, 0, dtype=torch.bfloat16), batch_invariant=True)
    bias = torch.randn(5).bfloat16()
    for count in (1, 3, 40):
        found = empty(torch.empty(count, 0, dtype=torch.bfloat16), bias)
        assert torch.equal(found, bias.expand(count, -1))


def compiled(model: nn.Module) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        model(torch.randn(3, 256).to(PACKED))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (nn.Module.state_dict, UnsupportedError, r"state_dict: 0\.weight of a linear layer"),
        (
            lambda model: model.load_state_dict(two_layers().state_dict()),
            UnsupportedError,
            r"load_state_dict: 0\.weight",
        ),
        (pickle.dumps, UnsupportedError, "made for one processor"),
        (
            lambda model: model(torch.randn(3, 256, dtype=PACKED, requires_grad=True)),
            UnsupportedError,
            "no backward",
        ),
        (
            lambda model: model(torch.randn(3, 256).double()),
            ConfigError,
            r"an input of torch\.float64",
        ),
        (compiled, UnsupportedError, "graph that is being traced"),
    ],
)
def test_what_a_packed_layer_cannot_do_is_refused_by_name(
    call: Callable[[nn.Module], object], error: type[Exception], words: str
) -> None:
    pack_weights(model := two_layers())
    with pytest.raises(error, match=words):
        call(model)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_bias_that_changes_is_added() -> None:
    model = two_layers()
    pack_weights(model)
    x = torch.randn(3, 256).to(PACKED)
    before = model[0](x)
    model[0].bias = nn.Parameter(model[0].bias + 100, requires_grad=False)
    assert (model[0](x) - before).min() > 98
    model[0].bias = None
    assert (model[0](x) - before).abs().max() < 2


@packs_bf16
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
