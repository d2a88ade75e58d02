"""A kernel with its grid and its arguments as one object.

So what is launched can be compiled where there is no GPU, and looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Launch"]


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel, its grid and its arguments.

    Args:
        kernel: Triton kernel of `pcomm.nvls.kernels`.
        num_blocks: Number of thread blocks.
        num_warps: Number of warps of a block.
        arguments: Arguments of the kernel, by name.
        device: Device of the memory.
        tensors: Tensors whose addresses are among the arguments: they live until it has run.
        max_registers: Number of registers of a thread that the compiler may use; None for its own
            choice, which may put a few into local memory so that more blocks fit on a processor.
    """

    kernel: Any
    num_blocks: int
    num_warps: int
    arguments: dict[str, Any]
    device: torch.device
    tensors: tuple[torch.Tensor, ...] = ()
    max_registers: int | None = None
