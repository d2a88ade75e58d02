"""A kernel with its grid and its arguments as one object.

So what is launched can be compiled where there is no GPU, and looked at.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from pcomm.core.errors import UnsupportedError

__all__ = ["Launch"]

# Triton's interpreter keeps in one place of the process which block of which grid it is in.
_interpreter = threading.Lock()


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

    def run(self) -> None:
        """Enqueue it on the current stream of its device; under the interpreter, do it.

        Raises:
            UnsupportedError: The interpreter runs a kernel of another thread.
        """
        on_cuda = self.device.type == "cuda"
        with torch.cuda.device(self.device) if on_cuda else _one_at_a_time():
            self.kernel[(self.num_blocks,)](
                **self.arguments, num_warps=self.num_warps, maxnreg=self.max_registers
            )


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    # Not waited for: two threads of each rank that take turns in different orders never end.
    if not _interpreter.acquire(blocking=False):
        raise UnsupportedError(
            "a kernel of pcomm.nvls on the CPU",
            found="another thread of this process runs one",
            why="Triton's interpreter runs one kernel of a process at a time.",
            fix="Call the operations of all workspaces from one thread, or use a GPU.",
        )
    try:
        yield
    finally:
        _interpreter.release()
