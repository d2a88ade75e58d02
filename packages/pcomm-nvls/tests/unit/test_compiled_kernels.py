"""The kernels as they are compiled for Hopper and Blackwell, without a GPU.

Each case is a kernel with the flags that change its code, on 8 ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

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

NUM_WARPS = 16
THREADS = 32 * NUM_WARPS
ADDRESS = 1 << 43


@pytest.fixture(scope="module", autouse=True)
def fresh_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of its own: kernels are compiled here, not found."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        patch.delenv("TRITON_INTERPRET", raising=False)
        yield


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


@cache
def compiled(case: str, way: str, capability: int) -> CompiledKernel:
    kernel, arguments = launch_of(case, way)
    return compile_kernel(kernel, arguments, capability, num_warps=NUM_WARPS)


# Of each case: barriers, stores to all ranks, and instructions that sum over all ranks.
CASES = {
    "all_gather": (2, 1, ""),
    "all_gather_coalesced": (2, 3, ""),
    "reduce_scatter bf16": (2, 0, "add.acc::f32.v4.bf16x2"),
    "reduce_scatter fp16": (2, 0, "add.acc::f32.v4.f16x2"),
    "reduce_scatter fp32": (2, 0, "add.v4.f32"),
    "reduce_scatter bf16 in place": (2, 0, "add.acc::f32.v4.bf16x2"),
    "one_shot bf16": (2, 0, "add.acc::f32.v4.bf16x2"),
    "two_shot bf16": (3, 1, "add.acc::f32.v4.bf16x2"),
}
# The same in machine code. Without `.acc::f32` the first two are LDGMC.E.ADD.
SUMS = {
    "bf16": {90: "LDGMC.E.F32ADD.BF16x8", 100: "LDGMC.E.HPADD.BF16x8"},
    "fp16": {90: "LDGMC.E.F32ADD.F16x8", 100: "LDGMC.E.HPADD.F16x8"},
    "fp32": {90: "LDGMC.E.ADD.F32x4", 100: "LDGMC.E.ADD.F32x4"},
}


# As for the kernels of rows: one case of each kernel by peers, and each sum on Blackwell.
BY_PEERS = ["all_gather", "reduce_scatter bf16", "one_shot bf16", "two_shot bf16"]
ON_BLACKWELL = ["all_gather", *(f"reduce_scatter {kind}" for kind in SUMS)]
KEPT = {("multicast", 90): [*CASES], ("peers", 90): BY_PEERS, ("multicast", 100): ON_BLACKWELL}


@pytest.mark.parametrize(
    ("case", "way", "capability"),
    [
        pytest.param(
            case,
            way,
            capability,
            marks=[] if case in KEPT.get((way, capability), ()) else pytest.mark.soak,
        )
        for case in CASES
        for way in ("multicast", "peers")
        for capability in (90, 100)
    ],
)
def test_kernels_keep_the_rules(case: str, way: str, capability: int) -> None:
    barriers, puts, sums = CASES[case]
    kernel = compiled(case, way, capability)
    assert f".target sm_{capability}a" in kernel.ptx
    assert problems_of(kernel.ptx, barriers=barriers) == ()
    found = accesses(kernel.ptx)
    multicast = way == "multicast"
    assert found["multimem.st.release.sys.global.u32"] == barriers * multicast
    assert found["multimem.st.relaxed.sys.global.v4.f32"] == puts * multicast
    summed = [name for name in found if "ld_reduce" in name]
    whole = f"multimem.ld_reduce.relaxed.sys.global.{sums}"
    assert summed == ([whole] if sums and multicast else [])
    assert found[whole] == len(summed)
    # Registers for two blocks of this size at a time, none spilled, and no shared memory.
    usage = kernel.resources()
    assert usage["REG"] <= 64
    assert usage["STACK"] == usage["LOCAL"] == kernel.shared_bytes == 0


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
@pytest.mark.parametrize("kind", SUMS)
def test_the_switch_sums_in_fp32_in_machine_code(kind: str, capability: int) -> None:
    code = compiled(f"reduce_scatter {kind}", "multicast", capability).machine_code()
    assert summing(code) == {f"{SUMS[kind][capability]}.RN.STRONG.SYS"}
    assert re.search(r"\bSTG\.E\.128\b", code)
    # Nothing is spilled, and threads of a block share nothing but their barriers.
    assert not re.search(r"\b(?:LDL|STL|LDS|STS|ATOM\w*|RED)\b", code)


def test_machine_code_shows_a_sum_that_is_not_in_fp32() -> None:
    ptx = compiled("reduce_scatter bf16", "multicast", 90).ptx
    code = assemble(ptx.replace(".acc::f32", ""), 90).machine_code()
    assert summing(code) == {"LDGMC.E.ADD.BF16x8.RN.STRONG.SYS"}


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
