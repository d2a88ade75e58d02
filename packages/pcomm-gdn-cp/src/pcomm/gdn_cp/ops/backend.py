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

from pcomm.core.errors import UnsupportedError
from pcomm.gdn_cp.backend_choice import reason_for_torch
from pcomm.gdn_cp.graph_breaks import outside_graphs
from pcomm.gdn_cp.ops.flash_linear_attention import run_on_pack
from pcomm.gdn_cp.ops.gated_delta_rule.chunk import check_delta_inputs, chunk_gated_delta_rule
from pcomm.gdn_cp.ops.input_checks import check_shape
from pcomm.gdn_cp.ops.mamba2_ssd.chunk import check_ssd_inputs, chunk_mamba2_ssd, time_steps
from pcomm.gdn_cp.ops.pack_offsets import PackOffsets

__all__ = ["Kernels", "choose_kernels"]

# Its kernels carry the state of the delta rule in so many blocks of 64 rows.
_MOST_DELTA_KEY_DIM = 256


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

    @outside_graphs
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

        With `fla` it is the operation of the same name: queries and keys are rounded to the dtype
        of the values, products are in that dtype, or in TF32 for fp32, and states are in fp32. Key
        heads of more than 256 raise an UnsupportedError.
        """
        tensors = (q_TGK, k_TGK, v_THV, g_TH, beta_TH)
        if self.name == "torch":
            return chunk_gated_delta_rule(
                *tensors, cu_seqlens=cu_seqlens, initial_state=initial_state
            )
        offsets, key_dim = PackOffsets.of(cu_seqlens), k_TGK.shape[-1]
        check_delta_inputs("Kernels", offsets, k_TGK, v_THV, g_TH, beta_TH)
        check_shape("Kernels: q", q_TGK, tuple(k_TGK.shape))
        if key_dim > _MOST_DELTA_KEY_DIM:
            raise UnsupportedError(
                "Kernels.chunk_gated_delta_rule by flash-linear-attention",
                found=f"key heads of {key_dim}",
                why=f"Its kernels hold a state of at most {_MOST_DELTA_KEY_DIM} rows.",
                fix="Use choose_kernels(..., wanted='torch').",
            )
        run = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        tensors = (q_TGK.to(v_THV), k_TGK.to(v_THV), v_THV, g_TH.float(), beta_TH.float())
        return run_on_pack(run, tensors, offsets, initial_state)

    @outside_graphs
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

        With `fla` it is `chunk_simple_gla`, which has one decay a head and no correction: c are its
        queries, b its keys, dt x its values and A dt its gates. It knows no groups, so b and c are
        repeated for the heads of each. All three are rounded to the dtype of the inputs; products
        are in that dtype, or in TF32 for fp32, and states are in fp32.
        """
        if self.name == "torch":
            return chunk_mamba2_ssd(
                *(x_THP, dt_TH, a_log_H, b_TGS, c_TGS),
                d_H=d_H,
                dt_bias_H=dt_bias_H,
                cu_seqlens=cu_seqlens,
                initial_state=initial_state,
            )
        offsets, num_heads = PackOffsets.of(cu_seqlens), x_THP.shape[1]
        check_ssd_inputs("Kernels", offsets, x_THP, dt_TH, a_log_H, b_TGS, dt_bias_H)
        check_shape("Kernels: c", c_TGS, tuple(b_TGS.shape))
        if d_H is not None:
            check_shape("Kernels: d", d_H, (num_heads,))
        time_TH = time_steps(dt_TH, dt_bias_H, torch.float32)
        g_TH = -a_log_H.float().exp() * time_TH
        values_THP = (x_THP.float() * time_TH.unsqueeze(-1)).to(x_THP.dtype)
        repeats = num_heads // b_TGS.shape[1]
        c_THS, b_THS = (x.to(x_THP).repeat_interleave(repeats, 1) for x in (c_TGS, b_TGS))
        run = import_module("fla.ops.simple_gla").chunk_simple_gla
        y_THP, final = run_on_pack(run, (c_THS, b_THS, values_THP, g_TH), offsets, initial_state)
        if d_H is not None:
            skipped = torch.addcmul(y_THP.float(), x_THP.float(), d_H.float().unsqueeze(-1))
            y_THP = skipped.to(x_THP.dtype)
        return y_THP, final


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
    reason = reason_for_torch(
        "choose_kernels",
        wanted,
        "fla",
        lambda: _obstacle(device, dtype),
        why="Its kernels are written in Triton, for CUDA and for up to 32 bits.",
        fix="Install fla-core[cuda] and move the layer to a GPU",
    )
    if reason:
        return Kernels("torch", reason)
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
