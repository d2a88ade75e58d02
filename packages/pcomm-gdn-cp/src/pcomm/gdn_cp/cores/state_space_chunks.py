"""The work inside the chunks of a Mamba-2 state space, done once for whatever follows."""

# T tokens, N sequences, M chunks, C tokens of a chunk, G groups, H heads, R heads of a group,
# P head dim, S state dim

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from pcomm.gdn_cp.cores.carried_state import state_for_scan, state_for_user
from pcomm.gdn_cp.cores.decayed_read import log_decay_since_start, pairwise_decay, read_chunks
from pcomm.gdn_cp.cores.inputs import check_group, check_shape, check_tokens
from pcomm.gdn_cp.cores.packing import ChunkLayout, from_chunks, to_chunks
from pcomm.gdn_cp.cores.precision import compute_dtype
from pcomm.gdn_cp.cores.state_space_scan import decay_scan

__all__ = ["DEFAULT_CHUNK", "StateSpaceChunks"]

# Measured on CPU, forward and backward, 2048 tokens: see benchmarks/cores.py.
DEFAULT_CHUNK = 64


@dataclass(frozen=True)
class StateSpaceChunks:
    """Inputs, input matrices and decays of a pack in chunks.

    Make it with `StateSpaceChunks.of`; gradients flow to what it was made from.
    """

    layout: ChunkLayout
    x_THP: Tensor
    b_MGCS: Tensor
    values_MGRCP: Tensor
    decay_MGRC: Tensor

    @classmethod
    def of(
        cls,
        x_THP: Tensor,
        dt_TH: Tensor,
        a_log_H: Tensor,
        b_TGS: Tensor,
        *,
        dt_bias_H: Tensor,
        cu_seqlens: Sequence[int],
        chunk: int = DEFAULT_CHUNK,
    ) -> StateSpaceChunks:
        """Cut the pack into chunks.

        Args:
            x_THP: `[T, H, P]` inputs; `H` is a multiple of `G`.
            dt_TH: `[T, H]` time steps as projected: the bias and the softplus are applied here.
            a_log_H: `[H]` parameter, `A_log`.
            b_TGS: `[T, G, S]` input matrix of each token; head h belongs to group h // (H / G).
            dt_bias_H: `[H]` parameter.
            cu_seqlens: Offsets of the sequences, on the host; the last one is `T`.
            chunk: Tokens of a chunk.

        Raises:
            LayoutError: The offsets fall, or do not end at `T`.
            ConfigError: Shapes that do not fit, or a chunk without tokens.
        """
        layout = ChunkLayout.of(cu_seqlens, chunk)
        check_state_space_inputs(
            "StateSpaceChunks", layout.cu_seqlens, x_THP, dt_TH, a_log_H, b_TGS, dt_bias_H
        )
        dtype, num_groups = compute_dtype(x_THP), b_TGS.shape[1]
        time_TH = time_steps(dt_TH, dt_bias_H, dtype)
        g_TH = -a_log_H.to(dtype).exp() * time_TH
        x, b, time, g = (to_chunks(x, layout).to(dtype) for x in (x_THP, b_TGS, time_TH, g_TH))
        values = (x * time.unsqueeze(-1)).unflatten(1, (num_groups, -1))
        return cls(layout, x_THP, b, values, log_decay_since_start(g, num_groups))

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
        asked = "StateSpaceChunks.outputs"
        check_shape(f"{asked}: c", c_TGS, (self.layout.num_tokens, num_groups, state_dim))
        states, final = self._scan(initial_state)
        read_MGRCP = read_chunks(
            to_chunks(c_TGS, self.layout).to(self.values_MGRCP.dtype),
            self.b_MGCS,
            self.values_MGRCP,
            states,
            self.decay_MGRC,
            pairwise_decay(self.decay_MGRC),
        )
        y_THP = from_chunks(read_MGRCP.flatten(1, 2), self.layout)
        if d_H is not None:
            check_shape(f"{asked}: d", d_H, (self.x_THP.shape[1],))
            y_THP = torch.addcmul(y_THP, self.x_THP.to(y_THP.dtype), d_H.to(y_THP.dtype)[:, None])
        return y_THP.to(self.x_THP.dtype), final

    def summary(self) -> tuple[Tensor, Tensor]:
        """What each sequence does to a state that enters it: S becomes M S + B.

        Returns:
            M, one number a head, `[N, H, 1, 1]`, and B, `[N, H, S, P]`, in fp32, or in fp64 if
            the inputs are.
        """
        _, written = self._scan(None)
        # The whole decay of a sequence: of its tokens' logarithms, summed before the exponential.
        num_heads = written.shape[1]
        ends_MH = self.decay_MGRC[..., -1].flatten(1)
        sequence_M = sequence_of_chunks(self.layout, ends_MH.device)
        total = ends_MH.new_zeros(self.layout.num_sequences, num_heads)
        total = total.index_add(0, sequence_M, ends_MH)
        return total.exp()[..., None, None], written

    def _scan(self, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
        num_groups, state_dim = self.b_MGCS.shape[1], self.b_MGCS.shape[-1]
        initial = state_for_scan(
            "StateSpaceChunks.outputs",
            initial_state,
            self.layout,
            self.values_MGRCP,
            num_groups,
            state_dim,
        )
        states, final = decay_scan(
            self.b_MGCS, self.values_MGRCP, self.decay_MGRC, initial, self.layout.step_sizes
        )
        return states, state_for_user(final, self.layout)
