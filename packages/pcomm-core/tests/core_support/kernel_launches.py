"""Launches of Triton kernels in tests: which are made, and what they compile to without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
    # Imported late: it imports Triton.
    from core_support.fake_driver import binary_resources

    return binary_resources(kernel.asm["cubin"])
