"""The kernels of the mixers as they are compiled for Hopper and Blackwell, without a GPU.

What is compiled is what a launch would compile. Shapes are those of a Gated DeltaNet layer of
Qwen3-Next, on Blackwell with narrower heads, and around it those of a Mamba-2 layer.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pcomm.core.kernel_launch import KernelLaunch
from pcomm.gdn_cp.ops.chunks import chunk_tables

pytest.importorskip("triton", reason="triton has wheels for Linux only")

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import __file__ as nvidia
from triton.compiler import ASTSource, make_backend
from triton.compiler import compile as compile_kernel
from triton.runtime.jit import create_function_from_signature

TOKENS = 256
TABLES = chunk_tables((0, TOKENS), torch.device("cpu"))
# Shared memory of a block, in bytes, which both have.
MOST_SHARED = 227 << 10
# Bytes that a thread keeps in memory for want of registers, in products as exact as fp32, and how
# many more the compilers of other versions of Triton may keep: with 3.8 it is up to 40.
MOST_SPILLED = {
    "scan_kernel": 128,
    "back_through_scan_kernel": 384,
    "collect_kernel": 832,
}
MORE_SPILLED = 0 if version("triton").startswith("3.7.") else 64


@pytest.fixture(scope="module", autouse=True)
def fresh_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of its own: kernels are compiled here, not found."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        patch.delenv("TRITON_INTERPRET", raising=False)
        yield


def half(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def recurrence_launches(width: int, *, is_corrected: bool = True) -> list[KernelLaunch]:
    """Forward and backward of a recurrence of 16 key heads and 32 value heads."""
    from pcomm.gdn_cp.ops.kernels import triton_chunks as there
    from pcomm.gdn_cp.ops.kernels import triton_chunks_backward as back

    q, k = torch.empty(2, TOKENS, 16, width)
    v, (g, beta) = half(TOKENS, 32, width), torch.empty(2, TOKENS, 32)
    skip = None if is_corrected else torch.empty(32)
    given = there.Recurrence(TABLES, q, k, v, g, beta, skip, is_corrected)
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


def compiled(launch: KernelLaunch, capability: int) -> Any:
    target, kernel = GPUTarget("cuda", capability, 32), launch.kernel
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, others = bind(**launch.arguments, **launch.options)
    options, *source = kernel._pack_args(backend, launch.options, bound, specialization, others)
    return compile_kernel(ASTSource(kernel, *source), target=target, options=vars(options))


def spilled_bytes(kernel: Any) -> int:
    """Of each thread."""
    tool = Path(nvidia).parent / "bin" / "cuobjdump"
    if not tool.exists():
        pytest.skip(f"this build of triton comes without {tool.name}")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sum(int(count) for count in re.findall(r"\b(?:STACK|LOCAL):(\d+)", told))


def check(launch: KernelLaunch, capability: int, *, spills: bool = True) -> None:
    kernel, name = compiled(launch, capability), launch.kernel.__name__
    ptx = kernel.asm["ptx"]
    assert f".target sm_{capability}" in ptx
    assert not re.search(r"\b(?:atom|red)\.", ptx), name
    assert kernel.metadata.shared <= MOST_SHARED, name
    # A compiler that finds a kernel without meaning leaves nothing of it.
    assert re.search(r"\bst\.global", ptx), name
    if "PRECISION" in launch.arguments and launch.arguments.get("CORRECTED", True):
        assert re.search(r"\bmma\.sync|\bwgmma\.mma|\btcgen05\.mma", ptx), name
    if spills:
        assert spilled_bytes(kernel) <= MOST_SPILLED.get(name, 0) + MORE_SPILLED, name


@pytest.mark.parametrize("place", range(8))
def test_gated_delta_rule_of_qwen3_next_on_hopper(place: int) -> None:
    launch = recurrence_launches(128)[place]
    assert launch.arguments.get("PRECISION", "tf32x3") == "tf32x3"
    check(launch, 90)


# The scans, and what collects, which has twice been too much for the compiler.
@pytest.mark.parametrize("place", [1, 4, 5, 6])
def test_recurrences_on_blackwell_with_products_in_tf32(place: int) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        launch = recurrence_launches(64, is_corrected=place % 2 == 0)[place]
    finally:
        torch.set_float32_matmul_precision(before)
    assert launch.arguments.get("PRECISION", "tf32") == "tf32"
    check(launch, 100, spills=False)


@pytest.mark.parametrize("place", range(3))
def test_what_is_around_the_recurrences(place: int) -> None:
    check(layer_launches()[place], 90)
