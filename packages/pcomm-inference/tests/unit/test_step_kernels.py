"""Products of few rows, norms and gates in one launch: interpreted against torch, and compiled.

Rows lie on both sides of the tiles of few (16) and of what is a kernel's at all (32), inputs and
outputs on both sides of a tile, with widths that no vector divides.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from core_support.fake_driver import STREAM, fake_driver
from core_support.kernel_launches import compiled, recorded, resources
from inference_support.kernels import interpreted_kernels
from pcomm.core import IdentityCollectives, Layout
from pcomm.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from pcomm.core.testing.assertions import assert_as_accurate, assert_equal
from pcomm.inference.layers import Norm, ResidualStream, quantize_int8

pytest.importorskip("triton", reason="triton has wheels for Linux only")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# numpy, which interprets, tells of sums beyond the range.
BEYOND = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture
def interpreted() -> Iterator[ModuleType]:
    with interpreted_kernels() as modules:
        yield modules["layers.step_kernels"]


def numbers(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


class Case:
    """Operands of a product, all of which a case may leave out."""

    def __init__(self, rows: int, inputs: int, outputs: int, dtype: torch.dtype, parts: str):
        self.is_gated = "gate" in parts
        self.x = numbers(rows, inputs + 3, dtype=dtype, seed=1)[:, :inputs]
        scale = torch.tensor(inputs**-0.5, dtype=dtype)
        self.weight = numbers(outputs, inputs, dtype=dtype, seed=2) * scale
        self.bias = numbers(outputs, dtype=dtype, seed=3) if "bias" in parts else None
        self.norm: Norm | None = None
        if "norm" in parts:
            scales = numbers(inputs, dtype=dtype, seed=4)
            self.norm = Norm(scales, 1e-5, is_zero_centred="centred" in parts)
        self.residual: Tensor | None = None
        if "residual" in parts:
            half = 2 if self.is_gated else 1
            self.residual = numbers(rows, outputs // half, dtype=dtype, seed=5)

    def found(self, module: ModuleType) -> Tensor:
        assert module.takes_product(self.x, self.weight, is_normed=self.norm is not None)
        result: Tensor = module.product(
            self.x,
            self.weight,
            self.bias,
            norm=self.norm,
            residual_TO=self.residual,
            is_gated=self.is_gated,
        )
        return result

    def by_torch(self, dtype: torch.dtype) -> Tensor:
        x, weight = self.x.to(dtype), self.weight.to(dtype)
        if self.norm is not None:
            norm = self.norm
            x = Norm(norm.weight.to(dtype), norm.eps, norm.is_zero_centred).of(x)
        y = F.linear(x, weight, None if self.bias is None else self.bias.to(dtype))
        if self.is_gated:
            gate, up = y.chunk(2, -1)
            y = F.silu(gate) * up
        return y if self.residual is None else self.residual.to(dtype) + y


# Both sides of a tile of rows, of one of inputs by dtype, and of one of outputs.
SIZES = [(1, 257, 32), (2, 31, 34), (16, 256, 62), (17, 128, 66), (32, 129, 30)]
# Each part alone or with others, and each size with both dtypes.
PRODUCTS = [
    ("", FP32, SIZES[::2]),
    ("norm", BF16, SIZES[:2]),
    ("residual bias", BF16, SIZES[2:4]),
    ("norm gate", FP32, SIZES[1::2]),
    ("norm centred gate bias residual", BF16, SIZES[4:]),
]
PARTS = [parts for parts, *_ in PRODUCTS]


@pytest.mark.parametrize(("parts", "dtype", "sizes"), PRODUCTS, ids=PARTS)
def test_products_are_those_of_torch(
    interpreted: ModuleType, parts: str, dtype: torch.dtype, sizes: list[tuple[int, int, int]]
) -> None:
    for rows, inputs, outputs in sizes:
        case = Case(rows, inputs, outputs, dtype, parts)
        exact = case.by_torch(torch.float64)
        # A row times its scales is rounded once more, and the quotient not at all.
        assert_as_accurate(case.found(interpreted), case.by_torch(dtype), exact, num_terms=8)


@pytest.mark.soak
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("parts", PARTS)
def test_products_of_all_sizes(interpreted: ModuleType, parts: str, dtype: torch.dtype) -> None:
    for size in SIZES:
        case = Case(*size, dtype, parts)
        exact = case.by_torch(torch.float64)
        assert_as_accurate(case.found(interpreted), case.by_torch(dtype), exact, num_terms=8)


@BEYOND
def test_rows_do_not_see_each_other(interpreted: ModuleType) -> None:
    """Numbers that are none, and sums beyond the range, stay in their row."""
    case = Case(17, 40, 36, FP32, "norm gate residual")
    before = case.found(interpreted)
    assert case.residual is not None
    case.x[3, 5], case.x[4, 7], case.x[5], case.x[6] = torch.nan, torch.inf, 1e30, 0.0
    case.residual[7, 0] = -torch.inf
    found, torchs = case.found(interpreted), case.by_torch(FP32)
    changed = [3, 4, 5, 6]
    assert found[[3, 4]].isnan().all()
    assert torchs[[3, 4]].isnan().all()
    assert torch.allclose(found[[5, 6]], torchs[[5, 6]], atol=1e-5)
    assert found[7, 0] == -torch.inf
    others = [row for row in range(17) if row not in changed]
    before[7, 0] = -torch.inf
    assert_equal(found[others], before[others])


def test_which_products_it_takes(interpreted: ModuleType) -> None:
    def takes(rows: int, dtype: torch.dtype = BF16, *, is_normed: bool = True) -> bool:
        x, weight = torch.empty(rows, 8, dtype=dtype), torch.empty(4, 8, dtype=dtype)
        found: bool = interpreted.takes_product(x, weight, is_normed=is_normed)
        return found

    assert [takes(rows) for rows in (0, 1, 32, 33)] == [False, True, True, False]
    assert [takes(1, dtype) for dtype in (FP32, FP16, torch.float64)] == [True, False, False]
    assert takes(1, FP16, is_normed=False)
    weight = torch.empty(8, 4, dtype=BF16).T
    assert not interpreted.takes_product(torch.empty(1, 8, dtype=BF16), weight, is_normed=False)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_a_sum_and_its_norm_are_those_of_torch(interpreted: ModuleType, dtype: torch.dtype) -> None:
    for rows, width in ((1, 1), (3, 7), (2, 512), (1, 513), (1, 16_384)):
        x, y = (numbers(rows, width, dtype=dtype, seed=seed) for seed in (1, 2))
        x[0, 0] = 6.0
        for is_zero_centred in (False, True):
            norm = Norm(numbers(width, dtype=dtype, seed=3), 1e-6, is_zero_centred)
            exact = Norm(norm.weight.double(), 1e-6, is_zero_centred)
            assert interpreted.takes_rows(x)
            found, normed = interpreted.add_norm(x, y, norm)
            assert_equal(found, x + y)
            assert_as_accurate(normed, norm.of(found), exact.of(found.double()), num_terms=4)
            same, normed = interpreted.add_norm(x, None, norm)
            assert same is x
            assert_as_accurate(normed, norm.of(x), exact.of(x.double()), num_terms=4)
    assert not interpreted.takes_rows(torch.empty(1, 16_385, dtype=dtype))
    assert not interpreted.takes_rows(torch.empty(2, 6, dtype=dtype)[:, ::2])


@BEYOND
def test_a_norm_of_what_is_no_number_is_what_torch_says(interpreted: ModuleType) -> None:
    x = numbers(5, 9, dtype=FP32, seed=1)
    x[0, 1], x[1, 2], x[2], x[3] = torch.nan, torch.inf, 0.0, 1e30
    norm = Norm(numbers(9, dtype=FP32, seed=2), 1e-6)
    _, normed = interpreted.add_norm(x, torch.zeros_like(x), norm)
    assert torch.allclose(normed, norm.of(x), rtol=1e-6, atol=0, equal_nan=True)


@BEYOND
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_a_gate_is_that_of_torch(interpreted: ModuleType, dtype: torch.dtype) -> None:
    for rows, width in ((1, 1), (2, 1024), (3, 1025)):
        both = 4 * numbers(rows, 2 * width, dtype=dtype, seed=1)
        both[0, 0], both[-1, -1] = -200.0, torch.nan
        gate, up = both.chunk(2, -1)
        found, plain = interpreted.swiglu(both), F.silu(gate) * up
        assert found[-1, -1].isnan()
        exact = F.silu(gate.double()) * up.double()
        for one in (found, plain, exact):
            one[-1, -1] = 0
        assert_as_accurate(found, plain, exact, num_terms=4)


# -- the stream ------------------------------------------------------------------------------


def layers_of(dtype: torch.dtype) -> tuple[ColumnParallelLinear, RowParallelLinear]:
    one = IdentityCollectives()
    torch.manual_seed(0)
    return (
        ColumnParallelLinear(24, Layout.cuts(40, 1), one, dtype=dtype),
        RowParallelLinear(Layout.cuts(20, 1), 24, one, bias=True, dtype=dtype),
    )


@torch.inference_mode()
@pytest.mark.parametrize(
    ("rows", "form"), [(1, "hooked"), (32, "plain"), (33, "plain"), (2, "replaced")]
)
def test_a_stream_is_a_sum_of_products(interpreted: ModuleType, rows: int, form: str) -> None:
    """Whether layers are plain, or have to be called as modules; and with sums that wait."""
    gate_up, down = layers_of(FP32)
    calls: list[int] = []
    if form == "hooked":
        for layer in (gate_up, down):
            layer.register_forward_hook(lambda *_: calls.append(1))
    if form == "replaced":
        quantize_int8(torch.nn.ModuleList([gate_up, down]))
    x, y = (numbers(rows, 24, dtype=FP32, seed=seed) for seed in (1, 2))
    norm = Norm(numbers(24, dtype=FP32, seed=3), 1e-5)
    stream, expected = ResidualStream(x.clone()), x
    for addends in ((), (y,), (y, x)):
        for one in addends:
            stream.add(one)
            expected = expected + one
        stream.add_product(down, stream.gated_product(norm, gate_up))
        gate, up = gate_up(norm.of(expected)).chunk(2, -1)
        expected = expected + down(F.silu(gate) * up)
        assert torch.allclose(stream.product(norm, gate_up), gate_up(norm.of(expected)), atol=1e-4)
    if form == "hooked":
        # Each is called for the stream as often as here.
        assert len(calls) == 2 * (3 * 3)
    rows_L = torch.tensor([rows - 1, 0])
    stream.add(y)
    assert torch.allclose(
        stream.select(rows_L).normed(norm), norm.of(expected + y)[rows_L], atol=1e-4
    )


# -- as they are compiled --------------------------------------------------------------------

# Inputs, outputs and parts of the products of a Llama-8B layer.
LLAMA = {
    "norm": (4096, 6144),
    "residual": (4096, 4096),
    "norm gate": (4096, 28_672),
    "residual of the MLP": (14_336, 4096),
}
# Each product of few rows and of many, and each on both architectures.
COMPILED = [(1, "norm", 90), (1, "residual of the MLP", 100), (32, "norm gate", 90)]
OTHERS = [(r, p, c) for r in (1, 32) for p in LLAMA for c in (90, 100) if (r, p, c) not in COMPILED]


def launch_of(rows: int, inputs: int, outputs: int, dtype: torch.dtype, parts: str) -> Any:
    from pcomm.inference.layers import step_kernels

    def empty(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=dtype)

    is_gated = "gate" in parts
    with recorded() as launches:
        step_kernels.product(
            empty(rows, inputs),
            empty(outputs, inputs),
            empty(outputs) if "bias" in parts else None,
            norm=Norm(empty(inputs), 1e-5, "centred" in parts) if "norm" in parts else None,
            residual_TO=empty(rows, outputs // (1 + is_gated)) if "residual" in parts else None,
            is_gated=is_gated,
        )
    return launches[0]


def long_form(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.soak)


@pytest.mark.parametrize(
    ("rows", "parts", "capability"), [*COMPILED, *(long_form(*one) for one in OTHERS)]
)
def test_weights_are_on_their_way_before_they_are_multiplied(
    rows: int, parts: str, capability: int
) -> None:
    found = compiled(launch_of(rows, *LLAMA[parts], BF16, parts), capability)
    ptx = found.asm["ptx"]
    copies = re.findall(r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], 0x(\w+)", ptx)
    # 16 bytes at a time, for three turns of the loop before the first is used.
    assert {int(size, 16) for size in copies} == {16}
    assert len(copies) >= 3 * 8
    assert re.search(r"\bmma\.sync|\bwgmma|\btcgen05", ptx)
    assert "div.s64" not in ptx
    used = resources(found)
    assert (used["STACK"], used["LOCAL"]) == (0, 0), "registers do not suffice"
    # Two blocks fit on a multiprocessor, by shared memory and by registers.
    assert 2 * (found.metadata.shared + 1024) <= 228 << 10
    assert 2 * 128 * used["REG"] <= 1 << 16


@pytest.mark.parametrize(
    ("parts", "capability"),
    [("norm centred gate bias", 90), long_form("norm centred gate bias", 100), long_form("", 90)],
)
def test_registers_suffice_for_products_in_fp32(parts: str, capability: int) -> None:
    used = resources(compiled(launch_of(32, 4096, 6144, FP32, parts), capability))
    assert (used["STACK"], used["LOCAL"]) == (0, 0)


@pytest.mark.parametrize(("width", "capability"), [(4096, 90), (16_384, 100)])
def test_rows_are_read_by_16_bytes(width: int, capability: int) -> None:
    from pcomm.inference.layers import step_kernels

    x = torch.empty(4, width, dtype=BF16)
    with recorded() as launches:
        step_kernels.swiglu(torch.empty(4, 2 * width, dtype=BF16))
        step_kernels.add_norm(x, x + 1, Norm(torch.empty(width, dtype=BF16), 1e-5))
    for launch in launches:
        found = compiled(launch, capability)
        assert set(re.findall(r"\b(?:ld|st)\.global\.(\S+)", found.asm["ptx"])) == {"v4.b32"}
        used = resources(found)
        assert (used["STACK"], used["LOCAL"]) == (0, 0)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("dtype", "capability", "numbers_of_rows"),
    [(BF16, 90, (1, 33)), long_form(BF16, 90, (16, 17)), long_form(FP32, 100, (1, 16, 17, 33))],
    ids=str,
)
def test_they_are_launched_as_they_were_compiled(
    dtype: torch.dtype, capability: int, numbers_of_rows: tuple[int, ...]
) -> None:
    """Of any number of rows; the driver refuses what no launch may have."""
    gate_up, down = layers_of(dtype)
    norm = Norm(torch.ones(24, dtype=dtype), 1e-5)
    few = ["product"] * 3 + ["add_norm", "product"]
    many = ["add_norm", "swiglu", "add_norm", "add_norm", "swiglu"]
    for rows in numbers_of_rows:
        found: list[tuple[Any, ...]] = []
        with fake_driver(capability, found):
            stream = ResidualStream(torch.ones(rows, 24, dtype=dtype))
            stream.add_product(down, stream.gated_product(norm, gate_up))
            stream.product(norm, gate_up)
            stream.add(torch.ones(rows, 24, dtype=dtype))
            stream.gated_product(norm, gate_up)
        assert {launch[2] for launch in found} == {STREAM}
        names = [launch[0].removesuffix("_kernel") for launch in found]
        assert names == (many if rows > 32 else few)
