"""What every operation launches, compiled for devices that no other test compiles for."""

from __future__ import annotations

import re
from collections import Counter

import pytest

pytest.importorskip("triton", reason="triton has wheels for Linux only")

from nvls_bench.on_host import recorded_launches
from nvls_support.compiled import CompiledKernel, accesses, compile_kernel
from pcomm.nvls.workspace.launch import Launch


@pytest.fixture(scope="module")
def launches() -> dict[tuple[str, str], Launch]:
    return recorded_launches(8, 100)


def built(launch: Launch, capability: int) -> CompiledKernel:
    return compile_kernel(
        launch.kernel,
        launch.arguments,
        capability,
        num_warps=launch.num_warps,
        max_registers=launch.max_registers,
    )


@pytest.mark.soak
@pytest.mark.parametrize("capability", [103, 120])
def test_every_launch_accesses_memory_as_on_sm_100(launches, capability):
    """The rules of `problems_of` are about accesses, and tests of sm_100 hold them."""
    for case, launch in launches.items():
        later, known = built(launch, capability), built(launch, 100)
        assert f".target sm_{capability}" in later.ptx, case
        assert _accesses(later) == _accesses(known), case
        usage = later.resources()
        assert usage["STACK"] == usage["LOCAL"] == 0, case
        assert usage["REG"] <= 128, case


def _accesses(kernel: CompiledKernel) -> tuple[Counter[str], list[str]]:
    return accesses(kernel.ptx), re.findall(r"\b(?:ld|st)\.local\S*", kernel.ptx)
