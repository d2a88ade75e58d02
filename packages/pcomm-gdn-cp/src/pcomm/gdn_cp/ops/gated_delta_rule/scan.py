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

from pcomm.gdn_cp.ops.decayed_read import decay_to_end, side_by_side
from pcomm.gdn_cp.ops.precision import full_precision
from pcomm.gdn_cp.ops.recorded import apply

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


def chunk_inverse(k_MGCK: Tensor, beta_MGRC: Tensor, pairwise_MGRCC: Tensor) -> Tensor:
    """`[M, G, R, C, C]`: the inverse of 1 + A of every chunk, a constant for autograd."""
    with torch.no_grad(), full_precision(k_MGCK):
        system = (k_MGCK @ k_MGCK.mT).unsqueeze(2) * pairwise_MGRCC
        system *= beta_MGRC.unsqueeze(-1)
        # The solver reads only what lies under the diagonal, and takes ones for the diagonal.
        one = torch.eye(system.shape[-1], dtype=system.dtype, device=system.device)
        inverse: Tensor = torch.linalg.solve_triangular(
            system, one, upper=False, unitriangular=True
        )
    return inverse


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
        step_sizes: Number of sequences that have a chunk at each step.

    Returns:
        Everything in the dtype of `v`; differentiable once in keys, values, beta, decay and
        initial state. The gradient covers what the two constants owe to them.
    """
    tensors = (k_MGCK, v_MGRCV, beta_MGRC, decay_MGRC, initial_NGKRV)
    constants = (pairwise_MGRCC, inverse_MGRCC, step_sizes)
    return DeltaScan(*apply(_DeltaScan, *tensors, *constants))


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
        num_chunks, num_groups, num_repeats, _, width = v.shape
        values, unknown = torch.empty_like(v), torch.empty_like(v)
        states = v.new_empty(num_chunks, num_groups, k.shape[-1], num_repeats, width)
        from_start, (to_end, whole) = decay.exp(), decay_to_end(decay)
        state, finals, start = initial, [], 0
        with full_precision(v):
            for size in step_sizes:
                now = slice(start, start + size)
                finals.append(state[size:])
                states[now] = state[:size]
                known = (k[now] @ states[now].flatten(-2)).unflatten(-1, (num_repeats, width))
                factor = from_start[now].unsqueeze(-1)
                torch.addcmul(v[now], known.transpose(2, 3), factor, value=-1, out=unknown[now])
                right = unknown[now] * beta[now].unsqueeze(-1)
                torch.matmul(inverse[now], right, out=values[now])
                state = states[now] * whole[now]
                state += (k[now].mT @ side_by_side(values[now], to_end[now])).view_as(state)
                start += size
        final = torch.cat([state, *reversed(finals)])
        ctx.save_for_backward(k, v, beta, decay, pairs, inverse, values, unknown, states)
        ctx.step_sizes = step_sizes
        return values, states, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kept, (grad_values, grad_states, grad_final) = _Kept(*ctx.saved_tensors), grads
        with full_precision(kept.v):
            back = _scan_back(kept, grad_values, grad_states, grad_final, ctx.step_sizes)
            return (*_collect(kept, back, grad_values), back.initial, None, None, None)


class _Kept(NamedTuple):
    """What forward keeps; `unknown` is r, and `states` those that enter the chunks."""

    k: Tensor
    v: Tensor
    beta: Tensor
    decay: Tensor
    pairs: Tensor
    inverse: Tensor
    values: Tensor
    unknown: Tensor
    states: Tensor


class _Back(NamedTuple):
    """Gradients of what is written, of beta r, of what was known, and of states."""

    written: Tensor
    right: Tensor
    known: Tensor
    left: Tensor
    initial: Tensor


def _scan_back(
    kept: _Kept,
    grad_values: Tensor,
    grad_states: Tensor,
    grad_final: Tensor,
    step_sizes: tuple[int, ...],
) -> _Back:
    """The transposed chain, from the last step to the first: all that has to wait."""
    k, num_repeats, width = kept.k, kept.v.shape[2], kept.v.shape[-1]
    to_end, whole = decay_to_end(kept.decay)
    known_factor = -kept.decay.exp() * kept.beta
    written, right = torch.empty_like(kept.v), torch.empty_like(kept.v)
    known = kept.v.new_empty(*k.shape[:-1], num_repeats * width)
    left = torch.empty_like(kept.states)
    state, stop = grad_final[:0], len(k)
    for size in reversed(step_sizes):
        now = slice(stop - size, stop)
        torch.cat([state, grad_final[len(state) : size]], out=left[now])
        seen = (k[now] @ left[now].flatten(-2)).unflatten(-1, (num_repeats, width))
        torch.addcmul(
            grad_values[now], seen.transpose(2, 3), to_end[now].unsqueeze(-1), out=written[now]
        )
        torch.matmul(kept.inverse[now].mT, written[now], out=right[now])
        known[now] = side_by_side(right[now], known_factor[now])
        state = torch.addcmul(grad_states[now], left[now], whole[now])
        state += (k[now].mT @ known[now]).view_as(state)
        stop -= size
    return _Back(written, right, known, left, torch.cat([state, grad_final[len(state) :]]))


def _collect(kept: _Kept, back: _Back, grad_values: Tensor) -> tuple[Tensor, ...]:
    """Gradients of keys, values, beta and decay, for all chunks at once."""
    k, beta, values = kept.k, kept.beta, kept.values
    to_end, whole = decay_to_end(kept.decay)
    grad_v = back.right * beta.unsqueeze(-1)
    # The gradient of A is minus right values^T, below the diagonal. Times A, its sum over a row
    # is what beta and the decay of that token get, and that over a column what the decay loses;
    # the latter follows from (1 + A)^T right = written without another product.
    grad_system = (back.right @ values.mT).mul_(kept.pairs).neg_().tril_(-1)
    by_row = (grad_system * (k @ k.mT).unsqueeze(2)).sum(-1)
    grad_beta = (back.right * kept.unknown).sum(-1) + by_row
    grad_keys = (grad_system * beta.unsqueeze(-1)).sum(2)
    grad_k = (grad_keys + grad_keys.mT) @ k
    grad_k += back.known @ kept.states.flatten(-2).mT
    grad_k += side_by_side(values, to_end) @ back.left.flatten(-2).mT

    at_end = ((back.written - grad_values) * values).sum(-1)
    grad_decay = by_row * beta + ((back.written - back.right) * values).sum(-1)
    grad_decay -= (grad_v * (kept.v - kept.unknown)).sum(-1) + at_end
    through = (back.left * kept.states).sum((2, 4)) * whole[:, :, 0, :, 0]
    grad_decay[..., -1] += at_end.sum(-1) + through
    return grad_k, grad_v, grad_beta, grad_decay
