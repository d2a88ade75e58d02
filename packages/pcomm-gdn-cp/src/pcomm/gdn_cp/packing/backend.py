"""Which code packs messages: Triton kernels on CUDA where Triton is installed, else torch.

The choice is an object that can be asked what it is and why; nothing changes behind its back. The
kernels are compared with torch under Triton's interpreter and have not been run on hardware.
"""

# t tokens of this rank, T of all, R ranks, W columns of a rank in all sections, C of a section

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from pcomm.core.errors import ConfigError, UnsupportedError, near_misses
from pcomm.gdn_cp.packing import torch_packing
from pcomm.gdn_cp.strategies.head_share import SectionShare

__all__ = ["Packing", "choose_packing"]

_WANTED = ("auto", "torch", "triton")
# The kernels move whole elements, of sizes that a GPU loads at once.
_DTYPES = (
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64),
    *(torch.int16, torch.int32, torch.int64),
)


@dataclass(frozen=True)
class Packing:
    """How sections and rows become the message of an all-to-all, and the other way round.

    Local, and not differentiable: each method is the gradient of another one. What is given may
    have any strides.

    Args:
        name: `torch`, the reference, or `triton`: one launch for all sections, which reads and
            writes every element once and adds without atomics, so always in the same order.
        reason: Why, for `describe`.
    """

    name: Literal["torch", "triton"]
    reason: str

    def describe(self) -> str:
        """One line: what packs, and why."""
        return f"packing: {self.name} ({self.reason})"

    def pack_sections(
        self, sections_tC: Sequence[Tensor], shares: Sequence[SectionShare], num_ranks: int
    ) -> Tensor:
        """`[R * t, W]`: for each rank in turn its heads of all sections, section by section.

        Args:
            sections_tC: `[t, C]` each, of one dtype and device.
            shares: How the heads of each are dealt out; those with copies go to several ranks.
            num_ranks: R.
        """
        if self.name == "torch":
            return torch_packing.pack_sections(sections_tC, shares, num_ranks)
        from pcomm.gdn_cp.packing import triton_packing

        return triton_packing.pack_sections(sections_tC, shares, num_ranks)

    def take_rows(self, parts: Sequence[Tensor], order_T: Tensor | None) -> Tensor:
        """`[T, W]`: the parts side by side; row i is row `order_T[i]` of each of them.

        Args:
            parts: `[T, columns]` each, of one dtype and device.
            order_T: int64, on the device of the parts; None for the rows as they are.
        """
        if self.name == "torch":
            return torch_packing.take_rows(parts, order_T)
        from pcomm.gdn_cp.packing import triton_packing

        return triton_packing.take_rows(parts, order_T)

    def unpack_sections(
        self, message_TW: Tensor, shares: Sequence[SectionShare], num_ranks: int
    ) -> tuple[Tensor, ...]:
        """`[t, C]` of each section, from the heads that every rank has sent.

        Copies of a head are added up, in fp32 where elements are shorter than that.

        Args:
            message_TW: `[R * t, W]`, as `pack_sections` makes it.
            shares: How the heads of each section were dealt out.
            num_ranks: R.
        """
        if self.name == "torch":
            return torch_packing.unpack_sections(message_TW, shares, num_ranks)
        from pcomm.gdn_cp.packing import triton_packing

        return triton_packing.unpack_sections(message_TW, shares, num_ranks)


def choose_packing(device: torch.device, dtype: torch.dtype, *, wanted: str = "auto") -> Packing:
    """How tensors of this dtype on this device are packed.

    Args:
        device: Where they are.
        dtype: Of all of them.
        wanted: `auto`, or `torch` or `triton` to have just this.

    Raises:
        ConfigError: `wanted` is none of these.
        UnsupportedError: `triton` is wanted and cannot run here.
    """
    if wanted not in _WANTED:
        raise ConfigError(
            f"choose_packing: wanted={wanted!r}",
            found="no such packing",
            why="Messages are packed by torch or by kernels of this package in Triton.",
            fix=near_misses(wanted, _WANTED),
        )
    if wanted == "torch":
        return Packing("torch", "asked for")
    obstacle = _obstacle(device, dtype)
    if wanted == "triton" and obstacle:
        raise UnsupportedError(
            "choose_packing: wanted='triton'",
            found=obstacle,
            why="The kernels run on CUDA and move elements of 2, 4 or 8 bytes.",
            fix="Install pcomm-gdn-cp[triton] and use tensors on a GPU, or use wanted='auto'.",
        )
    if obstacle:
        return Packing("torch", obstacle)
    return Packing("triton", "triton is installed")


def _obstacle(device: torch.device, dtype: torch.dtype) -> str:
    if device.type != "cuda":
        return f"tensors are on {device.type}"
    if dtype not in _DTYPES:
        return f"tensors are {dtype}"
    return "" if find_spec("triton") else "triton is not installed"
