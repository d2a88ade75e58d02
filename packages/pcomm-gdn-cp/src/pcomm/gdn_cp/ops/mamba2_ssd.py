"""The state space of Mamba-2 (SSD) over packed sequences.

For each head, with its group's b and c, the state S is `[S, P]` and
  S <- e^{A dt} S + dt b x^T;  y = S^T c + d x,  where A = -e^{a_log}, dt = softplus(dt + bias).
That is a gated delta rule without the correction; both read their states alike (`read_chunks`).
The work inside the chunks is done once, for a summary and for the outputs.
"""

# T tokens, N sequences (by length in a scan), M chunks (by step), C tokens of a chunk, G groups,
# H heads, R heads of a group, P head dim (V in a scan), S state dim (K in a scan)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pcomm.gdn_cp.ops.chunks import (
    ChunkLayout,
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
    "SsdChunks",
    "check_ssd_inputs",
    "chunk_mamba2_ssd",
    "decay_scan",
    "mamba2_ssd_step",
    "time_steps",
]


def time_steps(dt_TH: Tensor, dt_bias_H: Tensor, dtype: torch.dtype) -> Tensor:
    """`softplus(dt + dt_bias)`: how long each token lasts for the state."""
    return F.softplus(dt_TH.to(dtype) + dt_bias_H.to(dtype))


def mamba2_ssd_step(
    state_NHSP: Tensor,
    x_NHP: Tensor,
    dt_NH: Tensor,
    a_log_H: Tensor,
    b_NGS: Tensor,
    c_NGS: Tensor,
    *,
    d_H: Tensor | None = None,
    dt_bias_H: Tensor,
) -> tuple[Tensor, Tensor]:
    """One token of each of N sequences: what comes out, and the new states.

    Args:
        state_NHSP: `[N, H, S, P]`, fp32 or fp64; not changed.
        x_NHP: `[N, H, P]` inputs; `H` is a multiple of `G`.
        dt_NH: `[N, H]` time steps as projected.
        a_log_H: `[H]` parameter, `A_log`.
        b_NGS: `[N, G, S]` input matrices.
        c_NGS: `[N, G, S]` output matrices.
        d_H: `[H]` weight of the input that skips the state, or nothing.
        dt_bias_H: `[H]` parameter.

    Returns:
        `[N, H, P]` in the dtype of `x_NHP`, and `[N, H, S, P]`.
    """
    dtype, num_groups = state_NHSP.dtype, b_NGS.shape[1]
    # The last bits of a softplus depend on the place in the batch; those of fp64 vanish here.
    x, time = x_NHP.to(dtype), time_steps(dt_NH, dt_bias_H, torch.float64).to(dtype)
    decay_NH = (-a_log_H.to(dtype).exp() * time).exp()
    b, c = (x.to(dtype)[:, :, None] for x in (b_NGS, c_NGS))
    with full_precision(state_NHSP):
        written = (
            b.unsqueeze(-1) * (x * time.unsqueeze(-1)).unflatten(1, (num_groups, -1))[..., None, :]
        )
        state = state_NHSP * decay_NH[..., None, None] + written.flatten(1, 2)
        y = c.unsqueeze(-2) @ state.unflatten(1, (num_groups, -1))
    y_NHP = y.squeeze(-2).flatten(1, 2)
    if d_H is not None:
        y_NHP = y_NHP + d_H.to(dtype)[:, None] * x
    return y_NHP.to(x_NHP.dtype), state


