"""The delta rule over the chunks of a pack: what each token writes, and the states in between.

In a chunk that the state S enters, with c the logarithm of the decay since its start:
  r_i = v_i - e^{c_i} S^T k_i                                 what the state does not know yet,
  (1 + A) u = beta r,  A_ij = beta_i e^{c_i - c_j} k_i k_j    for j < i: what is written,
  S' = e^{c_C} S + sum over i of e^{c_C - c_i} k_i u_i^T      the state that leaves it.
The inverse of 1 + A is computed for all chunks at once; the rest goes from step to step, for all
sequences that have a chunk left. Backward is the transposed chain, with everything that need not
wait for it in batched products afterwards; A itself is never stored.

Source: the WY form of arXiv 2412.06464, with beta and the decay moved out of the triangular solve.
"""

# N sequences by length, M chunks by step, C tokens of a chunk, G key heads,
# R value heads for each key head, K key dim, V value dim

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pcomm.gdn_cp.cores.decayed_read import side_by_side
from pcomm.gdn_cp.cores.precision import full_precision

__all__ = ["DeltaScan", "chunk_inverse", "delta_scan"]


class DeltaScan(NamedTuple):
    """What `delta_scan` finds.

    Args:
        values_MGRCV: `[M, G, R, C, V]`, what each token writes under its key.
        states_MGKRV: `[M, G, K, R, V]`, the state that enters each chunk.
        final_NGKRV: `[N, G, K, R, V]`, the state after each sequence.
    """

    values_MGRCV: Tensor
    states_MGKRV: Tensor
    final_NGKRV: Tensor


@torch.no_grad()
def chunk_inverse(k_MGCK: Tensor, beta_MGRC: Tensor, pairwise_MGRCC: Tensor) -> Tensor:
    """`[M, G, R, C, C]`: the inverse of 1 + A of every chunk, a constant for autograd."""
    with full_precision(k_MGCK):
        system = (k_MGCK @ k_MGCK.mT).unsqueeze(2) * pairwise_MGRCC
        system *= beta_MGRC.unsqueeze(-1)
        # The solver reads only what lies under the diagonal, and takes ones for the diagonal.
        one = torch.eye(system.shape[-1], dtype=system.dtype, device=system.device)
        return torch.linalg.solve_triangular(system, one, upper=False, unitriangular=True)


def delta_scan(
    k_MGCK: Tensor,
    v_MGRCV: Tensor,
    beta_MGRC: Tensor,
    decay_MGRC: Tensor,
    initial_NGKRV: Tensor,
    pairwise_MGRCC: Tensor,
    inverse_MGRCC: Tensor,
    step_sizes: tuple[int, ...],
) -> DeltaScan:
    """Run the delta rule through the chunks of all sequences.

    Args:
        k_MGCK: `[M, G, C, K]` keys, normalised.
        v_MGRCV: `[M, G, R, C, V]` values.
        beta_MGRC: `[M, G, R, C]` how much of the error a token corrects; zero where padded.
        decay_MGRC: `[M, G, R, C]` from `log_decay_since_start`.
        initial_NGKRV: `[N, G, K, R, V]`, the state before each sequence.
        pairwise_MGRCC: `pairwise_decay` of the decay.
        inverse_MGRCC: `chunk_inverse` of the keys, beta and that.
        step_sizes: How many sequences have a chunk at each step.

    Returns:
        Everything in the dtype of `v`; differentiable once in keys, values, beta, decay and
        initial state. The gradient covers what the two constants owe to them.
    """
    tensors = (k_MGCK, v_MGRCV, beta_MGRC, decay_MGRC, initial_NGKRV)
    return DeltaScan(*_DeltaScan.apply(*tensors, pairwise_MGRCC, inverse_MGRCC, step_sizes))


