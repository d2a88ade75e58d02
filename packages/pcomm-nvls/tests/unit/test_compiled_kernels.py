"""The kernels as they are compiled for Hopper and Blackwell, without a GPU.

Each case is a kernel with the flags that change its code, on 8 ranks.
"""

from __future__ import annotations

import itertools
import re
from functools import cache
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton has wheels for Linux only")

from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from nvls_support.compiled import (
    CompiledKernel,
    accesses,
    any_arguments,
    assemble,
    compile_kernel,
    problems_of,
)
from pcomm.nvls.collectives.fused_rmsnorm import row_threads

NUM_WARPS = 16
THREADS = 32 * NUM_WARPS
ADDRESS = 1 << 43
# A row of DeepSeek-V3, in numbers.
HIDDEN = 7168
ITEMSIZES = {"bf16": 2, "fp16": 2, "fp32": 4}
pytestmark = pytest.mark.usefixtures("fresh_triton_cache")


def launch_of(case: str, way: str) -> tuple[Any, dict[str, Any]]:
    """A kernel, and arguments as a launch would pass them."""
    from pcomm.nvls.kernels.gathers import all_gather_coalesced_kernel, all_gather_kernel
    from pcomm.nvls.kernels.reductions import (
        one_shot_all_reduce_kernel,
        reduce_scatter_kernel,
        two_shot_all_reduce_kernel,
    )

    name, _, flags = case.partition(" ")
    arguments = {**any_arguments(8, way), "ENTRY": True, "BLOCK": THREADS}
    one_tensor = {"x": ADDRESS, "out": ADDRESS, "num_vectors": 640}
    summed = {"KIND": flags[:4].strip(), "IN_PLACE": "in place" in flags}
    match name:
        case "all_gather":
            layout = {"row_vectors": 64, "COPY_OUT": True}
            return all_gather_kernel, arguments | one_tensor | layout
        case "reduce_scatter":
            return reduce_scatter_kernel, arguments | one_tensor | summed | {"row_vectors": 64}
        case "one_shot":
            return one_shot_all_reduce_kernel, arguments | one_tensor | summed
        case "two_shot":
            return two_shot_all_reduce_kernel, arguments | one_tensor | summed
    tensors = {f"{name}{i}": ADDRESS for name in ("x", "out") for i in range(8)}
    lengths = {f"n{i}": 1 + i for i in range(8)}
    return all_gather_coalesced_kernel, arguments | tensors | lengths | {"TENSORS": 3}