@graph_break
def chunk_mamba2_ssd(
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
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The state space of each sequence of the pack, in chunks.

    Choose it for training and prefill; `mamba2_ssd_step` is for decoding. Computes in fp32, and
    in fp64 if the inputs are fp64, also under autocast. Differentiable once.

    Args:
        x_THP: `[T, H, P]` inputs; `H` is a multiple of `G`.
        dt_TH: `[T, H]` time steps as projected: the bias and the softplus are applied here.
        a_log_H: `[H]` parameter, `A_log`.
        b_TGS: `[T, G, S]` input matrix of each token; head h belongs to group h // (H / G).
        c_TGS: `[T, G, S]` output matrix of each token.
        d_H: `[H]` weight of the input that skips the state, or nothing.
        dt_bias_H: `[H]` parameter.
        cu_seqlens: Offsets of the sequences, on the host; the last one is `T`.
        initial_state: `[N, H, S, P]`, the state before each sequence; zeros by default.
            `transformers` keeps its transpose, `[N, H, P, S]`.
        chunk: Tokens of a chunk, `default_chunk` by default. Results differ by rounding.

    Returns:
        `[T, H, P]` in the dtype of `x_THP`, and the state after each sequence, `[N, H, S, P]`, in
        the dtype of the computation. An empty sequence hands its state on.

    Raises:
        LayoutError: The offsets fall, or do not end at `T`.
        ConfigError: Shapes that do not fit, or a chunk without tokens.

    Source:
        State space duality, arXiv 2405.21060; names as in `mamba2_chunk_scan`, `transformers`.
    """
    chunks = SsdChunks.of(
        x_THP, dt_TH, a_log_H, b_TGS, dt_bias_H=dt_bias_H, cu_seqlens=cu_seqlens, chunk=chunk
    )
    return chunks.outputs(c_TGS, d_H=d_H, initial_state=initial_state)


@dataclass(frozen=True)
class SsdChunks:
    """Inputs, input matrices and decays of a pack in chunks.

    Make it with `SsdChunks.of`; gradients flow to what it was made from.
    """

    layout: ChunkLayout
    x_THP: Tensor
    b_MGCS: Tensor
    values_MGRCP: Tensor
    g_MGRC: Tensor
    decay_MGRC: Tensor

    @classmethod
    @graph_break
    def of(
        cls,
        x_THP: Tensor,
        dt_TH: Tensor,
        a_log_H: Tensor,
        b_TGS: Tensor,
        *,
        dt_bias_H: Tensor,
        cu_seqlens: Sequence[int],
        chunk: int | None = None,
    ) -> SsdChunks:
        """Cut the pack into chunks.

        Args:
            x_THP: `[T, H, P]` inputs; `H` is a multiple of `G`.
            dt_TH: `[T, H]` time steps as projected: the bias and the softplus are applied here.
            a_log_H: `[H]` parameter, `A_log`.
            b_TGS: `[T, G, S]` input matrix of each token; head h belongs to group h // (H / G).
            dt_bias_H: `[H]` parameter.
            cu_seqlens: Offsets of the sequences, on the host; the last one is `T`.
            chunk: Tokens of a chunk; `default_chunk` says by default.

        Raises:
            LayoutError: The offsets fall, or do not end at `T`.
            ConfigError: Shapes that do not fit, or a chunk without tokens.
        """
        chunk = default_chunk(b_TGS.shape[-1], is_corrected=False) if chunk is None else chunk
        layout = ChunkLayout.of(cu_seqlens, chunk)
        check_ssd_inputs("SsdChunks", layout.cu_seqlens, x_THP, dt_TH, a_log_H, b_TGS, dt_bias_H)
        dtype, num_groups = compute_dtype(x_THP), b_TGS.shape[1]
        time_TH = time_steps(dt_TH, dt_bias_H, dtype)
        g_TH = -a_log_H.to(dtype).exp() * time_TH
        x, b, time, g = (to_chunks(x, layout).to(dtype) for x in (x_THP, b_TGS, time_TH, g_TH))
        values = (x * time.unsqueeze(-1)).unflatten(1, (num_groups, -1))
        return cls(layout, x_THP, b, values, *logs_of_decays(g, num_groups))

    @graph_break
    def outputs(
        self, c_TGS: Tensor, *, d_H: Tensor | None = None, initial_state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """What the output matrices read, and the states after the sequences.

        Args:
            c_TGS: `[T, G, S]` output matrix of each token.
            d_H: `[H]` weight of the input that skips the state, or nothing.
            initial_state: `[N, H, S, P]`, the state before each sequence; zeros by default.

        Returns:
            `[T, H, P]` in the dtype of the inputs, and `[N, H, S, P]` in fp32, or in fp64 if the
            inputs are.

        Raises:
            ConfigError: Another shape.
        """
        num_groups, state_dim = self.b_MGCS.shape[1], self.b_MGCS.shape[-1]
        asked = "SsdChunks.outputs"
        check_shape(f"{asked}: c", c_TGS, (self.layout.num_tokens, num_groups, state_dim))
        states, final = self._scan(self.values_MGRCP, initial_state)
        read_MGRCP = read_chunks(
            to_chunks(c_TGS, self.layout).to(self.values_MGRCP.dtype),
            self.b_MGCS,
            self.values_MGRCP,
            states,
            self.g_MGRC,
            self.decay_MGRC,
            pairwise_decay(self.decay_MGRC),
        )
        y_THP = from_chunks(read_MGRCP.flatten(1, 2), self.layout)
        if d_H is not None:
            check_shape(f"{asked}: d", d_H, (self.x_THP.shape[1],))
            y_THP = torch.addcmul(y_THP, self.x_THP.to(y_THP.dtype), d_H.to(y_THP.dtype)[:, None])
        return y_THP.to(self.x_THP.dtype), final

    @graph_break
    def summary(self) -> tuple[Tensor, Tensor]:
        """What each sequence does to a state that enters it: S becomes M S + B.

        Returns:
            M, one number a head, `[N, H, 1, 1]`, and B, `[N, H, S, P]`, in fp32, or in fp64 if
            the inputs are.
        """
        # All rows of a state decay alike, and its columns are independent. So the decay of the
        # whole sequence is what becomes of ones that enter in one more column.
        num_sequences, num_heads = self.layout.num_sequences, self.x_THP.shape[1]
        values = F.pad(self.values_MGRCP, (1, 0))
        width, state_dim = values.shape[-1], self.b_MGCS.shape[-1]
        ones = values.new_zeros(num_sequences, num_heads, state_dim, width)
        ones[..., 0] = 1
        _, final = self._scan(values, ones)
        return final[..., :1, :1], final[..., 1:]

    def _scan(self, values: Tensor, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
        """The state that enters each chunk, and those after the sequences, as users see them."""
        num_groups, state_dim = self.b_MGCS.shape[1], self.b_MGCS.shape[-1]
        asked = "SsdChunks.outputs"
        initial = state_for_scan(asked, initial_state, self.layout, values, num_groups, state_dim)
        sizes = self.layout.step_sizes
        logs = self.g_MGRC, self.decay_MGRC
        states, final = decay_scan(self.b_MGCS, values, *logs, initial, sizes)
        return states, state_to_pack_order(final, self.layout)


def check_ssd_inputs(
    asked: str,
    cu_seqlens: Sequence[int],
    x_THP: Tensor,
    dt_TH: Tensor,
    a_log_H: Tensor,
    b_TGS: Tensor,
    dt_bias_H: Tensor,
) -> None:
    """Inputs, time steps and matrices are of one pack and have matching heads."""
    check_tokens(asked, cu_seqlens, x=x_THP, dt=dt_TH, b=b_TGS)
    num_heads = x_THP.shape[1]
    check_group(asked, num_heads, b_TGS.shape[1])
    check_shape(f"{asked}: dt", dt_TH, (len(x_THP), num_heads))
    for name, parameter in (("a_log", a_log_H), ("dt_bias", dt_bias_H)):
        check_shape(f"{asked}: {name}", parameter, (num_heads,))


# -- the scan over the chunks of a pack ------------------------------------------------------
#
# S' = e^{c_C} S + sum over i of e^{c_C - c_i} k_i u_i^T, with c the logarithm of the decay since
# the chunk's start. What each chunk adds is one batched product; what goes from step to step is a
# scaled sum, and so is what comes back in backward.


def decay_scan(
    k_MGCK: Tensor,
    values_MGRCV: Tensor,
    g_MGRC: Tensor,
    decay_MGRC: Tensor,
    initial_NGKRV: Tensor,
    step_sizes: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """The state that enters each chunk, and the one after each sequence.

    Args:
        k_MGCK: `[M, G, C, K]`, what values are written under.
        values_MGRCV: `[M, G, R, C, V]`, zero where padded.
        g_MGRC: `[M, G, R, C]` first of `logs_of_decays`, which gets the gradient of all decays.
        decay_MGRC: `[M, G, R, C]` second of them.
        initial_NGKRV: `[N, G, K, R, V]`, the state before each sequence.
        step_sizes: Number of sequences that have a chunk at each step.

    Returns:
        `[M, G, K, R, V]` and `[N, G, K, R, V]`, differentiable once.
    """
    tensors = (k_MGCK, values_MGRCV, g_MGRC, decay_MGRC, initial_NGKRV)
    states, final = apply_function(_DecayScan, *tensors, step_sizes)
    return states, final


class _DecayScan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        k: Tensor,
        values: Tensor,
        g: Tensor,
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
        state, finals = initial, list[Tensor]()
        given = (x.split(step_sizes) for x in (states, added, whole))
        for entered, more, rest in zip(*given, strict=True):
            finals.append(state[len(entered) :])
            entered.copy_(state[: len(entered)])
            state = torch.addcmul(more, entered, rest)
        ctx.save_for_backward(k, values, decay, states)
        ctx.step_sizes = step_sizes
        return states, torch.cat([state, *reversed(finals)])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        k, values, decay, states = ctx.saved_tensors
        grad_states, grad_final = grads
        to_end, whole = decay_to_end(decay)
        grad_left = torch.empty_like(states)
        state = grad_final[:0]
        given = (x.split(ctx.step_sizes) for x in (grad_left, grad_states, whole))
        for left, entering, rest in reversed(list(zip(*given, strict=True))):
            torch.cat([state, grad_final[len(state) : len(left)]], out=left)
            state = torch.addcmul(entering, left, rest)
        grad_initial = torch.cat([state, grad_final[len(state) :]])
        with full_precision(k):
            seen = (k @ grad_left.flatten(-2)).unflatten(-1, (-1, values.shape[-1]))
            grad_values = seen.transpose(2, 3) * to_end.unsqueeze(-1)
            grad_k = side_by_side(values, to_end) @ grad_left.flatten(-2).mT
        grad_g = gradient_of_decays(None, None, (grad_values * values).sum(-1))
        grad_g += ((grad_left * states).sum((2, 4)) * whole[:, :, 0, :, 0]).unsqueeze(-1)
        return grad_k, grad_values, grad_g, None, grad_initial, None
