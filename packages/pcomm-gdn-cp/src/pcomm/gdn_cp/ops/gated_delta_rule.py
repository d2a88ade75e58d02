"""The gated delta rule over packed sequences: the core of a Gated DeltaNet layer.

For each value head, with its key head's query q and key k, S is `[K, V]` and
  S <- e^g S;  u = beta (v - S^T k);  S <- S + k u^T;  o = S^T q.
`gated_delta_step` computes this as it stands; in the others chunks of tokens become matrix
products. What tokens write within a chunk does not depend on the state that enters it, up to one
product with the state. So a rank that first needs the summary of its tokens, and later, when the
state before them is known, their outputs, computes the chunks once.
"""

# T tokens, N sequences (by length in a scan), M chunks (by step), C tokens of a chunk, G key heads,
# H value heads, R value heads for each key head, K key dim, V value dim

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from pcomm.gdn_cp.ops.chunks import (
    ChunkLayout,
    decay_from_start,
    decay_to_end,
    default_chunk,
    from_chunks,
    gradient_of_decays,
    logs_of_decays,
    pairwise_decay,
    read_chunks,
    side_by_side,
    state_for_scan,
    state_to_pack_order,
    to_chunks,
)
from pcomm.gdn_cp.ops.entry import (
    apply_function,
    check_group,
    check_shape,
    check_tokens,
    compute_dtype,
    differentiable_once,
    full_precision,
    graph_break,
)

__all__ = [
    "DeltaChunks",
    "check_delta_inputs",
    "chunk_gated_delta_rule",
    "delta_gates",
    "delta_scan",
    "gated_delta_step",
]


def delta_gates(
    a_TH: Tensor, b_TH: Tensor, a_log_H: Tensor, dt_bias_H: Tensor
) -> tuple[Tensor, Tensor]:
    """The logarithm of each token's decay, and how much of its error it corrects.

    Args:
        a_TH: `[T, H]` projection, for the decay.
        b_TH: `[T, H]` projection, for beta.
        a_log_H: `[H]` parameter, `A_log`.
        dt_bias_H: `[H]` parameter.

    Returns:
        `-exp(a_log) softplus(a + dt_bias)` and `sigmoid(b)`, `[T, H]`, both in fp32 or fp64.
    """
    dtype = compute_dtype(a_TH)
    time_TH = F.softplus(a_TH.to(dtype) + dt_bias_H.to(dtype))
    return -a_log_H.to(dtype).exp() * time_TH, b_TH.to(dtype).sigmoid()


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