def row_launch_of(case: str, way: str) -> tuple[Any, dict[str, Any], int]:
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
    if case not in ROW_CASES:
        kernel, arguments = launch_of(case, way)
        return compile_kernel(kernel, arguments, capability, num_warps=NUM_WARPS)
    kernel, arguments, num_warps = row_launch_of(case, way)
    limit = min(65536 // (32 * num_warps), 128)
    return compile_kernel(kernel, arguments, capability, num_warps=num_warps, max_registers=limit)


BF16, FP16, FP32 = "add.acc::f32.v4.bf16x2", "add.acc::f32.v4.f16x2", "add.v4.f32"
# Of each case: barriers, stores to all ranks, and instructions that sum over all ranks.
CASES = {
    "all_gather": (2, 1, ""),
    "all_gather_coalesced": (2, 3, ""),
    "reduce_scatter bf16": (2, 0, BF16),
    "reduce_scatter fp16": (2, 0, FP16),
    "reduce_scatter fp32": (2, 0, FP32),
    "reduce_scatter bf16 in place": (2, 0, BF16),
    "one_shot bf16": (2, 0, BF16),
    "two_shot bf16": (3, 1, BF16),
}
# The same of kernels of rows, and loads and stores of 4 bytes that are no epochs: counts, and
# scales of rows. Loops over 8 ranks are unrolled.
ROW_CASES = {
    "all_gather_v": (2, 1, "", 17, 0),
    "reduce_scatter_v bf16": (2, 0, BF16, 17, 0),
    "gather_to_rank": (2, 0, "", 0, 0),
    "all_reduce_add bf16 one": (2, 0, BF16, 0, 0),
    "all_reduce_add fp16 two": (3, 1, FP16, 0, 0),
    "reduce_scatter_add fp32 no": (3, 1, FP32, 0, 0),
    "reduce_scatter_add bf16 given": (3, 1, BF16, 1, 0),
    "reduce_scatter_add bf16 rows": (3, 2, BF16, 0, 8),
}
# The same sums in machine code. Without `.acc::f32` the first two are LDGMC.E.ADD.
SUMS = {
    BF16: {90: "LDGMC.E.F32ADD.BF16x8", 100: "LDGMC.E.HPADD.BF16x8"},
    FP16: {90: "LDGMC.E.F32ADD.F16x8", 100: "LDGMC.E.HPADD.F16x8"},
    FP32: {90: "LDGMC.E.ADD.F32x4", 100: "LDGMC.E.ADD.F32x4"},
}
KINDS = {"bf16": BF16, "fp16": FP16, "fp32": FP32}

# The way changes one piece of code, which all kernels share, and Blackwell differs in the
# instruction of the switch: by peers a kernel that only stores, one that also sums, and both of
# rows; each sum on Blackwell.
BY_PEERS = ["all_gather", "two_shot bf16", "all_gather_v", "all_reduce_add fp16 two"]
ON_BLACKWELL = ["all_gather", *(f"reduce_scatter {kind}" for kind in KINDS)]
ON_BLACKWELL += ["all_reduce_add fp16 two"]
KEPT = {("peers", 90): BY_PEERS, ("multicast", 100): ON_BLACKWELL, ("peers", 100): []}
TARGETS = [
    pytest.param(case, *target, marks=[] if case in KEPT.get(target, [case]) else pytest.mark.soak)
    for case in (*CASES, *ROW_CASES)
    for target in (("multicast", 90), *KEPT)
]


@pytest.mark.parametrize(("case", "way", "capability"), TARGETS)
def test_kernels_keep_the_rules(case: str, way: str, capability: int) -> None:
    barriers, puts, sums, loads, stores = ROW_CASES.get(case) or (*CASES[case], 0, 0)
    kernel = compiled(case, way, capability)
    assert f".target sm_{capability}a" in kernel.ptx
    narrow = {"ld.global.b32": loads, "st.global.b32": stores}
    assert problems_of(kernel.ptx, barriers=barriers, control=narrow) == ()
    found = accesses(kernel.ptx)
    multicast = way == "multicast"
    assert found["multimem.st.release.sys.global.u32"] == barriers * multicast
    stored = found["multimem.st.relaxed.sys.global.v4.f32"]
    # Rows that are longer than a block are stored in several pieces.
    assert (stored > 0) == (puts > 0 and multicast)
    assert case in ROW_CASES or stored == puts * multicast
    summed = {name for name in found if "ld_reduce" in name}
    whole = f"multimem.ld_reduce.relaxed.sys.global.{sums}"
    assert summed == ({whole} if sums and multicast else set())
    assert case in ROW_CASES or found[whole] == len(summed)
    # A division of 64 bits would be a subroutine; a norm has some for denormal numbers.
    called = kernel.subroutines()
    assert all(name.endswith("_f32_slowpath") for name in called), called
    assert not called or "add" in case
    usage = kernel.resources()
    assert usage["LOCAL"] == 0
    if case in CASES:
        # Registers for two blocks of this size at a time, none spilled, and no shared memory.
        assert usage["REG"] <= 64
        assert usage["STACK"] == kernel.shared_bytes == 0
        return
    # One block of 512 threads at least. A few numbers of long rows of fp32 go to local memory: 32
    # bytes with Triton 3.7, 40 with 3.6.
    assert usage["REG"] <= 128
    assert usage["STACK"] <= (40 if "fp32" in case else 0)
    # A reduction has a word for each warp; two words of each vector change their threads for fp8.
    assert kernel.shared_bytes <= (8192 if case.endswith((" given", " rows")) else 64)
    assert (kernel.shared_bytes == 0) == ("add" not in case)


@pytest.mark.parametrize(
    "case",
    [
        *("all_gather", "all_gather_coalesced", "gather_to_rank"),
        *("reduce_scatter bf16", "one_shot bf16", "two_shot bf16"),
    ],
)
def test_four_vectors_are_on_the_way_before_a_thread_stores_the_first(case: str) -> None:
    find = row_launch_of if case in ROW_CASES else launch_of
    kernel, arguments = find(case, "multicast")[:2]
    made = compile_kernel(
        kernel, arguments | {"BLOCK": 4 * THREADS}, 90, num_warps=NUM_WARPS, max_registers=64
    )
    access = re.compile(r"^\s*(?:@%\w+ )?((?:multimem\.)?(?:ld|st)\w*)\.\S*v4", re.MULTILINE)
    kinds = [name.removeprefix("multimem.")[:2] for name in access.findall(made.ptx)]
    runs = [(kind, len([*same])) for kind, same in itertools.groupby(kinds)]
    assert {runs[i] for i in range(0, len(runs), 2)} == {("ld", 4)}, runs
    assert {runs[i] for i in range(1, len(runs), 2)} == {("st", 4)}, runs
    usage = made.resources()
    assert usage["STACK"] == usage["LOCAL"] == 0
    # A division of 64 bits would be a subroutine.
    assert made.subroutines() == set()


def test_a_signal_waits_for_one_load_and_a_barrier_of_the_block() -> None:
    """The word of a failure is asked for beside the number, before the barrier of the block."""
    ptx = compiled("one_shot bf16", "multicast", 90).ptx
    order = re.findall(r"ld\.(?:volatile\.)?global\.b32|bar\.sync|multimem\.st\.release", ptx)
    one = ["ld.global.b32", "ld.volatile.global.b32", "bar.sync", "multimem.st.release", "bar.sync"]
    assert order == 2 * one


FENCES = {"multicast": 0, "fenced multicast": 3, "peers": 0}


@pytest.mark.parametrize(
    ("case", "capability"),
    [
        ("all_gather", 90),
        ("two_shot bf16", 100),
        pytest.param("all_reduce_add bf16 one", 90, marks=pytest.mark.soak),
        pytest.param("all_reduce_add bf16 one", 100, marks=pytest.mark.soak),
    ],
)
def test_barriers_by_multicast_have_fences_for_aliases_where_asked(case, capability) -> None:
    """Around the signal and behind the wait, and nothing else changes."""
    barriers = (ROW_CASES.get(case) or CASES[case])[0]
    made = {way: compiled(case, way, capability) for way in FENCES}
    for way, kernel in made.items():
        assert kernel.ptx.count("fence.proxy.alias;") == FENCES[way] * barriers
        assert problems_of(kernel.ptx, barriers=barriers) == ()
    plain, fenced = made["multicast"], made["fenced multicast"]
    assert accesses(plain.ptx) == accesses(fenced.ptx)
    order = re.findall(
        r"fence\.proxy\.alias|multimem\.st\.release|ld\.acquire|st\.release\.sys", fenced.ptx
    )
    fence = "fence.proxy.alias"
    one = [fence, "multimem.st.release", fence, "ld.acquire", "st.release.sys", fence]
    assert order == one * barriers
    assert fenced.resources()["LOCAL"] == 0
    assert fenced.resources()["REG"] == plain.resources()["REG"]
    # Each is a stronger fence than a release, of the device or the system, and empties the L1.
    for code, number in ((plain.machine_code(), 0), (fenced.machine_code(), 3 * barriers)):
        assert code.count("MEMBAR.SC.GPU") == code.count("MEMBAR.SC.SYS") == number


@pytest.mark.parametrize("kind", ["one_shot", "two_shot", "reduce_scatter"])
def test_a_sum_of_what_lies_in_the_slot_copies_nothing_there(kind: str) -> None:
    """Copying, each vector of the input is loaded once and stored in the slot once."""

    def vectors(case: str) -> dict[str, int]:
        found = accesses(compiled(case, "multicast", 90).ptx)
        return {name: n for name, n in found.items() if ".v4." in name}

    copying, written = vectors(f"{kind} bf16"), vectors(f"{kind} bf16 in place")
    # Of a tensor, or of the segment of each of 8 ranks.
    moved = dict.fromkeys(
        ("ld.global.v4.b32", "st.relaxed.sys.global.v4.b32"), 1 if kind == "one_shot" else 8
    )
    assert {name: n for name, n in copying.items() if name not in written} == moved
    assert {name: copying[name] for name in written} == written


# The instruction of each kind is read in machine code below, and in PTX of every kernel above.
SHORT_SUMS = [("all_reduce_add fp16 two", 100), ("reduce_scatter_add bf16 rows", 90)]
ROW_SUMS = [
    pytest.param(
        case, capability, marks=[] if (case, capability) in SHORT_SUMS else pytest.mark.soak
    )
    for case, (_, _, sums, _, _) in ROW_CASES.items()
    for capability in (90, 100)
    if sums
]


@pytest.mark.parametrize(("case", "capability"), ROW_SUMS)
def test_the_switch_adds_rows_in_fp32(case: str, capability: int) -> None:
    code = compiled(case, "multicast", capability).machine_code()
    wanted = SUMS[ROW_CASES[case][2]][capability]
    assert set(re.findall(r"\bLDGMC\.[\w.]*?(?:x8|x4)", code)) == {wanted}


@pytest.mark.parametrize(
    ("found", "instead", "problem"),
    [
        # A number of two bytes at a time; not under the mask; a signal of every thread.
        ("@%inside ld.global.v4.b32", "@%inside ld.global.b32", "ld.global.b32, allowed: 2"),
        ("@%inside st.global.v4", "st.global.v4", "every thread stores: st.global.v4"),
        ("@%inside multimem.st.relaxed", "multimem.st.relaxed", "every thread stores: multimem"),
        ("mov.u32 %peer, %tid.x", "mov.u32 %peer, 0", "does not depend on the thread"),
        ("ld.acquire.sys.global.u32", "ld.relaxed.sys.global.u32", "0 waits in 2 barriers"),
        ("// end inline asm\n", "// end inline asm\n\tst.global.v4.b32 [0], {0};\n", "outside"),
        ("bar.sync", "bar.arrive", "before another has stored it"),
        ("\tret;", "\tst.local.b32 [0], 0;\n\tret;", "local memory"),
    ],
)
def test_a_broken_rule_is_found(found: str, instead: str, problem: str) -> None:
    ptx = compiled("all_gather", "multicast", 90).ptx
    assert found in ptx
    assert problem in "\n".join(problems_of(ptx.replace(found, instead), barriers=2))


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_the_switch_sums_in_fp32_in_machine_code(kind: str, capability: int) -> None:
    code = compiled(f"reduce_scatter {kind}", "multicast", capability).machine_code()
    assert summing(code) == {f"{SUMS[KINDS[kind]][capability]}.RN.STRONG.SYS"}
    assert re.search(r"\bSTG\.E\.128\b", code)
    # Nothing is spilled, and threads of a block share nothing but their barriers.
    assert not re.search(r"\b(?:LDL|STL|LDS|STS|ATOM\w*|RED)\b", code)


def test_machine_code_shows_a_sum_that_is_not_in_fp32() -> None:
    ptx = compiled("reduce_scatter bf16", "multicast", 90).ptx
    code = assemble(ptx.replace(".acc::f32", ""), 90).machine_code()
    assert summing(code) == {"LDGMC.E.ADD.BF16x8.RN.STRONG.SYS"}


def test_a_division_of_64_bits_is_found_among_the_subroutines() -> None:
    ptx = compiled("all_gather", "multicast", 90).ptx
    divided = ptx.replace(
        "\tret;",
        ".reg .b64 %n;\nmov.u64 %n, %clock64;\ndiv.s64 %n, 7, %n;\n"
        "st.volatile.global.b64 [%n], %n;\n\tret;",
    )
    (found,) = assemble(divided, 90).subroutines()
    assert found.endswith("_div_s64")


def summing(code: str) -> set[str]:
    return set(re.findall(r"\bLDGMC[\w.]*", code))


@pytest.mark.soak
@pytest.mark.parametrize("capability", [103, 120])
@pytest.mark.parametrize("case", ["reduce_scatter bf16", "two_shot bf16"])
def test_later_architectures_are_assembled(case: str, capability: int) -> None:
    kernel = compiled(case, "multicast", capability)
    assert f".target sm_{capability}a" in kernel.ptx
    assert problems_of(kernel.ptx, barriers=CASES[case][0]) == ()


def test_a_number_that_varies_from_call_to_call_compiles_nothing_anew() -> None:
    """Lengths of 1, and multiples of 16, are what Triton would make code of their own for."""
    for case in CASES:
        kernel, arguments = launch_of(case, "multicast")
        varying = [name for name in arguments if re.fullmatch(r"n\d|\w+_vectors|rank", name)]
        assert varying
        variants = [specialized(kernel, arguments | dict.fromkeys(varying, n)) for n in (1, 3, 32)]
        assert variants[0] == variants[1] == variants[2]
    # A kernel of which nothing is said is compiled anew.
    kernel, arguments = launch_of("all_gather", "multicast")
    assert specialized(kernel, arguments) != specialized(kernel, arguments | {"slot": 1})


def specialized(kernel: Any, arguments: dict[str, Any]) -> list[Any]:
    """What a launch is compiled for: Triton's own key."""
    backend = make_backend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    return bind(**arguments)[1]


def test_a_block_of_vectors_is_a_multiple_of_its_threads() -> None:
    kernel, arguments = launch_of("all_gather", "peers")
    with pytest.raises(ValueError, match="BLOCK is 256, with 512 threads"):
        compile_kernel(kernel, arguments | {"BLOCK": 256}, 90, num_warps=NUM_WARPS)
