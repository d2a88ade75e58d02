"""One token of the gated delta rule: a step of decoding."""

# N sequences, G key heads, H value heads, K key dim, V value dim

from __future__ import annotations

from torch import Tensor

from pcomm.gdn_cp.ops.precision import full_precision

__all__ = ["gated_delta_step"]


def gated_delta_step(
    state_NHKV: Tensor,
    q_NGK: Tensor,
    k_NGK: Tensor,
    v_NHV: Tensor,
    g_NH: Tensor,
    beta_NH: Tensor,
) -> tuple[Tensor, Tensor]:
    """One token of each of N sequences: what it reads, and the new states.

    Args:
        state_NHKV: `[N, H, K, V]`, fp32 or fp64; not changed.
        q_NGK: `[N, G, K]` queries, normalised and scaled.
        k_NGK: `[N, G, K]` keys, normalised.
        v_NHV: `[N, H, V]` values; `H` is a multiple of `G`.
        g_NH: `[N, H]` logarithm of the decay.
        beta_NH: `[N, H]`.

    Returns:
        `[N, H, V]` in the dtype of `v_NHV`, and `[N, H, K, V]`.
    """
    num_groups = k_NGK.shape[1]
    dtype = state_NHKV.dtype
    q, k = (x.to(dtype)[:, :, None, None] for x in (q_NGK, k_NGK))
    v, g, beta = (x.to(dtype).unflatten(1, (num_groups, -1)) for x in (v_NHV, g_NH, beta_NH))
    with full_precision(state_NHKV):
        state = state_NHKV.unflatten(1, (num_groups, -1)) * g.exp()[..., None, None]
        error = v.unsqueeze(-2) - k @ state
        state = state + k.mT * (beta[..., None, None] * error)
        read = (q @ state).squeeze(-2)
    return read.flatten(1, 2).to(v_NHV.dtype), state.flatten(1, 2)