@graph_break
def chunk_gated_delta_rule(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_THV: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
    *,
    cu_seqlens: Sequence[int],
    initial_state: Tensor | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule on each sequence of the pack, in chunks.

    Choose it for training and prefill; `gated_delta_step` is for decoding. Queries and keys are
    used as they are: `normalise_queries_keys` prepares them as in Qwen3-Next. Computes in fp32, and
    in fp64 if the values are fp64, also under autocast. Differentiable once.

    Args:
        q_TGK: `[T, G, K]` queries, normalised and scaled.
        k_TGK: `[T, G, K]` keys, normalised.
        v_THV: `[T, H, V]` values; `H` is a multiple of `G`, and value head h belongs to key head
            h // (H / G).
        g_TH: `[T, H]` logarithm of the decay of each token, at most 0.
        beta_TH: `[T, H]` from 0 to 1.
        cu_seqlens: Offsets of the sequences, on the host; the last one is `T`.
        initial_state: `[N, H, K, V]`, the state before each sequence; zeros by default.
        chunk: Tokens of a chunk, `default_chunk` by default. Results differ by rounding.

    Returns:
        `[T, H, V]` in the dtype of `v_THV`, and the state after each sequence, `[N, H, K, V]`, in
        the dtype of the computation. An empty sequence hands its state on.

    Raises:
        LayoutError: The offsets fall, or do not end at `T`.
        ConfigError: Shapes that do not fit, or a chunk without tokens.

    Source:
        Gated Delta Networks, arXiv 2412.06464; grouped heads as in Qwen3-Next.
    """
    chunks = DeltaChunks.of(k_TGK, v_THV, g_TH, beta_TH, cu_seqlens=cu_seqlens, chunk=chunk)
    return chunks.outputs(q_TGK, initial_state=initial_state)


@dataclass(frozen=True)
class DeltaChunks:
    """Keys, values and gates of a pack in chunks, with the inverse of each chunk's system.

    Make it with `DeltaChunks.of`; gradients flow to what it was made from.
    """

    layout: ChunkLayout
    dtype: torch.dtype
    k_MGCK: Tensor
    v_MGRCV: Tensor
    beta_MGRC: Tensor
    g_MGRC: Tensor
    decay_MGRC: Tensor
    pairwise_MGRCC: Tensor
    inverse_MGRCC: Tensor

    @classmethod
    @graph_break
    def of(
        cls,
        k_TGK: Tensor,
        v_THV: Tensor,
        g_TH: Tensor,
        beta_TH: Tensor,
        *,
        cu_seqlens: Sequence[int],
        chunk: int | None = None,
    ) -> DeltaChunks:
        """Cut the pack into chunks and solve the system of each.

        Args:
            k_TGK: `[T, G, K]` keys, normalised.
            v_THV: `[T, H, V]` values; `H` is a multiple of `G`, and value head h belongs to key
                head h // (H / G).
            g_TH: `[T, H]` logarithm of the decay of each token, at most 0.
            beta_TH: `[T, H]` from 0 to 1.
            cu_seqlens: Offsets of the sequences, on the host; the last one is `T`.
            chunk: Tokens of a chunk; `default_chunk` says by default.

        Raises:
            LayoutError: The offsets fall, or do not end at `T`.
            ConfigError: Shapes that do not fit, or a chunk without tokens.
        """
        chunk = default_chunk(k_TGK.shape[-1], is_corrected=True) if chunk is None else chunk
        layout = ChunkLayout.of(cu_seqlens, chunk)
        check_delta_inputs("DeltaChunks", layout.cu_seqlens, k_TGK, v_THV, g_TH, beta_TH)
        dtype, num_groups = compute_dtype(v_THV), k_TGK.shape[1]
        tensors = (k_TGK, v_THV, g_TH, beta_TH)
        k, v, g, beta = (to_chunks(x, layout).to(dtype) for x in tensors)
        v, beta = (x.unflatten(1, (num_groups, -1)) for x in (v, beta))
        g, decay = logs_of_decays(g, num_groups)
        pairs = pairwise_decay(decay)
        inverse = chunk_inverse(k, beta, pairs)
        return cls(layout, v_THV.dtype, k, v, beta, g, decay, pairs, inverse)

    @graph_break
    def outputs(
        self, q_TGK: Tensor, *, initial_state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """What the queries read, and the states after the sequences.

        Args:
            q_TGK: `[T, G, K]` queries, normalised and scaled.
            initial_state: `[N, H, K, V]`, the state before each sequence; zeros by default.

        Returns:
            `[T, H, V]` in the dtype of the values, and `[N, H, K, V]` in fp32, or in fp64 if the
            values are.

        Raises:
            ConfigError: Queries or state of another shape.
        """
        num_groups, key_dim = self.k_MGCK.shape[1], self.k_MGCK.shape[-1]
        shape = (self.layout.num_tokens, num_groups, key_dim)
        check_shape("DeltaChunks.outputs: q", q_TGK, shape)
        initial = state_for_scan(
            "DeltaChunks.outputs", initial_state, self.layout, self.v_MGRCV, num_groups, key_dim
        )
        scan = self._scan(self.v_MGRCV, initial)
        read_MGRCV = read_chunks(
            to_chunks(q_TGK, self.layout).to(self.v_MGRCV.dtype),
            self.k_MGCK,
            scan.values_MGRCV,
            scan.states_MGKRV,
            self.g_MGRC,
            self.decay_MGRC,
            self.pairwise_MGRCC,
        )
        output = from_chunks(read_MGRCV.flatten(1, 2), self.layout).to(self.dtype)
        return output, state_to_pack_order(scan.final_NGKRV, self.layout)

    @graph_break
    def summary(self) -> tuple[Tensor, Tensor]:
        """What each sequence does to a state that enters it: S becomes M S + B.

        Returns:
            M, `[N, H, K, K]`, and B, `[N, H, K, V]`, in fp32, or in fp64 if the values are.
        """
        num_groups, key_dim = self.k_MGCK.shape[1], self.k_MGCK.shape[-1]
        num_repeats, num_sequences = self.v_MGRCV.shape[2], self.layout.num_sequences
        one = torch.eye(key_dim, dtype=self.v_MGRCV.dtype, device=self.v_MGRCV.device)
        # The columns of a state are independent. So the map is found by running it: the identity
        # enters in K more columns, in which nothing is written.
        start = F.pad(one, (0, self.v_MGRCV.shape[-1]))[:, None]
        start = start.expand(num_sequences, num_groups, key_dim, num_repeats, -1).contiguous()
        scan = self._scan(F.pad(self.v_MGRCV, (key_dim, 0)), start)
        both = state_to_pack_order(scan.final_NGKRV, self.layout)
        return both[..., :key_dim], both[..., key_dim:]

    def _scan(self, v_MGRCV: Tensor, initial_NGKRV: Tensor) -> DeltaScan:
        return delta_scan(
            self.k_MGCK,
            v_MGRCV,
            self.beta_MGRC,
            self.g_MGRC,
            self.decay_MGRC,
            initial_NGKRV,
            self.pairwise_MGRCC,
            self.inverse_MGRCC,
            self.layout.step_sizes,
        )


def check_delta_inputs(
    asked: str,
    cu_seqlens: Sequence[int],
    k_TGK: Tensor,
    v_THV: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
) -> None:
    """Keys, values and gates are of one pack and have matching heads."""
    check_tokens(asked, cu_seqlens, k=k_TGK, v=v_THV, g=g_TH, beta=beta_TH)
    check_group(asked, v_THV.shape[1], k_TGK.shape[1])
    for name, gate in (("g", g_TH), ("beta", beta_TH)):
        check_shape(f"{asked}: {name}", gate, tuple(v_THV.shape[:2]))


# -- the scan over the chunks of a pack ------------------------------------------------------
#
# In a chunk that the state S enters, with c the logarithm of the decay since its start:
#   r_i = v_i - e^{c_i} S^T k_i                                 what the state does not know yet,
#   (1 + A) u = beta r,  A_ij = beta_i e^{c_i - c_j} k_i k_j    for j < i: what is written,
#   S' = e^{c_C} S + sum over i of e^{c_C - c_i} k_i u_i^T      the state that leaves it.
# The inverse of 1 + A is computed for all chunks at once; the rest goes from step to step, for all
# sequences that have a chunk left. Backward is the transposed chain, with everything that need not
# wait for it in batched products afterwards; A itself is never stored. Source: the WY form of arXiv
# 2412.06464, with beta and the decay moved out of the triangular solve.


def delta_scan(
    k_MGCK: Tensor,
    v_MGRCV: Tensor,
    beta_MGRC: Tensor,
    g_MGRC: Tensor,
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
        g_MGRC: `[M, G, R, C]` first of `logs_of_decays`, which gets the gradient of all decays.
        decay_MGRC: `[M, G, R, C]` second of them.
        initial_NGKRV: `[N, G, K, R, V]`, the state before each sequence.
        pairwise_MGRCC: `pairwise_decay` of the decay.
        inverse_MGRCC: `chunk_inverse` of the keys, beta and that.
        step_sizes: Number of sequences that have a chunk at each step.

    Returns:
        Everything in the dtype of `v`; differentiable once in keys, values, beta, g and initial
        state. The gradient covers what the three constants owe to them.
    """
    tensors = (k_MGCK, v_MGRCV, beta_MGRC, g_MGRC, initial_NGKRV)
    constants = (decay_MGRC, pairwise_MGRCC, inverse_MGRCC, step_sizes)
    return DeltaScan(*apply_function(_DeltaScan, *tensors, *constants))


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
    # Powers of small decays, which count as little as the decays that are dropped.
    return F.hardshrink(inverse, torch.finfo(inverse.dtype).eps ** 2)


class _DeltaScan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        g: Tensor,
        initial: Tensor,
        decay: Tensor,
        pairs: Tensor,
        inverse: Tensor,
        step_sizes: tuple[int, ...],
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_chunks, num_groups, num_repeats, _, width = v.shape
        values, known = v * beta.unsqueeze(-1), v.new_empty(*k.shape[:-1], num_repeats * width)
        states = v.new_empty(num_chunks, num_groups, k.shape[-1], num_repeats, width)
        known_factor, (to_end, whole) = -decay_from_start(decay) * beta, decay_to_end(decay)
        state, finals = initial, list[Tensor]()
        given = (k, inverse, known_factor, to_end, whole, values, known, states)
        with full_precision(v):
            for now in zip(*(x.split(step_sizes) for x in given), strict=True):
                keys, solver, factor, ending, rest, written, found, entered = now
                finals.append(state[len(keys) :])
                entered.copy_(state[: len(keys)])
                torch.matmul(keys, entered.flatten(-2), out=found)
                error = torch.addcmul(written, _by_head(found, width), factor.unsqueeze(-1))
                torch.matmul(solver, error, out=written)
                state = entered * rest
                state += (keys.mT @ side_by_side(written, ending)).view_as(state)
        final = torch.cat([state, *reversed(finals)])
        ctx.save_for_backward(k, v, beta, decay, pairs, inverse, values, known, states)
        ctx.step_sizes = step_sizes
        return values, states, final

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kept, (grad_values, grad_states, grad_final) = _Kept(*ctx.saved_tensors), grads
        with full_precision(kept.v):
            back = _scan_back(kept, grad_values, grad_states, grad_final, ctx.step_sizes)
            return (*_collect(kept, back), back.initial, None, None, None, None)


class _Kept(NamedTuple):
    """What forward keeps; `states` enter the chunks, and `known` is what keys read from them.

    There, value heads of a key head lie side by side.
    """

    k: Tensor
    v: Tensor
    beta: Tensor
    decay: Tensor
    pairs: Tensor
    inverse: Tensor
    values: Tensor
    known: Tensor
    states: Tensor


class _Back(NamedTuple):
    """What keys see of the states' gradients, and gradients: of beta r, of `known`, of states."""

    seen: Tensor
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
    k, width = kept.k, kept.v.shape[-1]
    to_end, whole = decay_to_end(kept.decay)
    known_factor = -decay_from_start(kept.decay) * kept.beta
    seen, right, known = (torch.empty_like(x) for x in (kept.known, kept.v, kept.known))
    left = torch.empty_like(kept.states)
    state = grad_final[:0]
    given = (k, kept.inverse, grad_values, grad_states, to_end, whole, known_factor)
    made = (seen, right, known, left)
    steps = zip(*(x.split(step_sizes) for x in (*given, *made)), strict=True)
    for now in reversed(list(steps)):
        keys, solver, arriving, entering, ending, rest, factor, *own = now
        found, rights, knowns, leaving = own
        torch.cat([state, grad_final[len(state) : len(keys)]], out=leaving)
        torch.matmul(keys, leaving.flatten(-2), out=found)
        writes = torch.addcmul(arriving, _by_head(found, width), ending.unsqueeze(-1))
        torch.matmul(solver.mT, writes, out=rights)
        knowns.copy_(side_by_side(rights, factor))
        state = torch.addcmul(entering, leaving, rest)
        state += (keys.mT @ knowns).view_as(state)
    return _Back(seen, right, known, left, torch.cat([state, grad_final[len(state) :]]))


def _collect(kept: _Kept, back: _Back) -> tuple[Tensor, ...]:
    """Gradients of keys, values, beta and decays, for all chunks at once."""
    k, beta, values = kept.k, kept.beta, kept.values
    to_end, whole = decay_to_end(kept.decay)
    grad_v = back.right * beta.unsqueeze(-1)
    known, seen = (_by_head(x, values.shape[-1]) for x in (kept.known, back.seen))
    known = known * decay_from_start(kept.decay).unsqueeze(-1)
    # The gradient of A is minus right values^T, below the diagonal.
    grad_system = (back.right @ values.mT).mul_(kept.pairs).neg_().tril_(-1)
    by_pair = grad_system * (k @ k.mT).unsqueeze(2)
    grad_beta = (back.right * (kept.v - known)).sum(-1) + by_pair.sum(-1)
    grad_keys = grad_system.mul_(beta.unsqueeze(-1)).sum(2)
    grad_k = (grad_keys + grad_keys.mT) @ k
    grad_k += back.known @ kept.states.flatten(-2).mT
    grad_k += side_by_side(values, to_end) @ back.left.flatten(-2).mT

    started, ending = -(grad_v * known).sum(-1), (seen * values).sum(-1) * to_end
    grad_g = gradient_of_decays(by_pair.mul_(beta.unsqueeze(-1)), started, ending)
    grad_g += ((back.left * kept.states).sum((2, 4)) * whole[:, :, 0, :, 0]).unsqueeze(-1)
    return grad_k, grad_v, grad_beta, grad_g


def _by_head(x_MGCW: Tensor, width: int) -> Tensor:
    """`[M, G, R, C, V]`: a view of value heads of this width that lie side by side."""
    x_MGCRV: Tensor = x_MGCW.unflatten(-1, (-1, width))
    return x_MGCRV.transpose(2, 3)
