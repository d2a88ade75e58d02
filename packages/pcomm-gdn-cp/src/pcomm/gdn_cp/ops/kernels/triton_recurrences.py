"""Both chunked recurrences by the Triton kernels, and their gradients.

A forward is three launches, a backward seven, of which two are those of the forward up to the
states: what is kept between them is the inputs alone. Importing this file imports Triton.
"""

# T tokens, N sequences, M chunks, C tokens of a chunk, G key heads, H value heads, K key dim,
# V value dim, P head dim (V in a recurrence), S state dim (K in a recurrence)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pcomm.core.kernel_launch import KernelLaunch
from pcomm.gdn_cp.ops.chunks import ChunkTables, chunk_tables
from pcomm.gdn_cp.ops.entry import (
    apply_function,
    check_shape,
    differentiable_once,
    graph_break,
)
from pcomm.gdn_cp.ops.gated_delta_rule import check_delta_inputs
from pcomm.gdn_cp.ops.kernels.triton_chunks import Local, local_launch, read_launch, scan_launch
from pcomm.gdn_cp.ops.kernels.triton_chunks_backward import (
    back_through_reads_launch,
    back_through_scan_launch,
    collect_launches,
    finish_launch,
)
from pcomm.gdn_cp.ops.kernels.triton_gates import time_steps_and_decays
from pcomm.gdn_cp.ops.kernels.triton_pieces import Recurrence
from pcomm.gdn_cp.ops.mamba2_ssd import check_ssd_inputs
from pcomm.gdn_cp.pack_offsets import PackOffsets

__all__ = ["TritonChunks", "delta_chunks", "ssd_chunks"]


def delta_chunks(
    k_TGK: Tensor,
    v_THV: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
    *,
    cu_seqlens: Sequence[int],
) -> TritonChunks:
    """What `DeltaChunks.of` makes, by the kernels; arguments and errors are the same.

    All tensors are on one device that Triton compiles for, of at most 32 bits, and there are
    tokens.
    """
    offsets = PackOffsets.of(cu_seqlens)
    check_delta_inputs("DeltaChunks", offsets, k_TGK, v_THV, g_TH, beta_TH)
    return TritonChunks.of(offsets, k_TGK, v_THV, g_TH, beta_TH, is_corrected=True)


def ssd_chunks(
    x_THP: Tensor,
    dt_TH: Tensor,
    a_log_H: Tensor,
    b_TGS: Tensor,
    *,
    dt_bias_H: Tensor,
    cu_seqlens: Sequence[int],
) -> TritonChunks:
    """What `SsdChunks.of` makes, by the kernels; arguments and errors are the same.

    See `delta_chunks` for what tensors it takes.
    """
    offsets = PackOffsets.of(cu_seqlens)
    check_ssd_inputs("SsdChunks", offsets, x_THP, dt_TH, a_log_H, b_TGS, dt_bias_H)
    g_TH, time_TH = time_steps_and_decays(dt_TH, a_log_H, dt_bias_H)
    return TritonChunks.of(offsets, b_TGS, x_THP, g_TH, time_TH, is_corrected=False)


