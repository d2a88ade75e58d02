"""The barrier-free kernels as they are compiled for Hopper and Blackwell, without a GPU.

What is compiled are the launches that the operations make, on stand-ins for a workspace.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton has wheels for Linux only")

from nvls_support.compiled import accesses, any_arguments, compile_kernel, problems_of
from pcomm.nvls.collectives.gathers import all_gather_launch
from pcomm.nvls.collectives.reductions import all_reduce_launch, reduce_scatter_launch
from pcomm.nvls.policy.choose import Choice
from pcomm.nvls.workspace.memory import LamportState

pytestmark = pytest.mark.usefixtures("fresh_triton_cache")

CHOICE = Choice("lamport", 4, 8, "test")
BF16, FP16, FP32, BYTES = torch.bfloat16, torch.float16, torch.float32, torch.uint8
# Operation, type, way, architecture, ranks; and the stores by multicast of a vector of the shard.
VARIANTS = {
    ("all_gather", BF16, "multicast", 90, 8): 1,
    ("all_gather", BF16, "peers", 90, 3): 0,
    ("all_gather", BYTES, "multicast", 90, 72): 2,
    ("all_gather", BYTES, "multicast", 100, 8): 2,
    ("all_gather", BYTES, "peers", 90, 8): 0,
    ("all_reduce", BF16, "multicast", 90, 8): 1,
    ("all_reduce", BF16, "multicast", 100, 8): 1,
    ("all_reduce", BF16, "multicast", 103, 8): 1,
    ("all_reduce", BF16, "peers", 90, 3): 0,
    ("all_reduce", FP16, "multicast", 100, 72): 1,
    ("all_reduce", FP32, "multicast", 90, 4): 1,
    ("all_reduce", FP32, "peers", 90, 8): 0,
    # What has one receiver is never stored by multicast.
    ("reduce_scatter", BF16, "multicast", 90, 8): 0,
    ("reduce_scatter", FP16, "multicast", 90, 72): 0,
    ("reduce_scatter", FP32, "peers", 90, 2): 0,
    ("reduce_scatter", FP32, "multicast", 100, 8): 0,
    ("reduce_scatter", FP32, "multicast", 120, 8): 0,
}
# Code that another one of them has as well, for another architecture or number of ranks.
ALIKE = {
    ("all_gather", BF16, "peers", 90, 3),
    ("all_gather", BYTES, "multicast", 90, 72),
    ("all_reduce", BF16, "multicast", 103, 8),
    ("all_reduce", BF16, "peers", 90, 3),
    ("all_reduce", FP16, "multicast", 100, 72),
    ("all_reduce", FP32, "multicast", 90, 4),
    ("reduce_scatter", FP32, "peers", 90, 2),
    ("reduce_scatter", FP32, "multicast", 120, 8),
}


def launch_of(name, dtype, way, world, choice=CHOICE):
    """The launch of an operation whose shards have 4 rows of 128 bytes."""
    shared = any_arguments(world, way)
    del shared["slot"]
    state = LamportState(1 << 20, world, 1 << 17, device=torch.device("cpu"))
    workspace: Any = SimpleNamespace(
        group=SimpleNamespace(size=world),
        device=torch.device("cpu"),
        lamport_arguments=lambda: {**shared, **state.arguments()},
        turn=lambda: None,
        is_in_slot=lambda x, turn: False,
    )
    columns = 128 // dtype.itemsize
    shard, whole = (
        torch.empty(4, columns, dtype=dtype),
        torch.empty(4, world * columns, dtype=dtype),
    )
    if name == "all_gather":
        return all_gather_launch(workspace, choice, whole, shard, -1)
    if name == "all_reduce":
        return all_reduce_launch(workspace, choice, shard, shard)
    return reduce_scatter_launch(workspace, choice, shard, whole, -1)


@cache
def compiled(name, dtype, way, capability, world):
    launch = launch_of(name, dtype, way, world)
    return compile_kernel(
        launch.kernel,
        launch.arguments,
        capability,
        num_warps=launch.num_warps,
        max_registers=launch.max_registers,
    )


def problems(ptx: str) -> list[str]:
    """What breaks the rules of all kernels, and those of waits for data."""
    blocks = re.findall(r"// begin inline asm\n(.*?)// end inline asm", ptx, re.DOTALL)
    waits = [block for block in blocks if "%globaltimer" in block]
    # State: number and length are read; number, ticket and length written; one ticket is taken,
    # and told to all threads. A wait reads the word of the failure before it, and at its end
    # writes both.
    control = {"ld.global.b32": 2, "st.global.b32": 3, "atom.global.gpu.relaxed.add.u32": 1}
    control |= {"ld.shared.b32": 1, "st.shared.b32": 1}
    control |= {f"{kind}.global.b32": len(waits) for kind in ("ld.relaxed.gpu", "st.relaxed.gpu")}
    control["st.relaxed.sys.global.b32"] = len(waits)
    found = list(problems_of(ptx, barriers=0, control=control))
    for wait in waits:
        before, inside = wait.split("WAIT:")
        for part in (before, inside):
            words = re.findall(r"setp\.eq(?:\.or)?\.u32 +%missing, (%r\d+), 0x80000000", part)
            if len(set(words)) != 4:
                found.append(f"{len(set(words))} words are looked at")
        if accesses(inside)["ld.relaxed.sys.global.v4.b32"] != 1:
            found.append("a wait reads something else")
    if not waits or accesses(ptx)["ld.relaxed.sys.global.v4.b32"] != 2 * len(waits):
        found.append(f"{len(waits)} waits, and other reads")
    return found


@pytest.mark.parametrize(
    "variant",
    [pytest.param(v, marks=pytest.mark.soak if v in ALIKE else []) for v in VARIANTS],
    ids=str,
)
def test_kernels_keep_the_rules(variant: tuple[str, torch.dtype, str, int, int]) -> None:
    kernel, puts = compiled(*variant), VARIANTS[variant]
    assert f".target sm_{variant[3]}a" in kernel.ptx
    assert problems(kernel.ptx) == []
    multimem = [kind for kind in accesses(kernel.ptx) if "multimem" in kind]
    assert multimem == ["multimem.st.relaxed.sys.global.v4.f32"] * bool(puts)
    assert kernel.ptx.count("multimem.st") == puts
    usage = kernel.resources()
    # Two blocks of 8 warps at a time; in shared memory the ticket alone.
    assert usage["REG"] <= 128
    assert usage["STACK"] == usage["LOCAL"] == 0
    assert kernel.shared_bytes <= 16


def test_no_fence_is_waited_for() -> None:
    code = compiled("all_reduce", BF16, "multicast", 90, 8).machine_code()
    assert re.search(r"\bLDG\.E\.128\.STRONG\.SYS\b", code)
    assert re.search(r"\bSTG\.E\.128\.STRONG\.SYS\b", code)
    assert not re.search(r"\b(?:MEMBAR|ERRBAR|CCTL|LDL|STL)\b", code)


@pytest.mark.parametrize(
    ("found", "instead", "problem"),
    [
        ("@%inside multimem.st", "multimem.st", "every thread stores: multimem"),
        ("@%inside st.relaxed", "st.relaxed", "every thread stores: st.relaxed"),
        (r"@!?%(?:idle|missing|early) bra", "// bra", "every thread stores: st.relaxed.gpu"),
        # Triton 3.8 writes where it is in the source before each line.
        (r"WAIT:(\s+\.loc.*)?\s+ld.relaxed.sys", "WAIT: ld", "reads something else"),
        (r"setp.eq.or.u32 %missing, (%r\d+), 0x80000000, %missing", "", "1 words are looked at"),
        ("0x80000000", "0x80000001", "0 words are looked at"),
        ("relaxed.add", "acq_rel.add", "acq_rel"),
    ],
)
def test_a_broken_rule_is_found(found: str, instead: str, problem: str) -> None:
    ptx = compiled("all_reduce", BF16, "multicast", 90, 8).ptx
    broken = re.sub(found, instead, ptx)
    assert broken != ptx
    assert problem in "\n".join(problems(broken))


def test_the_largest_block_can_be_launched() -> None:
    """A block has 65,536 registers: 64 for each of 1,024 threads, where this kernel likes more."""
    launch = launch_of("all_gather", BYTES, "multicast", 8, replace(CHOICE, num_warps=32))
    kernel = compile_kernel(
        launch.kernel, launch.arguments, 90, num_warps=32, max_registers=launch.max_registers
    )
    assert compiled("all_gather", BYTES, "multicast", 100, 8).resources()["REG"] > 64
    assert kernel.resources()["REG"] <= 64


def test_no_more_blocks_than_there_are_data_for() -> None:
    # A shard of 4 rows of 128 bytes has 32 vectors, and a block moves 256.
    assert launch_of("all_gather", BF16, "peers", 8).num_blocks == 1
