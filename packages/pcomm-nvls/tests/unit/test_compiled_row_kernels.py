"""The kernels that work row by row, or on counted rows, as compiled for Hopper and Blackwell."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton has wheels for Linux only")

from nvls_support.compiled import (
    CompiledKernel,
    accesses,
    any_arguments,
    compile_kernel,
    problems_of,
)
from pcomm.nvls.collectives.fused_rmsnorm import row_threads

ADDRESS = 1 << 43
# A row of DeepSeek-V3, in numbers.
HIDDEN = 7168
ITEMSIZES = {"bf16": 2, "fp16": 2, "fp32": 4}


@pytest.fixture(scope="module", autouse=True)
def fresh_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of its own: kernels are compiled here, not found."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        patch.delenv("TRITON_INTERPRET", raising=False)
        yield


def launch_of(case: str, way: str) -> tuple[Any, dict[str, Any], int]:
    """A kernel, arguments as a launch would pass them, and its warps."""
    from pcomm.nvls.kernels.fused_rmsnorm import (
        all_reduce_add_rmsnorm_kernel,
        reduce_scatter_add_rmsnorm_all_gather_kernel,
    )
    from pcomm.nvls.kernels.gathers import gather_to_rank_kernel
    from pcomm.nvls.kernels.ragged import all_gather_v_kernel, reduce_scatter_v_kernel

    name, _, flags = case.partition(" ")
    kind, _, form = flags.partition(" ")
    arguments = {**any_arguments(8, way), "x": ADDRESS, "out": ADDRESS, "ENTRY": True}
    if name in ("all_gather_v", "reduce_scatter_v"):
        rows = {"most_rows": 100, "total_rows": 800, "row_vectors": HIDDEN // 8}
        arguments |= rows | {"counts": torch.zeros(8, dtype=torch.int32), "BLOCK": 512}
        if name == "all_gather_v":
            return all_gather_v_kernel, arguments, 16
        return reduce_scatter_v_kernel, arguments | {"KIND": kind, "IN_PLACE": False}, 16
    if name == "gather_to_rank":
        arguments |= {"num_vectors": 640, "row_vectors": 64, "destination": 3}
        return gather_to_rank_kernel, arguments | {"BLOCK": 512}, 16
    threads = row_threads(HIDDEN, ITEMSIZES[kind], halves=form in ("rows", "given"))
    assert threads is not None
    tensors = dict.fromkeys(("residual", "weight", "new_residual"), ADDRESS)
    arguments |= tensors | {"num_rows": 64, "row_vectors": HIDDEN * ITEMSIZES[kind] // 16}
    arguments |= {"inverse_hidden": 1 / HIDDEN, "eps": 1e-5, "IN_PLACE": False}
    arguments |= {"KIND": kind, "BLOCK": threads.block}
    if name == "all_reduce_add":
        shots = {"TWO_SHOT": form == "two"}
        return all_reduce_add_rmsnorm_kernel, arguments | shots, threads.num_warps
    scales = ADDRESS if form == "no" else torch.zeros(64)
    arguments |= {"scales": scales, "FP8": form}
    return reduce_scatter_add_rmsnorm_all_gather_kernel, arguments, threads.num_warps


@cache
def compiled(case: str, way: str, capability: int) -> CompiledKernel:
    kernel, arguments, num_warps = launch_of(case, way)
    limit = 65536 // (32 * num_warps)
    return compile_kernel(
        kernel, arguments, capability, num_warps=num_warps, max_registers=min(limit, 128)
    )


BF16, FP16, FP32 = "add.acc::f32.v4.bf16x2", "add.acc::f32.v4.f16x2", "add.v4.f32"
# Of each case: barriers, stores to all ranks, instructions that sum over all ranks, and loads and
# stores of 4 bytes that are no epochs: counts, and scales of rows. Loops over 8 ranks are unrolled.
CASES = {
    "all_gather_v": (2, 1, "", 17, 0),
    "reduce_scatter_v bf16": (2, 0, BF16, 17, 0),
    "gather_to_rank": (2, 0, "", 0, 0),
    "all_reduce_add bf16 one": (2, 0, BF16, 0, 0),
    "all_reduce_add fp16 two": (3, 1, FP16, 0, 0),
    "reduce_scatter_add fp32 no": (3, 1, FP32, 0, 0),
    "reduce_scatter_add bf16 given": (3, 1, BF16, 1, 0),
    "reduce_scatter_add bf16 rows": (3, 2, BF16, 0, 8),
}
# The way changes one piece of code in each kernel, and Blackwell differs in the instruction of the
# switch: both are compiled for some cases only.
BY_PEERS = [
    "all_gather_v",
    "gather_to_rank",
    "all_reduce_add fp16 two",
    "reduce_scatter_add bf16 rows",
]
ON_BLACKWELL = ["reduce_scatter_v bf16", "all_reduce_add fp16 two", "reduce_scatter_add fp32 no"]
KEPT = {("peers", 90): BY_PEERS, ("multicast", 100): ON_BLACKWELL}
TARGETS = [
    pytest.param(case, *target, marks=[] if case in KEPT.get(target, CASES) else pytest.mark.soak)
    for case in CASES
    for target in (("multicast", 90), ("peers", 90), ("multicast", 100))
]
# The same sums in machine code. Without `.acc::f32` the first two are LDGMC.E.ADD.
SUMS = {
    BF16: {90: "LDGMC.E.F32ADD.BF16x8", 100: "LDGMC.E.HPADD.BF16x8"},
    FP16: {90: "LDGMC.E.F32ADD.F16x8", 100: "LDGMC.E.HPADD.F16x8"},
    FP32: {90: "LDGMC.E.ADD.F32x4", 100: "LDGMC.E.ADD.F32x4"},
}


@pytest.mark.parametrize(("case", "way", "capability"), TARGETS)
def test_row_kernels_keep_the_rules(case: str, way: str, capability: int) -> None:
    barriers, puts, sums, loads, stores = CASES[case]
    kernel = compiled(case, way, capability)
    assert f".target sm_{capability}a" in kernel.ptx
    narrow = {"ld.global.b32": loads, "st.global.b32": stores}
    assert problems_of(kernel.ptx, barriers=barriers, control=narrow) == ()
    found = accesses(kernel.ptx)
    multicast = way == "multicast"
    assert found["multimem.st.release.sys.global.u32"] == barriers * multicast
    stored = found["multimem.st.relaxed.sys.global.v4.f32"]
    assert (stored > 0) == (puts > 0 and multicast)
    summed = {name for name in found if "ld_reduce" in name}
    whole = f"multimem.ld_reduce.relaxed.sys.global.{sums}"
    assert summed == ({whole} if sums and multicast else set())


@pytest.mark.parametrize(
    ("case", "way", "capability"),
    [p for p in TARGETS if CASES[str(p.values[0])][2] and p.values[1] == "multicast"],
)
def test_the_switch_adds_in_fp32(case: str, way: str, capability: int) -> None:
    try:
        code = compiled(case, way, capability).machine_code()
    except FileNotFoundError as problem:
        pytest.skip(str(problem))
    wanted = SUMS[CASES[case][2]][capability]
    assert set(re.findall(r"\bLDGMC\.[\w.]*?(?:x8|x4)", code)) == {wanted}


@pytest.mark.parametrize(("case", "way", "capability"), TARGETS)
def test_rows_stay_in_registers(case: str, way: str, capability: int) -> None:
    kernel = compiled(case, way, capability)
    try:
        usage = kernel.resources()
    except FileNotFoundError as problem:
        pytest.skip(str(problem))
    # One block of 512 threads at least. A few numbers of long rows of fp32 go to local memory: 32
    # bytes with Triton 3.7, 40 with 3.6.
    assert usage["REG"] <= 128
    assert usage["STACK"] <= (40 if "fp32" in case else 0)
    assert usage["LOCAL"] == 0
    # A reduction has a word for each warp; two words of each vector change their threads for fp8.
    halves = case.endswith((" given", " rows"))
    assert kernel.shared_bytes <= (8192 if halves else 64)
    assert (kernel.shared_bytes == 0) == ("add" not in case)
