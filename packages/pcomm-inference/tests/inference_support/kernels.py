"""Kernels of this package in Triton's interpreter."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from core_support.interpreter import interpreted

__all__ = ["interpreted_kernels"]

# Each after those that it imports.
_MODULES = (
    "kernel_arithmetic",
    "attention.turn_kernel",
    "attention.decode_kernel",
    "layers.step_kernels",
    "sampling.cut_kernels",
    "sampling.draw_kernels",
    "sampling.edit_kernel",
)


@contextmanager
def interpreted_kernels() -> Iterator[dict[str, ModuleType]]:
    """Have the kernels interpreted on the CPU. Local.

    Yields:
        The modules by their names, without that of the package.
    """
    paths = {name: f"pcomm.inference.{name}" for name in _MODULES}
    with interpreted(list(paths.values())):
        yield {name: sys.modules[path] for name, path in paths.items()}
