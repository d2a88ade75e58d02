"""Which code packs messages: Triton kernels on CUDA where Triton is installed, else torch.

The choice is an object that can be asked what it is and why; nothing changes behind its back. The
kernels are compared with torch under Triton's interpreter and have not been run on hardware.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import torch

from pcomm.core.exchange.packing import Packing, TorchPacking
from pcomm.gdn_cp.backend_choice import reason_for_torch

__all__ = ["PackingChoice", "choose_packing"]

# The kernels move whole elements, of sizes that a GPU loads at once.
_DTYPES = (
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64),
    *(torch.int16, torch.int32, torch.int64),
)


@dataclass(frozen=True)
class PackingChoice:
    """Which code packs, and why.

    Args:
        name: `torch`, the reference, or `triton`: one launch for all sections, which reads and
            writes every element once and adds without atomics, so always in the same order.
        reason: Why it was chosen, for `describe`.
    """

    name: Literal["torch", "triton"]
    reason: str

    def describe(self) -> str:
        """One line: what packs, and why."""
        return f"packing: {self.name} ({self.reason})"

    @property
    def packing(self) -> Packing:
        """What an exchange takes as its `packing`."""
        if self.name == "torch":
            return TorchPacking()
        from pcomm.gdn_cp.packing.triton_packing import TritonPacking

        return TritonPacking()


def choose_packing(
    device: torch.device, dtype: torch.dtype, *, wanted: str = "auto"
) -> PackingChoice:
    """How tensors of this dtype on this device are packed.

    Args:
        device: Device of the tensors.
        dtype: Element type of the tensors.
        wanted: `auto`, or `torch` or `triton` to have just this.

    Raises:
        ConfigError: `wanted` is none of these.
        UnsupportedError: `triton` is wanted and cannot run here.
    """
    reason = reason_for_torch(
        "choose_packing",
        wanted,
        "triton",
        lambda: _obstacle(device, dtype),
        why="The kernels run on CUDA and move elements of 2, 4 or 8 bytes.",
        fix="Install pcomm-gdn-cp[triton] and use tensors on a GPU",
    )
    if reason:
        return PackingChoice("torch", reason)
    return PackingChoice("triton", "triton is installed")


def _obstacle(device: torch.device, dtype: torch.dtype) -> str:
    if device.type != "cuda":
        return f"tensors are on {device.type}"
    if dtype not in _DTYPES:
        return f"tensors are {dtype}"
    return "" if find_spec("triton") else "triton is not installed"
