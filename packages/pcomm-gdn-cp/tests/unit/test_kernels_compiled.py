"""The kernels of the mixers as they are compiled for Hopper and Blackwell, without a GPU.

What is compiled is what a launch would compile. Shapes are those of a Gated DeltaNet layer of
Qwen3-Next, on Blackwell with narrower heads, and around it those of a Mamba-2 layer.
"""

from __future__ import annotations

import re
from importlib.metadata import version
from typing import Any

import pytest
import torch
from torch import Tensor

from core_support.kernel_launches import compiled, resources
from pcomm.core.kernel_launch import KernelLaunch
from pcomm.gdn_cp.ops.chunks import chunk_tables

pytest.importorskip("triton", reason="triton has wheels for Linux only")

TOKENS = 256
TABLES = chunk_tables((0, TOKENS), torch.device("cpu"))
# Shared memory of a block, in bytes, which both have.
MOST_SHARED = 227 << 10
# Columns of Blackwell's tensor memory. Of a kernel that needs more nothing is compiled.
MOST_TENSOR_MEMORY = 512
# Bytes that a thread keeps in memory for want of registers, in products as exact as fp32, and how
# many more the compilers of other versions of Triton may keep: with 3.8 it is up to 40.
MOST_SPILLED = {
    "scan_kernel": 128,
    "back_through_scan_kernel": 384,
    "collect_kernel": 720,
}
MORE_SPILLED = 0 if version("triton").startswith("3.7.") else 64


def half(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def recurrence_launches(width: int, *, is_corrected: bool = True) -> list[KernelLaunch]:
    """Forward and backward of a recurrence of 16 key heads and 32 value heads."""
    from pcomm.gdn_cp.ops.kernels import triton_chunks as there
    from pcomm.gdn_cp.ops.kernels import triton_chunks_backward as back
    from pcomm.gdn_cp.ops.kernels.triton_pieces import Recurrence

    q, k = torch.empty(2, TOKENS, 16, width)
    v, (g, beta) = half(TOKENS, 32, width), torch.empty(2, TOKENS, 32)
    skip = None if is_corrected else torch.empty(32)
    given = Recurrence(TABLES, q, k, v, g, beta, skip, is_corrected)
    first, local = there.local_launch(given)
    second, scanned = there.scan_launch(given, local, None)
    third, output = there.read_launch(given, local, scanned)
    fourth, grad_values = back.back_through_reads_launch(given, local, output)
    fifth, found = back.back_through_scan_launch(given, local, grad_values, output, None)
    collecting, collected = back.collect_launches(given, local, scanned, found, output)
    last, _ = back.finish_launch(given, collected)
    return [first, second, third, fourth, fifth, *collecting, last]


def layer_launches() -> list[KernelLaunch]:
    """The largest of what is around it, forward and backward."""
    from pcomm.gdn_cp.ops.kernels import triton_convolution as convolution
    from pcomm.gdn_cp.ops.kernels import triton_gates as gates

    features, of_features = half(TOKENS, 1, 5120), half(5120)
    sections = (convolution.Channels(16, 128, 0.1), convolution.Channels(32, 128))
    channels, filters = half(TOKENS, 6144), half(6144, 4)
    there, results = convolution.convolution_launch(channels, filters, None, None, TABLES, sections)
    back, _ = convolution.convolution_backward_launch(
        channels, filters, None, None, results, TABLES, sections
    )
    norm, _ = gates.norm_backward_launch(features, features, of_features, features, 1e-6, True)
    return [there, back, norm]


def check(launch: KernelLaunch, capability: int, *, spills: bool = True) -> None:
    kernel: Any = compiled(launch, capability)
    name = launch.kernel.__name__
    ptx = kernel.asm["ptx"]
    assert f".target sm_{capability}" in ptx
    assert not re.search(r"\b(?:atom|red)\.", ptx), name
    assert kernel.metadata.shared <= MOST_SHARED, name
    assert kernel.metadata.tmem_size <= MOST_TENSOR_MEMORY, name
    # A compiler that finds a kernel without meaning leaves nothing of it.
    assert re.search(r"\bst\.global", ptx), name
    if uses_products(launch):
        assert re.search(r"\bmma\.sync|\bwgmma\.mma|\btcgen05\.mma", ptx), name
    if spills:
        used = resources(kernel)
        assert used["STACK"] + used["LOCAL"] <= MOST_SPILLED.get(name, 0) + MORE_SPILLED, name


def uses_products(launch: KernelLaunch) -> bool:
    sizes = launch.arguments.get("sizes")
    return sizes is not None and sizes.CORRECTED.value and launch.kernel.__name__ != "finish_kernel"


def precision(launch: KernelLaunch) -> str:
    found: str = launch.arguments["sizes"].PRECISION.value
    return found


def in_turn(most: int, *short: int) -> list[Any]:
    """Numbers of launches, of which some are looked at in the long form only."""
    return [n if n in short else pytest.param(n, marks=pytest.mark.soak) for n in range(most)]


# What waits for other chunks, what has most to add up, and what takes least.
@pytest.mark.parametrize("place", in_turn(8, 1, 4, 7))
def test_gated_delta_rule_of_qwen3_next_on_hopper(place: int) -> None:
    launch = recurrence_launches(128)[place]
    assert precision(launch) == "tf32x3"
    check(launch, 90)


@pytest.mark.parametrize("place", in_turn(7, 0, 2, 3))
def test_recurrences_on_blackwell_with_products_in_tf32(place: int) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        launch = recurrence_launches(64, is_corrected=place % 2 == 0)[place]
    finally:
        torch.set_float32_matmul_precision(before)
    assert precision(launch) == "tf32"
    check(launch, 100, spills=False)


@pytest.mark.parametrize("place", in_turn(3, 0, 2))
@pytest.mark.parametrize("capability", [90, 100])
def test_what_is_around_the_recurrences(place: int, capability: int) -> None:
    check(layer_launches()[place], capability)


# What collects needs most of the tensor memory, and has been too much for the compiler three times.
@pytest.mark.parametrize("place", in_turn(8, 5, 6))
def test_gated_delta_rule_of_qwen3_next_on_blackwell(place: int) -> None:
    check(recurrence_launches(128)[place], 100, spills=False)


@pytest.mark.parametrize("place", in_turn(7, 4))
@pytest.mark.parametrize("is_corrected", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_the_widest_key_heads_on_blackwell(place: int, is_corrected: bool) -> None:
    check(recurrence_launches(256, is_corrected=is_corrected)[place], 100, spills=False)
