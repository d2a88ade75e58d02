"""A launch of a Triton kernel as an object of plain arguments.

So the same launch can be made under Triton's interpreter, compiled where there is no GPU, and
looked at. The features' kernels are launched by it, but for those of pcomm-nvls, which needs none
of Triton's host code in a call. This file does not import Triton.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["KernelLaunch"]


@dataclass(frozen=True)
class KernelLaunch:
    """A kernel, its grid and its arguments.

    Args:
        kernel: Function that `triton.jit` made.
        grid: Number of programs along each dimension.
        arguments: Arguments of the kernel by name; options of the compilation may be among them.
        device: Device of the tensors.
        options: Further options of the compilation, such as `num_warps`.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    device: torch.device
    options: dict[str, int] = field(default_factory=dict)

    def run(self) -> None:
        """Enqueue it on the current stream of its device; nothing where there is nothing to do."""
        if 0 in self.grid:
            return
        on_cuda = self.device.type == "cuda"
        with torch.cuda.device(self.device) if on_cuda else contextlib.nullcontext():
            self.kernel[self.grid](**self.arguments, **self.options)
