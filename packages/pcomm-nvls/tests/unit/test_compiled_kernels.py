"""The kernels as they are compiled for Hopper and Blackwell, without a GPU.

Each case is a kernel with the flags that change its code, on 8 ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton has wheels for Linux only")

from pcomm.nvls.testing.compiled import (
    CompiledKernel,
    accesses,
    any_arguments,
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
    from pcomm.nvls.kernels.all_gather import all_gather_kernel

    arguments = {**any_arguments(8, way), "x": ADDRESS, "out": ADDRESS, "BLOCK": THREADS}
    assert case == "all_gather"
    arguments |= {"num_vectors": 640, "row_vectors": 64, "ENTRY": True, "COPY_OUT": True}
    return all_gather_kernel, arguments


@cache
def compiled(case: str, way: str, capability: int) -> CompiledKernel:
    kernel, arguments = launch_of(case, way)
    return compile_kernel(kernel, arguments, capability, num_warps=NUM_WARPS)


# Of each case: barriers, stores to all ranks, loads summed over all ranks.
CASES = {"all_gather": (2, 1, 0)}


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("way", ["multicast", "peers"])
@pytest.mark.parametrize("case", CASES)
def test_kernels_keep_the_rules(case: str, way: str, capability: int) -> None:
    barriers, puts, sums = CASES[case]
    kernel = compiled(case, way, capability)
    assert f".target sm_{capability}a" in kernel.ptx
    assert problems_of(kernel.ptx, barriers=barriers) == ()
    found = accesses(kernel.ptx)
    multicast = way == "multicast"
    assert found["multimem.st.release.sys.global.u32"] == barriers * multicast
    assert found["multimem.st.relaxed.sys.global.v4.f32"] == puts * multicast
    assert kernel.ptx.count("multimem.ld_reduce") == sums * multicast
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
        ("\tret;", "\tst.local.b32 [0], 0;\n\tret;", "local memory"),
    ],
)
def test_a_broken_rule_is_found(found: str, instead: str, problem: str) -> None:
    ptx = compiled("all_gather", "multicast", 90).ptx
    assert found in ptx
    assert problem in "\n".join(problems_of(ptx.replace(found, instead), barriers=2))


def test_a_block_of_vectors_is_a_multiple_of_its_threads() -> None:
    kernel, arguments = launch_of("all_gather", "peers")
    with pytest.raises(ValueError, match="BLOCK is 256, with 512 threads"):
        compile_kernel(kernel, arguments | {"BLOCK": 256}, 90, num_warps=NUM_WARPS)
