"""A state that only decays and is added to, over the chunks of a pack: the scan of SSD.

S' = e^{c_C} S + sum over i of e^{c_C - c_i} k_i u_i^T, with c the logarithm of the decay since the
chunk's start. What each chunk adds is one batched product; what goes from step to step is a scaled
sum, and so is what comes back in backward.
"""

# N sequences by length, M chunks by step, C tokens of a chunk, G groups,
# R heads of a group, K state dim, V head dim

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pcomm.gdn_cp.ops.decayed_read import decay_to_end, side_by_side
from pcomm.gdn_cp.ops.precision import full_precision
from pcomm.gdn_cp.ops.recorded import apply

__all__ = ["decay_scan"]


def decay_scan(
    k_MGCK: Tensor,
    values_MGRCV: Tensor,
    decay_MGRC: Tensor,
    initial_NGKRV: Tensor,
    step_sizes: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """The state that enters each chunk, and the one after each sequence.

    Args:
        k_MGCK: `[M, G, C, K]`, what values are written under.
        values_MGRCV: `[M, G, R, C, V]`, zero where padded.
        decay_MGRC: `[M, G, R, C]` from `log_decay_since_start`.
        initial_NGKRV: `[N, G, K, R, V]`, the state before each sequence.
        step_sizes: Number of sequences that have a chunk at each step.

    Returns:
        `[M, G, K, R, V]` and `[N, G, K, R, V]`, differentiable once.
    """
    tensors = (k_MGCK, values_MGRCV, decay_MGRC, initial_NGKRV)
    states, final = apply(_DecayScan, *tensors, step_sizes)
    return states, final


class _DecayScan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        k: Tensor,
        values: Tensor,
        decay: Tensor,
        initial: Tensor,
        step_sizes: tuple[int, ...],
    ) -> tuple[Tensor, Tensor]:
        num_repeats, width = values.shape[2], values.shape[-1]
        to_end, whole = decay_to_end(decay)
        with full_precision(k):
            added = k.mT @ side_by_side(values, to_end)
        added = added.unflatten(-1, (num_repeats, width))
        states = torch.empty_like(added)
        state, finals, start = initial, [], 0
        for size in step_sizes:
            now = slice(start, start + size)
            finals.append(state[size:])
            states[now] = state[:size]
            state = torch.addcmul(added[now], states[now], whole[now])
            start += size
        ctx.save_for_backward(k, values, decay, states)
        ctx.step_sizes = step_sizes
        return states, torch.cat([state, *reversed(finals)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        k, values, decay, states = ctx.saved_tensors
        grad_states, grad_final = grads
        to_end, whole = decay_to_end(decay)
        grad_left = torch.empty_like(states)
        state, stop = grad_final[:0], len(states)
        for size in reversed(ctx.step_sizes):
            now = slice(stop - size, stop)
            grad_left[now] = torch.cat([state, grad_final[len(state) : size]])
            state = torch.addcmul(grad_states[now], grad_left[now], whole[now])
            stop -= size
        grad_initial = torch.cat([state, grad_final[len(state) :]])
        with full_precision(k):
            seen = (k @ grad_left.flatten(-2)).unflatten(-1, (-1, values.shape[-1]))
            grad_values = seen.transpose(2, 3) * to_end.unsqueeze(-1)
            grad_k = side_by_side(values, to_end) @ grad_left.flatten(-2).mT
        left = (grad_values * values).sum(-1)
        grad_decay = -left
        through = (grad_left * states).sum((2, 4)) * whole[:, :, 0, :, 0]
        grad_decay[..., -1] += left.sum(-1) + through
        return grad_k, grad_values, grad_decay, grad_initial, None
