"""Who runs what: flash-linear-attention, kernels of this package or torch; and what packs messages.

Faster code is taken on CUDA where it is installed. The choice is an object that its user makes,
keeps and shows; nothing changes behind its back. The Triton kernels of this package are compared
with torch under Triton's interpreter, and neither they nor the way over flash-linear-attention,
written after the sources of its version 0.6.0, have been run on hardware.
"""

# T tokens, N sequences, G key heads or groups, H value heads, K key dim, V value dim,
# P head dim, S state dim

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from pcomm.core.errors import ConfigError, UnsupportedError, near_misses
from pcomm.core.exchange.fast import Packing, TorchPacking
from pcomm.gdn_cp.ops.causal_conv1d import causal_convolution, check_convolution
from pcomm.gdn_cp.ops.entry import check_shape, graph_break
from pcomm.gdn_cp.ops.gated_delta_rule import DeltaChunks, check_delta_inputs, delta_gates
from pcomm.gdn_cp.ops.mamba2_ssd import SsdChunks, check_ssd_inputs, time_steps
from pcomm.gdn_cp.ops.norms import (
    check_groups,
    gate_then_rms_norm,
    normalise_queries_keys,
    rms_norm_then_gate,
)
from pcomm.gdn_cp.pack_offsets import PackOffsets

if TYPE_CHECKING:
    # It imports Triton.
    from pcomm.gdn_cp.ops.kernels.triton_recurrences import TritonChunks

__all__ = [
    "Kernels",
    "PackingChoice",
    "choose_kernels",
    "choose_packing",
    "filled_sequences",
]


# Kernels carry a state in so many blocks of 64 rows: those of fla for the delta rule, and ours, of
# which more would not fit in Blackwell's tensor memory.
_MOST_KEY_DIM = 256
# Those that pack move whole elements, of sizes that a GPU loads at once.
_PACKED_DTYPES = (
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64),
    *(torch.int16, torch.int32, torch.int64),
)