class _DeltaScan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        decay: Tensor,
        initial: Tensor,
        pairs: Tensor,
        inverse: Tensor,
        step_sizes: tuple[int, ...],
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_chunks, num_groups, num_repeats, chunk, width = v.shape
        key_dim = k.shape[-1]
        values, unknown = torch.empty_like(v), torch.empty_like(v)
        states = v.new_empty(num_chunks, num_groups, key_dim, num_repeats, width)
        kept, until_end, whole = _decays(decay)
        state, finals, start = initial.flatten(-2), [], 0
        with full_precision(v):
            for size in step_sizes:
                now = slice(start, start + size)
                finals.append(state[size:])
                state = state[:size]
                states[now] = state.view_as(states[now])
                known = (k[now] @ state).unflatten(-1, (num_repeats, width)).transpose(2, 3)
                torch.addcmul(v[now], known, kept[now], value=-1, out=unknown[now])
                values[now] = inverse[now] @ (unknown[now] * beta[now].unsqueeze(-1))
                state = (states[now] * whole[now]).flatten(-2)
                state += k[now].mT @ side_by_side(values[now], until_end[now])
                start += size
        final = torch.cat([state, *reversed(finals)]).view_as(initial)
        ctx.save_for_backward(k, v, beta, decay, pairs, inverse, values, unknown, states)
        ctx.step_sizes = step_sizes
        return values, states, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        k, v, beta, decay, pairs, inverse, values, unknown, states = ctx.saved_tensors
        with full_precision(v):
            return _backward(
                *grads, k, v, beta, decay, pairs, inverse, values, unknown, states, ctx.step_sizes
            )


def _decays(decay_MGRC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From the start to each token, from each token to the end, and over the whole chunk."""
    to_end = (decay_MGRC[..., -1:] - decay_MGRC).exp()
    whole_MG1R1 = decay_MGRC[:, :, None, :, -1:].exp()
    return decay_MGRC.exp().unsqueeze(-1), to_end, whole_MG1R1


def _backward(
    grad_values: Tensor,
    grad_states: Tensor,
    grad_final: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor,
    pairs: Tensor,
    inverse: Tensor,
    values: Tensor,
    unknown: Tensor,
    states: Tensor,
    step_sizes: tuple[int, ...],
) -> tuple[Tensor | None, ...]:
    num_repeats, chunk, width = v.shape[2:]
    kept, until_end, whole = _decays(decay)
    # Gradients of: what is written, the right-hand side, what was known, the state that leaves.
    grad_written, grad_right = torch.empty_like(v), torch.empty_like(v)
    grad_known = v.new_empty(*k.shape[:-1], num_repeats * width)
    grad_left = torch.empty_like(states)
    minus_kept_beta = -kept.squeeze(-1) * beta
    grad_final = grad_final.flatten(-2)
    state, stop = grad_final[:0], len(k)
    for size in reversed(step_sizes):
        now = slice(stop - size, stop)
        state = torch.cat([state, grad_final[len(state) : size]])
        grad_left[now] = state.view_as(grad_left[now])
        seen = (k[now] @ state).unflatten(-1, (num_repeats, width)).transpose(2, 3)
        torch.addcmul(
            grad_values[now], seen, until_end[now].unsqueeze(-1), out=grad_written[now]
        )
        grad_right[now] = inverse[now].mT @ grad_written[now]
        grad_known[now] = side_by_side(grad_right[now], minus_kept_beta[now])
        state = torch.addcmul(grad_states[now], grad_left[now], whole[now]).flatten(-2)
        state += k[now].mT @ grad_known[now]
        stop -= size
    grad_initial = torch.cat([state, grad_final[len(state) :]])

    grad_v = grad_right * beta.unsqueeze(-1)
    # dA = -grad_right values^T below the diagonal; by rows it is what beta and the decay need.
    grad_system = (grad_right @ values.mT).mul_(pairs).neg_().tril_(-1)
    grad_beta = (grad_right * unknown).sum(-1)
    by_row = (grad_system * (k @ k.mT).unsqueeze(2)).sum(-1)
    grad_beta += by_row
    grad_keys = (grad_system * beta.unsqueeze(-1)).sum(2)
    grad_k = (grad_keys + grad_keys.mT) @ k
    grad_k += grad_known @ states.flatten(-2).mT
    grad_k += side_by_side(values, until_end) @ grad_left.flatten(-2).mT

    left = ((grad_written - grad_values) * values).sum(-1)
    grad_decay = by_row * beta + ((grad_written - grad_right) * values).sum(-1)
    grad_decay -= (grad_v * (v - unknown)).sum(-1) + left
    through = (grad_left * states).sum((2, 4)) * whole[:, :, 0, :, 0]
    grad_decay[..., -1] += left.sum(-1) + through
    return (
        grad_k,
        grad_v,
        grad_beta,
        grad_decay,
        grad_initial.view(len(grad_initial), *states.shape[1:]),
        None,
        None,
        None,
    )