@dataclass(frozen=True)
class TritonChunks:
    """Keys, values and gates of a pack, and what is local to its chunks.

    Gradients flow to what it was made from. Make it with `delta_chunks` or `ssd_chunks`.
    """

    given: Recurrence
    local: Local

    @classmethod
    @graph_break
    def of(
        cls,
        offsets: PackOffsets,
        k_TGK: Tensor,
        v_THV: Tensor,
        g_TH: Tensor,
        beta_TH: Tensor,
        *,
        is_corrected: bool,
    ) -> TritonChunks:
        """Cut the pack into chunks; values are scaled by `beta_TH`, or corrected by so much."""
        tables = offsets.derived(chunk_tables, k_TGK.device)
        g_TH, beta_TH = (x.float().contiguous() for x in (g_TH, beta_TH))
        k_TGK, v_THV = _rows(k_TGK), _rows(v_THV)
        given = Recurrence(tables, None, k_TGK, v_THV, g_TH, beta_TH, None, is_corrected)
        with torch.no_grad():
            return cls(given, _run(local_launch(given)))

    @graph_break
    def outputs(
        self, q_TGK: Tensor, *, d_H: Tensor | None = None, initial_state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """What the queries read, and the states after the sequences.

        Args:
            q_TGK: `[T, G, K]` queries, normalised and scaled.
            d_H: `[H]` weight of the values that is added to what is read, or nothing.
            initial_state: `[N, H, K, V]`, the state before each sequence; zeros by default.

        Returns:
            `[T, H, V]` in the dtype of the values, and `[N, H, K, V]` in fp32.

        Raises:
            ConfigError: Another shape.
        """
        given = self.given
        check_shape("outputs: queries", q_TGK, tuple(given.k_TGK.shape))
        if d_H is not None:
            check_shape("outputs: d", d_H, (given.v_THV.shape[1],))
            d_H = d_H.float().contiguous()
        if initial_state is not None:
            check_shape("outputs: initial_state", initial_state, given.state_shape)
            initial_state = initial_state.float().contiguous()
        output, final = self._applied(_rows(q_TGK), given.v_THV, d_H, initial_state)
        return output, final

    @graph_break
    def summary(self) -> tuple[Tensor, Tensor]:
        """What each sequence does to a state that enters it: S becomes M S + B.

        Returns:
            M, `[N, H, K, K]` with correction, `[N, H, 1, 1]` without, and B, `[N, H, K, V]`, both
            in fp32.
        """
        given = self.given
        key_dim, count = given.k_TGK.shape[2], given.k_TGK.shape[2] if given.is_corrected else 1
        # The columns of a state are independent. So the map is found by running it: the identity
        # enters in K more columns, in which nothing is written. Without correction all rows decay
        # alike, and a column of ones is enough.
        values_THV = F.pad(given.v_THV, (count, 0))
        one = torch.eye(key_dim, device=values_THV.device) if given.is_corrected else None
        if one is None:
            one = torch.ones(key_dim, 1, device=values_THV.device)
        num_sequences, num_heads, *_ = given.state_shape
        start = F.pad(one, (0, values_THV.shape[2] - count))
        start_NHKV = start.expand(num_sequences, num_heads, -1, -1).contiguous()
        _, both = self._applied(None, values_THV, None, start_NHKV)
        rows = slice(None) if given.is_corrected else slice(1)
        return both[..., rows, :count], both[..., count:]

    def _applied(
        self, q: Tensor | None, v: Tensor, skip: Tensor | None, initial: Tensor | None
    ) -> tuple[Any, Tensor]:
        given = self.given
        tensors = (q, given.k_TGK, v, given.g_TH, given.beta_TH, skip, initial)
        constants = (given.tables, self.local, given.is_corrected)
        found: tuple[Any, Tensor] = apply_function(_Recurrence, *tensors, *constants)
        return found


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor | None,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        skip: Tensor | None,
        initial: Tensor | None,
        tables: ChunkTables,
        local: Local,
        is_corrected: bool,
    ) -> tuple[Tensor | None, Tensor]:
        given = Recurrence(tables, q, k, v, g, beta, skip, is_corrected)
        scanned = _run(scan_launch(given, local, initial))
        output = None if q is None else _run(read_launch(given, local, scanned))
        ctx.save_for_backward(q, k, v, g, beta, skip, initial)
        ctx.constants = tables, is_corrected
        ctx.set_materialize_grads(False)
        return output, scanned.final_NHKV

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad, grad_final = (None if x is None else x.contiguous() for x in grads)
        q, k, v, g, beta, skip, initial = ctx.saved_tensors
        tables, is_corrected = ctx.constants
        given = Recurrence(tables, q, k, v, g, beta, skip, is_corrected)
        if grad is None:
            given = replace(given, q_TGK=None)
        local = _run(local_launch(given))
        scanned = _run(scan_launch(given, local, initial))
        grad_values = None if grad is None else _run(back_through_reads_launch(given, local, grad))
        back = _run(back_through_scan_launch(given, local, grad_values, grad, grad_final))
        launches, found = collect_launches(given, local, scanned, back, grad)
        for launch in launches:
            launch.run()
        grad_g, grad_beta = _run(finish_launch(given, found))
        grad_skip = None if found.skip_TH is None else found.skip_TH.sum(0)
        grad_initial = None if initial is None else back.initial_NHKV
        grad_q, grad_k = (None if x is None else _total(x) for x in (found.q_STGK, found.k_STGK))
        own = (grad_q, grad_k, found.v_THV, grad_g, grad_beta, grad_skip, grad_initial)
        return (*own, None, None, None)


def _run(made: tuple[KernelLaunch, Any]) -> Any:
    """Launch it; what it fills."""
    launch, results = made
    launch.run()
    return results


def _total(parts: Tensor) -> Tensor:
    return parts[0] if len(parts) == 1 else parts.sum(0)


def _rows(x_THD: Tensor) -> Tensor:
    """The same with heads side by side; rows may be further apart."""
    if x_THD.stride()[1:] == (x_THD.shape[2], 1):
        return x_THD
    return x_THD.contiguous()
