"""Which kernels run the cores: flash-linear-attention's on CUDA where it is installed, else ours.

The choice is an object that a layer makes, keeps and shows; nothing changes behind its back. The
way over flash-linear-attention follows version 0.6.0 and has not been run on hardware.
"""

# T tokens, N sequences, G key heads, H value heads, K key dim, V value dim

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from pcomm.core.errors import ConfigError, UnsupportedError, near_misses
from pcomm.gdn_cp.cores.gated_delta import chunk_gated_delta_rule
from pcomm.gdn_cp.cores.gated_delta_chunks import check_delta_inputs
from pcomm.gdn_cp.cores.packing import ChunkLayout

__all__ = ["Kernels", "choose_kernels"]

_WANTED = ("auto", "torch", "fla")


@dataclass(frozen=True)
class Kernels:
    """The kernels of a layer.

    Args:
        name: `torch` for the cores of this package, `fla` for flash-linear-attention.
        reason: Why, for `describe`.
    """

    name: Literal["torch", "fla"]
    reason: str

    def describe(self) -> str:
        """One line: what runs, and why."""
        return f"gated delta rule: {self.name} ({self.reason})"

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

        With `fla`, queries and keys are rounded to the dtype of the values.
        """
        tensors = (q_TGK, k_TGK, v_THV, g_TH, beta_TH)
        if self.name == "torch":
            return chunk_gated_delta_rule(
                *tensors, cu_seqlens=cu_seqlens, initial_state=initial_state
            )
        return _fla_gated_delta_rule(*tensors, cu_seqlens, initial_state)


def choose_kernels(device: torch.device, dtype: torch.dtype, *, wanted: str = "auto") -> Kernels:
    """The kernels for tensors of this dtype on this device.

    Args:
        device: Where the layer computes.
        dtype: Of its values.
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
    return "" if find_spec("fla") else "flash-linear-attention is not installed"


@lru_cache(maxsize=64)
def _offsets(cu_seqlens: tuple[int, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(cu_seqlens, device=device)


def _fla_gated_delta_rule(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_THV: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
    cu_seqlens: Sequence[int],
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    layout = ChunkLayout.of(cu_seqlens, 64)
    check_delta_inputs("Kernels", layout.cu_seqlens, k_TGK, v_THV, g_TH, beta_TH)
    if initial_state is None:
        shape = (layout.num_sequences, v_THV.shape[1], k_TGK.shape[2], v_THV.shape[2])
        initial_state = v_THV.new_zeros(shape, dtype=torch.float32)
    # Sequences without tokens never reach the kernels; their states go around them.
    filled = [n for n, length in enumerate(layout.lengths) if length]
    if not filled:
        return torch.zeros_like(v_THV), initial_state
    offsets = tuple(dict.fromkeys(layout.cu_seqlens))
    filled_N = _offsets(tuple(filled), v_THV.device)
    run: Callable[..., tuple[Tensor, Tensor]]
    run = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    inputs = (x.unsqueeze(0) for x in (q_TGK.to(v_THV), k_TGK.to(v_THV), v_THV, g_TH, beta_TH))
    output, final = run(
        *inputs,
        scale=1.0,
        initial_state=initial_state.index_select(0, filled_N),
        output_final_state=True,
        cu_seqlens=_offsets(offsets, v_THV.device),
        cu_seqlens_cpu=_offsets(offsets, torch.device("cpu")),
    )
    return output.squeeze(0), initial_state.index_copy(0, filled_N, final)
