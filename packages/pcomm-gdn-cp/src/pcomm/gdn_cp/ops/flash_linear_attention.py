"""The cores by the Triton kernels of flash-linear-attention, for packs on CUDA.

Written after the sources of version 0.6.0, and never run on hardware. Its `chunk_simple_gla` reads
the number of chunks from the device, once forward and twice backward, so the host waits there;
`chunk_gated_delta_rule` counts them on the host.
"""

# T tokens, N sequences, G key heads or groups, H value heads, K key dim, V value dim,
# P head dim, S state dim

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import pairwise

import torch
from torch import Tensor

from pcomm.core.errors import UnsupportedError
from pcomm.gdn_cp.graph_breaks import outside_graphs
from pcomm.gdn_cp.ops.gated_delta_rule.chunk import check_delta_inputs
from pcomm.gdn_cp.ops.input_checks import check_shape
from pcomm.gdn_cp.ops.mamba2_ssd.chunk import check_ssd_inputs, time_steps
from pcomm.gdn_cp.ops.pack_offsets import PackOffsets

__all__ = ["filled_sequences", "fla_gated_delta_rule", "fla_mamba2_ssd"]

Operation = Callable[..., tuple[Tensor, Tensor]]

# Its kernels carry the state of the delta rule in so many blocks of 64 rows.
_MOST_DELTA_KEY_DIM = 256


@outside_graphs
def fla_gated_delta_rule(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_THV: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
    *,
    cu_seqlens: Sequence[int],
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`chunk_gated_delta_rule` of this package, by the operation of the same name.

    Its products are in the dtype of the values, or in TF32 for fp32; states are in fp32.

    Args:
        q_TGK: `[T, G, K]` queries, normalised and scaled; rounded to the dtype of the values.
        k_TGK: `[T, G, K]` keys, normalised; likewise.
        v_THV: `[T, H, V]` values; `H` is a multiple of `G`.
        g_TH: `[T, H]` logarithm of the decay of each token, at most 0.
        beta_TH: `[T, H]` from 0 to 1.
        cu_seqlens: Offsets of the sequences, on the host; the last one is `T`.
        initial_state: `[N, H, K, V]`, the state before each sequence; zeros by default.

    Returns:
        `[T, H, V]` in the dtype of `v_THV`, and `[N, H, K, V]` in fp32.

    Raises:
        LayoutError: The offsets fall, or do not end at `T`.
        ConfigError: Shapes that do not fit.
        UnsupportedError: Key heads of more than 256.
    """
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
    run: Operation = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    tensors = (q_TGK.to(v_THV), k_TGK.to(v_THV), v_THV, g_TH.float(), beta_TH.float())
    return _run(run, tensors, offsets, initial_state)


@outside_graphs
def fla_mamba2_ssd(
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
    """`chunk_mamba2_ssd` of this package, by `chunk_simple_gla`.

    That operation has one decay a head and no correction: c are its queries, b its keys, dt x its
    values and A dt its gates. It knows no groups, so b and c are repeated for the heads of each.
    Its products are in the dtype of the inputs, or in TF32 for fp32; states are in fp32.

    Args:
        x_THP: `[T, H, P]` inputs; `H` is a multiple of `G`. dt x is rounded to their dtype.
        dt_TH: `[T, H]` time steps as projected: the bias and the softplus are applied here.
        a_log_H: `[H]` parameter, `A_log`.
        b_TGS: `[T, G, S]` input matrix of each token, rounded to the dtype of the inputs.
        c_TGS: `[T, G, S]` output matrix of each token, likewise.
        d_H: `[H]` weight of the input that skips the state, or nothing.
        dt_bias_H: `[H]` parameter.
        cu_seqlens: Offsets of the sequences, on the host; the last one is `T`.
        initial_state: `[N, H, S, P]`, the state before each sequence; zeros by default.

    Returns:
        `[T, H, P]` in the dtype of `x_THP`, and `[N, H, S, P]` in fp32.

    Raises:
        LayoutError: The offsets fall, or do not end at `T`.
        ConfigError: Shapes that do not fit.
    """
    offsets, num_heads = PackOffsets.of(cu_seqlens), x_THP.shape[1]
    parameters = (a_log_H, b_TGS, dt_bias_H)
    check_ssd_inputs("Kernels", offsets, x_THP, dt_TH, *parameters)
    check_shape("Kernels: c", c_TGS, tuple(b_TGS.shape))
    if d_H is not None:
        check_shape("Kernels: d", d_H, (num_heads,))
    time_TH = time_steps(dt_TH, dt_bias_H, torch.float32)
    g_TH = -a_log_H.float().exp() * time_TH
    values_THP = (x_THP.float() * time_TH.unsqueeze(-1)).to(x_THP.dtype)
    repeats = num_heads // b_TGS.shape[1]
    c_THS, b_THS = (x.to(x_THP).repeat_interleave(repeats, 1) for x in (c_TGS, b_TGS))
    run: Operation = import_module("fla.ops.simple_gla").chunk_simple_gla
    y_THP, final = _run(run, (c_THS, b_THS, values_THP, g_TH), offsets, initial_state)
    if d_H is not None:
        skipped = torch.addcmul(y_THP.float(), x_THP.float(), d_H.float().unsqueeze(-1))
        y_THP = skipped.to(x_THP.dtype)
    return y_THP, final


def filled_sequences(
    offsets: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Sequences with tokens, on `device`; and their offsets there and on the host.

    Kept by `PackOffsets.derived`, as the kernels find what they made of a tensor by its identity.
    """
    filled = [n for n, (a, b) in enumerate(pairwise(offsets)) if b > a]
    cut = torch.tensor([*dict.fromkeys(offsets)])
    return torch.tensor(filled, dtype=torch.int64).to(device), cut.to(device), cut


def _run(
    run: Operation,
    tensors: tuple[Tensor, ...],
    offsets: PackOffsets,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """An operation on the queries, keys, values and gates of a pack."""
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