@dataclass(frozen=True)
class Kernels:
    """The kernels of a layer.

    Args:
        name: `torch` for the cores of this package in torch, `triton` for its kernels, `fla` for
            flash-linear-attention's cores with the kernels of this package around them.
        reason: Reason for the choice, for `describe`.
    """

    name: Literal["torch", "triton", "fla"]
    reason: str

    def describe(self) -> str:
        """One line: what runs each core, and why."""
        delta, space = (
            ("fla chunk_gated_delta_rule", "fla chunk_simple_gla")
            if self.name == "fla"
            else (self.name, self.name)
        )
        return f"gated delta rule: {delta}, state space: {space} ({self.reason})"

    @graph_break
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

        With `triton` it computes in fp32 as `torch` does, and products are as exact as torch is set
        to have them. With `fla` it is the operation of the same name: queries and keys are rounded
        to the dtype of the values, products are in that dtype, or in TF32 for fp32, and states are
        in fp32. Key heads of more than 256 raise an UnsupportedError.
        """
        tensors = (q_TGK, k_TGK, v_THV, g_TH, beta_TH)
        if self.name != "fla":
            chunks = self.delta_chunks(*tensors[1:], cu_seqlens=cu_seqlens)
            return chunks.outputs(q_TGK, initial_state=initial_state)
        offsets, key_dim = PackOffsets.of(cu_seqlens), k_TGK.shape[-1]
        check_delta_inputs("Kernels", offsets, k_TGK, v_THV, g_TH, beta_TH)
        check_shape("Kernels: q", q_TGK, tuple(k_TGK.shape))
        if key_dim > _MOST_KEY_DIM:
            raise UnsupportedError(
                "Kernels.chunk_gated_delta_rule by flash-linear-attention",
                found=f"key heads of {key_dim}",
                why=f"Its kernels hold a state of at most {_MOST_KEY_DIM} rows.",
                fix="Use choose_kernels(..., wanted='torch').",
            )
        run = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        tensors = (q_TGK.to(v_THV), k_TGK.to(v_THV), v_THV, g_TH.float(), beta_TH.float())
        return _run_on_pack(run, tensors, offsets, initial_state)

    @graph_break
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

        With `triton` it computes in fp32 as `torch` does, and products are as exact as torch is set
        to have them. With `fla` it is `chunk_simple_gla`, which has one decay a head and no
        correction: c are its queries, b its keys, dt x its values and A dt its gates. It knows no
        groups, so b and c are repeated for the heads of each. All three are rounded to the dtype of
        the inputs; products
        are in that dtype, or in TF32 for fp32, and states are in fp32.
        """
        if self.name != "fla":
            chunks = self.ssd_chunks(
                x_THP, dt_TH, a_log_H, b_TGS, dt_bias_H=dt_bias_H, cu_seqlens=cu_seqlens
            )
            return chunks.outputs(c_TGS, d_H=d_H, initial_state=initial_state)
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
        y_THP, final = _run_on_pack(run, (c_THS, b_THS, values_THP, g_TH), offsets, initial_state)
        if d_H is not None:
            skipped = torch.addcmul(y_THP.float(), x_THP.float(), d_H.float().unsqueeze(-1))
            y_THP = skipped.to(x_THP.dtype)
        return y_THP, final

    # -- the work inside chunks, for a summary and for outputs -------------------------------

    @graph_break
    def delta_chunks(
        self,
        k_TGK: Tensor,
        v_THV: Tensor,
        g_TH: Tensor,
        beta_TH: Tensor,
        *,
        cu_seqlens: Sequence[int],
    ) -> DeltaChunks | TritonChunks:
        """What `DeltaChunks.of` makes, with the methods `summary` and `outputs`; same arguments.

        No kernel of fla returns what a range of tokens does to a state, so with `fla` the kernels
        of this package run. Key heads of more than 256 are computed by torch.
        """
        offsets, tensors = PackOffsets.of(cu_seqlens), (k_TGK, v_THV, g_TH, beta_TH)
        if self._is_torch(offsets) or k_TGK.shape[-1] > _MOST_KEY_DIM:
            return DeltaChunks.of(*tensors, cu_seqlens=offsets)
        from pcomm.gdn_cp.ops.kernels import triton_recurrences

        return triton_recurrences.delta_chunks(*tensors, cu_seqlens=offsets)

    @graph_break
    def ssd_chunks(
        self,
        x_THP: Tensor,
        dt_TH: Tensor,
        a_log_H: Tensor,
        b_TGS: Tensor,
        *,
        dt_bias_H: Tensor,
        cu_seqlens: Sequence[int],
    ) -> SsdChunks | TritonChunks:
        """What `SsdChunks.of` makes, with `summary` and `outputs`; see `delta_chunks`."""
        offsets = PackOffsets.of(cu_seqlens)
        tensors = (x_THP, dt_TH, a_log_H, b_TGS)
        if self._is_torch(offsets) or b_TGS.shape[-1] > _MOST_KEY_DIM:
            return SsdChunks.of(*tensors, dt_bias_H=dt_bias_H, cu_seqlens=offsets)
        from pcomm.gdn_cp.ops.kernels import triton_recurrences

        return triton_recurrences.ssd_chunks(*tensors, dt_bias_H=dt_bias_H, cu_seqlens=offsets)

    # -- what is around the cores ------------------------------------------------------------

    @graph_break
    def convolve_sections(
        self,
        x_TD: Tensor,
        weight_DW: Tensor,
        sections: Sequence[tuple[int, int]],
        *,
        cu_seqlens: Sequence[int],
        bias_D: Tensor | None = None,
        initial_halo: Tensor | None = None,
        normalise: bool = False,
    ) -> tuple[Tensor, ...]:
        """`causal_convolution`, cut into its sections.

        Args:
            x_TD: `[T, D]` inputs, any strides.
            weight_DW: `[D, W]` filters; the last column meets the token itself.
            sections: Number of heads and their width of each section; side by side they are `D`.
            cu_seqlens: Offsets of the sequences, on the host; the last one is `T`.
            bias_D: `[D]`, or nothing.
            initial_halo: `[N, W - 1, D]`, the inputs before each sequence; zeros by default.
            normalise: True if the first two sections are queries and keys, for
                `normalise_queries_keys`.

        Returns:
            `[T, heads, width]` of each section, in the dtype of `x_TD`; queries and keys that are
            normalised in fp32, or fp64 for fp64.

        Raises:
            LayoutError: The offsets fall, or do not end at `T`.
            ConfigError: Weight, bias or halo of another shape.
        """
        offsets = PackOffsets.of(cu_seqlens)
        if self._is_torch(offsets):
            y_TD, _ = causal_convolution(
                x_TD, weight_DW, cu_seqlens=offsets, bias_D=bias_D, initial_halo=initial_halo
            )
            parts = y_TD.split([heads * width for heads, width in sections], -1)
            heads = [part.unflatten(-1, shape) for part, shape in zip(parts, sections, strict=True)]
            if normalise:
                heads[:2] = normalise_queries_keys(heads[0], heads[1])
            return tuple(heads)
        from pcomm.gdn_cp.ops.kernels.triton_convolution import Channels, convolved_sections

        check_convolution("convolve_sections", offsets, x_TD, weight_DW, bias_D, initial_halo)
        channels = [Channels(*shape) for shape in sections]
        if normalise:
            lengths = (sections[0][1] ** -0.5, 1.0)
            channels[:2] = [c._replace(length=n) for c, n in zip(channels, lengths, strict=False)]
        return convolved_sections(
            x_TD,
            weight_DW,
            channels,
            cu_seqlens=offsets,
            bias_D=bias_D,
            initial_halo=initial_halo,
        )

    def delta_gates(
        self, a_TH: Tensor, b_TH: Tensor, a_log_H: Tensor, dt_bias_H: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`delta_gates` by these kernels; arguments and results are the same."""
        if self.name == "torch" or not len(a_TH):
            return delta_gates(a_TH, b_TH, a_log_H, dt_bias_H)
        from pcomm.gdn_cp.ops.kernels import triton_gates

        return triton_gates.delta_gates(a_TH, b_TH, a_log_H, dt_bias_H)

    def rms_norm_then_gate(
        self, x: Tensor, gate: Tensor, weight_D: Tensor, *, eps: float = 1e-6
    ) -> Tensor:
        """`rms_norm_then_gate` by these kernels; arguments and results are the same."""
        if self.name == "torch" or not x.numel():
            return rms_norm_then_gate(x, gate, weight_D, eps=eps)
        from pcomm.gdn_cp.ops.kernels.triton_gates import gated_norm

        return gated_norm(x, gate, weight_D, num_groups=1, eps=eps, gate_first=False)

    def gate_then_rms_norm(
        self, x: Tensor, gate: Tensor, weight_F: Tensor, *, num_groups: int = 1, eps: float = 1e-6
    ) -> Tensor:
        """`gate_then_rms_norm` by these kernels; arguments, results and errors are the same."""
        if self.name == "torch" or not x.numel():
            return gate_then_rms_norm(x, gate, weight_F, num_groups=num_groups, eps=eps)
        from pcomm.gdn_cp.ops.kernels.triton_gates import gated_norm

        check_groups(x, num_groups)
        return gated_norm(x, gate, weight_F, num_groups=num_groups, eps=eps, gate_first=True)

    def _is_torch(self, offsets: PackOffsets) -> bool:
        """Whether torch computes; it also does where there are no tokens, and nothing to launch."""
        return self.name == "torch" or not offsets[-1]


def choose_kernels(device: torch.device, dtype: torch.dtype, *, wanted: str = "auto") -> Kernels:
    """The kernels for tensors of this dtype on this device.

    Args:
        device: Device of the layer.
        dtype: Dtype of its values.
        wanted: `auto` for the first of `fla`, `triton` and `torch` that can run, or one of these to
            have just it.

    Raises:
        ConfigError: `wanted` is none of these.
        UnsupportedError: `fla` or `triton` is wanted and cannot run here.
    """
    asked, needs = "choose_kernels", "Its kernels are written in Triton, for CUDA, up to 32 bits."
    if wanted == "triton":
        fix = "Install pcomm-gdn-cp[triton] and move the layer to a GPU"
        _reason_for_torch(
            asked, wanted, "triton", lambda: _own_obstacle(device, dtype), why=needs, fix=fix
        )
        return Kernels("triton", "asked for")
    fix = "Install fla-core[cuda] and move the layer to a GPU"
    reason = _reason_for_torch(
        *(asked, wanted, "fla"),
        lambda: _fla_obstacle(device, dtype),
        why=needs,
        fix=fix,
        others=("triton",),
    )
    if not reason:
        return Kernels("fla", f"installed, and values are {dtype} on {device.type}")
    if wanted == "torch" or _own_obstacle(device, dtype):
        return Kernels("torch", reason)
    return Kernels("triton", reason)


def _own_obstacle(device: torch.device, dtype: torch.dtype) -> str:
    """Why the kernels of this package do not run, or an empty string."""
    return _misfit(device, dtype) or ("" if find_spec("triton") else "triton is not installed")


def _misfit(device: torch.device, dtype: torch.dtype) -> str:
    if device.type != "cuda":
        return f"tensors are on {device.type}"
    return "values are torch.float64" if dtype == torch.float64 else ""


def _fla_obstacle(device: torch.device, dtype: torch.dtype) -> str:
    if found := _misfit(device, dtype):
        return found
    if not find_spec("fla"):
        return "flash-linear-attention is not installed"
    return _triton_obstacle(device)


def _triton_obstacle(device: torch.device) -> str:
    """Why fla would refuse its backward with this Triton, or an empty string.

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


def _run_on_pack(
    run: Callable[..., tuple[Tensor, Tensor]],
    tensors: tuple[Tensor, ...],
    offsets: PackOffsets,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """What an operation of fla returns for a pack; differentiable, also without tokens.

    Its `chunk_simple_gla` reads the number of chunks from the device, once forward and twice
    backward, so the host waits there; `chunk_gated_delta_rule` counts them on the host.

    Args:
        run: The operation.
        tensors: Queries, keys, `[T, H, K]`, values, `[T, H, V]`, and gates, as `run` takes them
            without the dimension of a batch; queries and keys may have fewer heads.
        offsets: Offsets of the sequences, which keep the index tensors.
        initial_state: `[N, H, K, V]`, the state before each sequence; zeros if None.

    Returns:
        `[T, H, V]`, and `[N, H, K, V]` in fp32.

    Raises:
        ConfigError: A state of another shape.
    """
    keys, values = tensors[1], tensors[2]
    shape = (len(offsets) - 1, values.shape[1], keys.shape[2], values.shape[2])
    if initial_state is None:
        initial_state = values.new_zeros(shape, dtype=torch.float32)
    check_shape("Kernels: initial_state", initial_state, shape)
    initial_state = initial_state.float()
    if not offsets[-1]:
        # Backward still passes here, on its way to collectives that every rank takes part in.
        nothing = sum(x.sum() for x in tensors)
        return values + nothing, initial_state + nothing
    # Sequences without tokens never reach the kernels; their states go around them.
    filled_N, cut, cut_on_host = offsets.derived(filled_sequences, values.device)
    output, final = run(
        *(x.unsqueeze(0) for x in tensors),
        scale=1.0,
        initial_state=initial_state.index_select(0, filled_N),
        output_final_state=True,
        cu_seqlens=cut,
        cu_seqlens_cpu=cut_on_host,
    )
    return output.squeeze(0), initial_state.index_copy(0, filled_N, final)


def filled_sequences(
    offsets: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Sequences with tokens, on `device`; and their offsets there and on the host.

    Kept by `PackOffsets.derived`, as the kernels find what they made of a tensor by its identity.
    """
    filled = [n for n, (a, b) in enumerate(pairwise(offsets)) if b > a]
    cut = torch.tensor([*dict.fromkeys(offsets)])
    return torch.tensor(filled, dtype=torch.int64).to(device), cut.to(device), cut


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
        from pcomm.gdn_cp.triton_packing import TritonPacking

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
    reason = _reason_for_torch(
        "choose_packing",
        wanted,
        "triton",
        lambda: _packing_obstacle(device, dtype),
        why="The kernels run on CUDA and move elements of 2, 4 or 8 bytes.",
        fix="Install pcomm-gdn-cp[triton] and use tensors on a GPU",
    )
    if reason:
        return PackingChoice("torch", reason)
    return PackingChoice("triton", "triton is installed")


def _packing_obstacle(device: torch.device, dtype: torch.dtype) -> str:
    if device.type != "cuda":
        return f"tensors are on {device.type}"
    if dtype not in _PACKED_DTYPES:
        return f"tensors are {dtype}"
    return "" if find_spec("triton") else "triton is not installed"


def _reason_for_torch(
    asked: str,
    wanted: str,
    name: str,
    obstacle: Callable[[], str],
    *,
    why: str,
    fix: str,
    others: Sequence[str] = (),
) -> str:
    """Reason why torch runs and not the code called `name`; empty if that code runs. Local.

    Args:
        asked: Name of the call, for errors.
        wanted: `auto` for the code called `name` where it can run, or `torch` or `name`.
        name: Name of the faster code.
        obstacle: Finds the reason why the faster code cannot run; empty if it can.
        why: Sentence on what the faster code needs, for the error.
        fix: Way to meet these needs, for the error.
        others: Names of other code, for the error.

    Raises:
        ConfigError: `wanted` is none of these.
        UnsupportedError: `name` is wanted and cannot run.
    """
    names = ("auto", "torch", name, *others)
    if wanted not in names:
        raise ConfigError(
            f"{asked}: wanted={wanted!r}",
            found="no such backend",
            why=f"Torch runs everywhere, {name} where it can.",
            fix=near_misses(wanted, names),
        )
    found = "asked for" if wanted == "torch" else obstacle()
    if found and wanted == name:
        raise UnsupportedError(
            f"{asked}: wanted={name!r}",
            found=found,
            why=why,
            fix=f"{fix}, or use wanted='auto'.",
        )
    return found
