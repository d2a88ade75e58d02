"""Kernels of this package as a process would see them that interprets them, or has a GPU."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

__all__ = ["compiled", "load_kernels", "resources"]

# Each after those that it imports.
_MODULES = (
    "kernel_arithmetic",
    "attention.turn_kernel",
    "attention.decode_kernel",
    "layers.step_kernels",
    "sampling.draw_kernels",
    "sampling.edit_kernel",
)


def load_kernels(patch: pytest.MonkeyPatch, *, is_interpreted: bool) -> dict[str, ModuleType]:
    """The modules, made anew: a kernel is what the variable says when it is defined."""
    patch.setenv("TRITON_INTERPRET", str(int(is_interpreted)))
    made = {}
    for name in _MODULES:
        path = f"pcomm.inference.{name}"
        found = importlib.util.find_spec(path)
        assert found is not None
        assert found.loader is not None
        module = made[name] = importlib.util.module_from_spec(found)
        patch.setitem(sys.modules, path, module)
        room, _, own = path.rpartition(".")
        # `from room import module` looks there first.
        patch.setattr(importlib.import_module(room), own, module, raising=False)
        found.loader.exec_module(module)
    return made


def compiled(launch: Any, capability: int) -> Any:
    """What a launch would compile for an architecture, 90 for Hopper."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.compiler import compile as compile_kernel
    from triton.runtime.jit import create_function_from_signature

    target, kernel = GPUTarget("cuda", capability, 32), launch.kernel
    backend = make_backend(target)
    arguments = dict(launch.arguments)
    given = {name: arguments.pop(name) for name in ("num_warps", "num_stages") if name in arguments}
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, _ = bind(**arguments)
    options, *source = kernel._pack_args(backend, given, bound, specialization, {})
    return compile_kernel(ASTSource(kernel, *source), target=target, options=vars(options))


def resources(kernel: Any) -> dict[str, int]:
    """Registers of a thread as REG; bytes of STACK and LOCAL, to which those go that do not fit."""
    from triton.backends.nvidia import __file__ as nvidia

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = Path(nvidia).parent / "bin" / "cuobjdump"
        command: list[str | Path] = [tool, "--dump-resource-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(number) for name, number in re.findall(r"\b([A-Z]+):(\d+)", told)}
