"""The kernels as they are compiled for Hopper and Blackwell, without a GPU.

What is compiled is what a launch would compile: Triton itself derives the signature and what is
known of alignment from the arguments. Shapes are those of Qwen3-Next on 4 and 8 ranks.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton has wheels for Linux only")

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import __file__ as nvidia
from triton.compiler import ASTSource, make_backend
from triton.compiler import compile as compile_kernel
from triton.runtime.jit import create_function_from_signature

from gdn_cp_support.pack_launches import CASES, launch_of


@pytest.fixture(scope="module", autouse=True)
def fresh_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of its own: kernels are compiled here, not found."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        patch.delenv("TRITON_INTERPRET", raising=False)
        yield


@cache
def compiled(case: str, size: int, capability: int) -> Any:
    return compile_launch(launch_of(case, size), capability)


def compile_launch(launch: Any, capability: int) -> Any:
    target, kernel = GPUTarget("cuda", capability, 32), launch.kernel
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, _ = bind(**launch.arguments)
    options, *source = kernel._pack_args(backend, {}, bound, specialization, {})
    return compile_kernel(ASTSource(kernel, *source), target=target, options=vars(options))


def accesses(ptx: str) -> Counter[str]:
    """How often each kind of access to global memory stands in the code."""
    return Counter(re.findall(r"\b(?:ld|st)\.global[\w.]*", ptx))


# Blackwell for one kernel of each direction; the source and what is known of it are the same.
@pytest.mark.parametrize(
    ("case", "capability"), [*((case, 90) for case in CASES), ("pack", 100), ("unpack", 100)]
)
def test_kernels_compile_without_atomics_to_accesses_of_16_bytes(
    case: str, capability: int
) -> None:
    kernel = compiled(case, 4, capability)
    assert f".target sm_{capability}" in kernel.asm["ptx"]
    assert not re.search(r"\b(?:atom|red)\.", kernel.asm["ptx"])
    assert kernel.asm["cubin"][:4] == b"\x7fELF"
    if case == "pack of columns first":
        return
    found = accesses(kernel.asm["ptx"])
    assert found["ld.global.v4.b32"] == found["st.global.v4.b32"] > 0
    # But for the permutation itself, which is 8 bytes a row.
    assert all(kind.endswith((".v4.b32", "b64")) for kind in found)
    # The rows of a tile of narrow columns are loaded by fewer threads than the tile, and shared.
    assert case == "take rows of parts" or not kernel.metadata.shared


def test_what_is_not_aligned_is_accessed_as_wide_as_it_can_be() -> None:
    """On 8 ranks a row of the message has 1,544 columns, and each gate 4 of them, so 8 bytes."""
    found = accesses(compiled("pack", 8, 90).asm["ptx"])
    assert set(found) == {f"{way}.global.v{n}.b32" for way in ("ld", "st") for n in (2, 4)}
    assert set(accesses(compiled("take rows", 8, 90).asm["ptx"])) == {
        "ld.global.v4.b32", "st.global.v4.b32", "ld.global.b64"
    }  # fmt: skip


def test_the_check_sees_an_access_that_is_narrow() -> None:
    """The same launch, as if nothing were known of where rows begin."""
    launch = launch_of("take rows", 8)
    shapes = [(*shape[:-1], 1) for shape in launch.arguments["SHAPES"]]
    launch.arguments["SHAPES"] = tuple(shapes)
    launch.arguments["row_units"] = tuple(x.stride(0) for x in launch.arguments["parts"])
    found = accesses(compile_launch(launch, 90).asm["ptx"])
    assert found["ld.global.v4.b32"] == 0
    assert found["ld.global.b16"] > 0


@pytest.mark.parametrize("case", ["pack", "take rows", "unpack"])
def test_machine_code_of_hopper_has_128_bit_accesses(case: str, tmp_path: Path) -> None:
    disassembler = Path(nvidia).parent / "bin" / "nvdisasm"
    if not disassembler.exists():
        pytest.skip(f"this build of triton comes without {disassembler.name}")
    file = tmp_path / "kernel.cubin"
    file.write_bytes(compiled(case, 4, 90).asm["cubin"])
    found = subprocess.run(
        [disassembler, "-c", "-ndf", file], capture_output=True, text=True, check=True
    ).stdout
    assert re.search(r"\bLDG\.E\.128\b", found)
    assert re.search(r"\bSTG\.E\.128\b", found)
    # Nothing is spilled: what a thread loads stays in registers until it is stored.
    assert not re.search(r"\b(?:ATOM\w*|RED|LDL|STL|LDS|STS)\b", found)
