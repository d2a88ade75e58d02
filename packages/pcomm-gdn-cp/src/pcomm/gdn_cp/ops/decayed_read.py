"""What queries read from a decaying state, chunk by chunk; the gated delta rule and SSD share it.

With the state that enters the chunk, S, and the values v_j that the chunk has written under keys
k_j, token i reads o_i = e^{c_i} S^T q_i + sum over j <= i of e^{c_i - c_j} (q_i k_j) v_j, where c
is the logarithm of the decay since the chunk began. Only differences c_i - c_j <= 0 are ever
exponentiated, and the others are masked before, so that nothing overflows in either direction.
"""

# M chunks, C tokens of a chunk, G key heads, R value heads for each key head,
# K key dim, V value dim

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pcomm.gdn_cp.ops.precision import full_precision
from pcomm.gdn_cp.ops.recorded import apply

__all__ = [
    "decay_to_end",
    "log_decay_since_start",
    "pairwise_decay",
    "read_chunks",
    "side_by_side",
]


def log_decay_since_start(g_MHC: Tensor, num_key_heads: int) -> Tensor:
    """The logarithm of the decay from the start of the chunk to each token, it included.

    Args:
        g_MHC: `[M, H, C]`, logarithm of each token's decay, at most 0; zero where padded.
        num_key_heads: `G`, which divides `H`.

    Returns:
        `[M, G, R, C]`. A decay that the dtype cannot tell from 0 counts as its smallest number,
        so that minus infinity is allowed and large values cost the others no digits.
    """
    kind = torch.finfo(g_MHC.dtype)
    least = math.log(kind.smallest_normal * kind.eps)
    num_chunks, num_heads, chunk = g_MHC.shape
    decay_MHC = g_MHC.clamp(min=least).cumsum(-1)
    return decay_MHC.view(num_chunks, num_key_heads, num_heads // num_key_heads, chunk)


def decay_to_end(decay_MGRC: Tensor) -> tuple[Tensor, Tensor]:
    """`[M, G, R, C]` from each token to the end of its chunk, `[M, G, 1, R, 1]` of whole chunks."""
    to_end = (decay_MGRC[..., -1:] - decay_MGRC).exp()
    return to_end, decay_MGRC[:, :, None, :, -1:].exp()


def pairwise_decay(decay_MGRC: Tensor) -> Tensor:
    """`[M, G, R, C, C]`: the decay from token j to token i, zero where j comes after i.

    A constant for autograd: the functions that use it know its gradient.
    """
    decay, chunk = decay_MGRC.detach(), decay_MGRC.shape[-1]
    later_CC = torch.ones(chunk, chunk, dtype=torch.bool, device=decay.device).triu(1)
    log_MGRCC = decay[..., :, None] - decay[..., None, :]
    return log_MGRCC.masked_fill_(later_CC, -torch.inf).exp_()


def read_chunks(
    q_MGCK: Tensor,
    k_MGCK: Tensor,
    values_MGRCV: Tensor,
    states_MGKRV: Tensor,
    decay_MGRC: Tensor,
    pairwise_MGRCC: Tensor,
) -> Tensor:
    """What each token reads from the state after its own write.

    Args:
        q_MGCK: `[M, G, C, K]` queries, scaled.
        k_MGCK: `[M, G, C, K]` keys.
        values_MGRCV: `[M, G, R, C, V]`, what each token wrote under its key.
        states_MGKRV: `[M, G, K, R, V]`, the state that enters each chunk.
        decay_MGRC: `[M, G, R, C]` from `log_decay_since_start`.
        pairwise_MGRCC: `pairwise_decay` of it.

    Returns:
        `[M, G, R, C, V]`, differentiable once in everything but `pairwise_MGRCC`.
    """
    tensors = (q_MGCK, k_MGCK, values_MGRCV, states_MGKRV, decay_MGRC, pairwise_MGRCC)
    read: Tensor = apply(_ReadChunks, *tensors)
    return read


class _ReadChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, values: Tensor, states: Tensor, decay: Tensor, pairs: Tensor
    ) -> Tensor:
        with full_precision(q):
            scores = (q @ k.mT).unsqueeze(2) * pairs
            read = scores @ values
            wide = (q @ states.flatten(-2)).unflatten(-1, states.shape[-2:])
            read.addcmul_(wide.transpose(2, 3), decay.exp().unsqueeze(-1))
        ctx.save_for_backward(q, k, values, states, decay, pairs, read)
        return read

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, values, states, decay, pairs, read = ctx.saved_tensors
        (grad,) = grads
        with full_precision(q):
            scores = (q @ k.mT).unsqueeze(2) * pairs
            grad_values = scores.mT @ grad
            # A decay scales rows of what is read and columns of what is written, so its gradient
            # is a difference of two inner products (as in arXiv 2312.06635).
            grad_decay = (grad * read).sum(-1) - (grad_values * values).sum(-1)
            grad_pairs = (grad @ values.mT).mul_(pairs).sum(2)
            decayed = side_by_side(grad, decay.exp())
            grad_q = grad_pairs @ k
            grad_q += decayed @ states.flatten(-2).mT
            grad_k = grad_pairs.mT @ q
            grad_states = (q.mT @ decayed).view_as(states)
        return grad_q, grad_k, grad_values, grad_states, grad_decay, None


def side_by_side(x_MGRCV: Tensor, factor_MGRC: Tensor) -> Tensor:
    """`[M, G, C, R V]`: `x` times `factor`, the value heads of a key head beside each other.

    So one product with the keys serves all of them, and the keys need no copies.
    """
    num_chunks, num_groups, num_repeats, chunk, width = x_MGRCV.shape
    wide = x_MGRCV.new_empty(num_chunks, num_groups, chunk, num_repeats, width)
    torch.mul(x_MGRCV.transpose(2, 3), factor_MGRC.transpose(2, 3).unsqueeze(-1), out=wide)
    return wide.flatten(-2)
