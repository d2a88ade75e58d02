"""Ranks that exist in one launch on one GPU: real memory ordering, without a second device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from pcomm.core.errors import ConfigError
from pcomm.core.memory.symmetric_memory import SymmetricMemory
from pcomm.nvls.collectives.call import VECTOR_BYTES, kind_of
from pcomm.nvls.collectives.fused_rmsnorm import row_threads
from pcomm.nvls.policy.table import MAX_BLOCKS
from pcomm.nvls.workspace.launch import Launch
from pcomm.nvls.workspace.memory import Regions
from pcomm.nvls.workspace.slots import SLOTS, SlotRing

__all__ = ["VirtualRanks"]

Operation = Literal["all_gather", "reduce_scatter", "one_shot", "two_shot"]
_EPOCHS = 1 + MAX_BLOCKS


class VirtualRanks:
    """The memory of all ranks, and the launches of their operations. Local.

    Args:
        size: Number of ranks; with their blocks at most as many as the device runs at once.
        max_bytes: Size of the largest whole tensor, in bytes.
        device: Device of the memory.
        timeout_s: Longest wait of a rank for another one, in seconds.
    """

    def __init__(
        self, size: int, max_bytes: int, *, device: torch.device, timeout_s: float = 10.0
    ) -> None:
        self.size, self.device, self._timeout_s = size, device, timeout_s
        self._regions, self._rotation = Regions(size, max_bytes, SLOTS), SlotRing(SLOTS)
        self._memories = SymmetricMemory.virtual(size, self._regions.num_bytes, device=device)
        for memory in self._memories:
            memory.buffer()[: self._regions.signal_bytes].zero_()
        self._epochs = torch.zeros(size * _EPOCHS, dtype=torch.int32, device=device)
        on_cuda = device.type == "cuda"
        self.failure = torch.zeros(1, dtype=torch.int32, pin_memory=on_cuda)

    def launch(
        self,
        operation: Operation,
        outs: Sequence[Tensor],
        xs: Sequence[Tensor],
        *,
        num_blocks: int = 4,
        num_warps: int = 16,
    ) -> Launch:
        """One operation of all ranks. Takes a turn.

        Args:
            operation: "all_gather", "reduce_scatter", "one_shot" or "two_shot" (all-reduces).
            outs: Result of each rank, dense.
            xs: Input of each rank, dense; of bf16, fp16 or fp32.
            num_blocks: Number of blocks of a rank.
            num_warps: Number of warps of a block.

        Raises:
            ConfigError: The device cannot run all blocks at once: they would wait for each other.
        """
        from nvls_support import virtual_kernels as kernels

        self._check_fits(num_blocks)
        turn = self._rotation.next(is_captured=False)
        arguments: dict[str, Any] = {
            **self._shared_arguments(turn.slot),
            "xs": self._table(xs),
            "outs": self._table(outs),
            "num_vectors": xs[0].nbytes // VECTOR_BYTES,
            "WORLD": self.size,
            "ENTRY": turn.needs_entry,
            "BLOCK": 32 * num_warps,
        }
        match operation:
            case "all_gather":
                kernel = kernels.virtual_all_gather_kernel
                arguments["row_vectors"] = arguments["num_vectors"]
            case "reduce_scatter":
                kernel = kernels.virtual_reduce_scatter_kernel
                arguments["num_vectors"] //= self.size
                arguments["row_vectors"] = arguments["num_vectors"]
                arguments["KIND"] = kind_of(xs[0].dtype)
            case "one_shot" | "two_shot":
                kernel = kernels.virtual_all_reduce_kernel
                arguments["KIND"] = kind_of(xs[0].dtype)
                arguments["SHOTS"] = 1 if operation == "one_shot" else 2
        return Launch(kernel, num_blocks, num_warps, arguments, self.device, (*outs, *xs))

    def launch_norm(
        self,
        out: Tensor,
        new_residual: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        *,
        num_blocks: int = 4,
    ) -> Launch:
        """The norm of each rank as a group of its own, whose addends are `addends` of it.

        Args:
            out: Memory for the normed rows of all ranks, `[size * rows, hidden]`, dense.
            new_residual: Memory for the sums of addends and residual, likewise.
            residual: Residual of all ranks, likewise; of bf16, fp16 or fp32.
            weight: Weight of the norm, `[hidden]`.
            eps: Number that is added to the mean square.
            num_blocks: Number of blocks of a rank.
        """
        from nvls_support.virtual_kernels import norm_alone_kernel

        hidden = residual.shape[1]
        threads = row_threads(hidden, residual.itemsize)
        assert threads is not None
        arguments = {
            **self._shared_arguments(0),
            "residual": residual.data_ptr(),
            "weight": weight.data_ptr(),
            "new_residual": new_residual.data_ptr(),
            "out": out.data_ptr(),
            "num_rows": len(residual) // self.size,
            "row_vectors": hidden * residual.itemsize // VECTOR_BYTES,
            "inverse_hidden": 1 / hidden,
            "eps": eps,
            "KIND": kind_of(residual.dtype),
            "BLOCK": threads.block,
        }
        tensors = (out, new_residual, residual, weight)
        warps, registers = threads.num_warps, threads.max_registers
        return Launch(
            norm_alone_kernel, num_blocks, warps, arguments, self.device, tensors, registers
        )

    def addends(self, rank: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory of a rank from which `launch_norm` reads. Local."""
        start, num_bytes = self._regions.slot(0), math.prod(shape) * dtype.itemsize
        raw = self._memories[rank].buffer()[start : start + num_bytes]
        return raw.view(dtype).view(tuple(shape))

    def run(self, launch: Launch) -> None:
        """Enqueue a launch of `launch` or `launch_norm` on the current stream."""
        grid = (launch.num_blocks, self.size)
        options = {"num_warps": launch.num_warps, "maxnreg": launch.max_registers}
        launch.kernel[grid](**launch.arguments, **options)

    def close(self) -> None:
        """Give the memory back."""
        for memory in self._memories:
            memory.close()

    def _shared_arguments(self, slot: int) -> dict[str, Any]:
        return {
            "buffers": self._memories[0].buffer_table,
            "epochs": self._epochs,
            "failure": self.failure.data_ptr(),
            "slot": self._regions.slot(slot),
            "limit_ns": int(self._timeout_s * 1e9),
            "EPOCHS": _EPOCHS,
        }

    def _table(self, tensors: Sequence[Tensor]) -> Tensor:
        addresses = [tensor.data_ptr() for tensor in tensors]
        return torch.tensor(addresses, dtype=torch.int64, device=self.device)

    def _check_fits(self, num_blocks: int) -> None:
        if self.device.type != "cuda":
            return
        found = torch.cuda.get_device_properties(self.device).multi_processor_count
        if num_blocks * self.size > found:
            raise ConfigError(
                f"VirtualRanks: {self.size} ranks of {num_blocks} blocks",
                found=f"{found} processors",
                why="A block waits for the same block of each rank, so all have to run at once.",
                fix="Use fewer ranks or blocks.",
            )
