"""Launches of Triton kernels in tests: which are made, and what they compile to without a GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pcomm.core.kernel_launch import KernelLaunch

__all__ = ["compiled", "recorded", "resources"]


@contextmanager
def recorded() -> Iterator[list[KernelLaunch]]:
    """Launches are kept in the list, and not made. Local."""
    found: list[KernelLaunch] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KernelLaunch, "run", lambda launch: found.append(launch))
        yield found


def compiled(launch: KernelLaunch, capability: int) -> Any:
    """What a launch would compile for an architecture, 90 for Hopper. Local."""
    from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
    from triton.compiler import ASTSource, make_backend  # type: ignore[import-untyped]
    from triton.compiler import compile as compile_kernel
    from triton.runtime.jit import create_function_from_signature  # type: ignore[import-untyped]

    target, kernel = GPUTarget("cuda", capability, 32), launch.kernel
    backend = make_backend(target)
    names = ("num_warps", "num_stages")
    own = {name: value for name, value in launch.arguments.items() if name not in names}
    given = launch.options | {n: launch.arguments[n] for n in names if n in launch.arguments}
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, _ = bind(**own)
    options, *source = kernel._pack_args(backend, given, bound, specialization, {})
    return compile_kernel(ASTSource(kernel, *source), target=target, options=vars(options))


def resources(kernel: Any) -> dict[str, int]:
    """Registers of a thread as REG; bytes of STACK and LOCAL, to which those go that do not fit."""
    return _resources(kernel.asm["cubin"])


@cache
def _resources(binary: bytes) -> dict[str, int]:
    from triton.backends.nvidia import __file__ as nvidia  # type: ignore[import-untyped]

    tool = Path(nvidia).parent / "bin" / "cuobjdump"
    if not tool.exists():
        pytest.skip(f"this build of triton comes without {tool.name}")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command: list[str | Path] = [tool, "--dump-resource-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(number) for name, number in re.findall(r"\b([A-Z]+):(\d+)", told)}
