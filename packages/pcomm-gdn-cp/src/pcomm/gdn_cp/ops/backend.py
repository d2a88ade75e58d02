"""Which kernels run the cores: flash-linear-attention's on CUDA where it is installed, else ours.

The choice is an object that a layer makes, keeps and shows; nothing changes behind its back.
"""

# T tokens, N sequences, G key heads or groups, H value heads, K key dim, V value dim,
# P head dim, S state dim

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from pcomm.core.errors import ConfigError, UnsupportedError, near_misses
from pcomm.gdn_cp.ops.flash_linear_attention import fla_gated_delta_rule, fla_mamba2_ssd
from pcomm.gdn_cp.ops.gated_delta_rule.chunk import chunk_gated_delta_rule
from pcomm.gdn_cp.ops.mamba2_ssd.chunk import chunk_mamba2_ssd

__all__ = ["Kernels", "choose_kernels"]

_WANTED = ("auto", "torch", "fla")


@dataclass(frozen=True)
class Kernels:
    """The kernels of a layer.

    Args:
        name: `torch` for the cores of this package, `fla` for flash-linear-attention.
        reason: Reason for the choice, for `describe`.
    """

    name: Literal["torch", "fla"]
    reason: str

    def describe(self) -> str:
        """One line: what runs each core, and why."""
        delta, space = (
            ("fla chunk_gated_delta_rule", "fla chunk_simple_gla")
            if self.name == "fla"
            else ("torch", "torch")
        )
        return f"gated delta rule: {delta}, state space: {space} ({self.reason})"

    def chunk_gated_delta_rule(
        self,
        q_TGK: Tensor,
        k_TGK: Tensor,
        v_THV: Tensor,
        g_TH: Tensor,
        beta_TH: Tensor,
        *,
        cu_seqlens: Sequence[int],
        initial_state: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`chunk_gated_delta_rule` by these kernels; arguments, results and errors are the same.

        With `fla`, queries and keys are rounded to the dtype of the values, and key heads of more
        than 256 raise an UnsupportedError.
        """
        run = fla_gated_delta_rule if self.name == "fla" else chunk_gated_delta_rule
        tensors = (q_TGK, k_TGK, v_THV, g_TH, beta_TH)
        return run(*tensors, cu_seqlens=cu_seqlens, initial_state=initial_state)

    def chunk_mamba2_ssd(
        self,
        x_THP: Tensor,
        dt_TH: Tensor,
        a_log_H: Tensor,
        b_TGS: Tensor,
        c_TGS: Tensor,
        *,
        d_H: Tensor | None = None,
        dt_bias_H: Tensor,
        cu_seqlens: Sequence[int],
        initial_state: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`chunk_mamba2_ssd` by these kernels; arguments, results and errors are the same.

        With `fla`, b, c and the product of dt and x are rounded to the dtype of the inputs.
        """
        run = fla_mamba2_ssd if self.name == "fla" else chunk_mamba2_ssd
        return run(
            *(x_THP, dt_TH, a_log_H, b_TGS, c_TGS),
            d_H=d_H,
            dt_bias_H=dt_bias_H,
            cu_seqlens=cu_seqlens,
            initial_state=initial_state,
        )


def choose_kernels(device: torch.device, dtype: torch.dtype, *, wanted: str = "auto") -> Kernels:
    """The kernels for tensors of this dtype on this device.

    Args:
        device: Device of the layer.
        dtype: Dtype of its values.
        wanted: `auto`, or `torch` or `fla` to have just these.

    Raises:
        ConfigError: `wanted` is none of these.
        UnsupportedError: `fla` is wanted and cannot run here.
    """
    if wanted not in _WANTED:
        raise ConfigError(
            f"choose_kernels: wanted={wanted!r}",
            found="no such kernels",
            why="The cores run on the kernels of this package or of flash-linear-attention.",
            fix=near_misses(wanted, _WANTED),
        )
    if wanted == "torch":
        return Kernels("torch", "asked for")
    obstacle = _obstacle(device, dtype)
    if wanted == "fla" and obstacle:
        raise UnsupportedError(
            "choose_kernels: wanted='fla'",
            found=obstacle,
            why="Its kernels are written in Triton, for CUDA and for up to 32 bits.",
            fix="Install fla-core[cuda] and move the layer to a GPU, or use wanted='auto'.",
        )
    if obstacle:
        return Kernels("torch", obstacle)
    return Kernels("fla", f"installed, and values are {dtype} on {device.type}")


def _obstacle(device: torch.device, dtype: torch.dtype) -> str:
    if device.type != "cuda":
        return f"tensors are on {device.type}"
    if dtype == torch.float64:
        return "values are torch.float64"
    if not find_spec("fla"):
        return "flash-linear-attention is not installed"
    return _triton_obstacle(device)


def _triton_obstacle(device: torch.device) -> str:
    """Why its kernels would refuse their backward with this Triton, or an empty string.

    Source:
        `chunk_bwd_dqkwg` of fla-core 0.6.0, which names its issue 640; with tilelang it has another
        way.
    """
    if find_spec("tilelang"):
        return ""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability(device)[0] != 9:
        return ""
    found = str(import_module("triton").__version__)
    numbers = tuple(int(number) for number in re.findall(r"\d+", found)[:3])
    if (3, 4) <= numbers < (3, 7, 1):
        return f"triton {found} is wrong on Hopper for flash-linear-attention, from 3.4 up to 3.7.1"
    return ""
