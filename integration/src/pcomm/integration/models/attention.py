"""Causal grouped-query attention over packed sequences."""

# Shape suffixes: T tokens, D width, H query heads, G key and value heads, K head dim,
# N sequences of equal length L. Heads are this rank's share.

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pcomm.core import Layout
from pcomm.gdn_cp import AttentionSpec, PackOffsets
from pcomm.gdn_cp.ops import graph_break
from pcomm.inference import HeadTurn, KVMemory, KVSpec, paged_attention
from pcomm.inference.layers import ResidualStream, varlen_call
from pcomm.integration.models.forward_context import Context, StepContext
from pcomm.integration.models.layers import LayerBuilder, RMSNorm, rotate

__all__ = ["Attention", "packed_attention"]


class Attention(nn.Module):
    """The attention mixer of a block; heads are split over the tensor-parallel ranks.

    Queries, keys and values, and a gate where the model has one, come from one weight, whose layout
    says which rank holds which heads of each.

    Args:
        build: Sizes, and the tensor-parallel group.
    """

    def __init__(self, build: LayerBuilder) -> None:
        super().__init__()
        config, unit = build.config, build.config.head_dim
        # A key head and the query heads that read it lie on one rank.
        queries = config.heads // config.kv_heads * unit
        heads, kv_heads = (build.split(config.kv_heads, width) for width in (queries, unit))
        sections = [heads, kv_heads, kv_heads, *([heads] if config.attention_gate else [])]
        self.sizes = [build.own(layout) for layout in sections]
        self.heads = [size // unit for size in self.sizes]
        self.spec = AttentionSpec(self.heads[0], self.heads[1], unit)
        self.qkv = build.from_stream(Layout.sections(sections), bias=config.qkv_bias)
        self.output = build.to_stream(heads)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm, self.k_norm = build.head_norm(unit), build.head_norm(unit)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """`[T, D]` to `[T, D]`; collective over tensor- and context-parallel group."""
        q, k, v, *gate = self._projected(context.enter(self.spec, x))
        # The gate stays with the tokens that the result comes back to.
        return context.leave(self.spec, self._gated(self._mixed([q, k, v], context), gate))

    def step(self, x: Tensor, context: StepContext, memory: KVMemory) -> Tensor:
        """The same for the new tokens of many requests, whose keys and values are in `memory`.

        Collective over the tensor-parallel group.
        """
        turn, heads = context.rotation, self.heads
        assert turn is not None, "a model with attention has rotations"
        all_THK = self.qkv(x).view(x.shape[0], -1, self.spec.head_dim)
        q_norm, k_norm = self.q_norm, self.k_norm
        if q_norm is None or k_norm is None:
            # Neighbours in one tensor, so that both are turned at once.
            qk_THK, v_TGK, *gate = all_THK.split_with_sizes([heads[0] + heads[1], *heads[2:]], 1)
            q_THK, k_TGK = rotate(qk_THK, turn).split_with_sizes(heads[:2], 1)
        else:
            q_THK, k_TGK, v_TGK, *gate = all_THK.split_with_sizes(heads, 1)
            q_THK, k_TGK = rotate(q_norm.forward(q_THK), turn), rotate(k_norm.forward(k_TGK), turn)
        mixed_THK = paged_attention(q_THK, k_TGK, v_TGK, memory, context.batch)
        return self._gated(mixed_THK.flatten(1), [part.flatten(1) for part in gate])

    def step_on_device(
        self, stream: ResidualStream, norm: RMSNorm, context: StepContext, memory: KVMemory
    ) -> None:
        """The same on a GPU, from the norm of the stream, to which the result is added.

        Collective over the tensor-parallel group.
        """
        assert context.rotation is not None, "a model with attention has rotations"
        cos_T11R, sin_T12R = context.rotation
        q_norm, k_norm = self.q_norm, self.k_norm
        turn = HeadTurn(
            cos_T11R.flatten(1),
            sin_T12R[:, 0, 1],
            None if q_norm is None else q_norm.of_step,
            None if k_norm is None else k_norm.of_step,
        )
        all_TC = stream.product(norm.of_step, self.qkv)
        all_THK = all_TC.view(len(all_TC), -1, self.spec.head_dim)
        q_THK, k_TGK, v_TGK, *gate = all_THK.split_with_sizes(self.heads, 1)
        mixed_THK = paged_attention(q_THK, k_TGK, v_TGK, memory, context.batch, turn=turn)
        mixed_TC = mixed_THK.flatten(1)
        for gate_THK in gate:
            mixed_TC = mixed_TC * gate_THK.flatten(1).sigmoid()
        stream.add_product(self.output, mixed_TC)

    @property
    def memory_spec(self) -> KVSpec:
        """What this layer keeps of a request on this rank."""
        return KVSpec(self.spec.num_kv_heads, self.spec.head_dim, self.output.weight.dtype)

    def _projected(self, x: Tensor) -> list[Tensor]:
        """Queries, keys and values, and the gate if there is one, heads side by side."""
        q, k, v, *gate = self.qkv(x).split(self.sizes, -1)
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(self._heads(q)).flatten(-2)
            k = self.k_norm(self._heads(k)).flatten(-2)
        return [q, k, v, *gate]

    @graph_break
    def _mixed(self, parts: Sequence[Tensor], context: Context) -> Tensor:
        """Attention to queries, keys and values, outside of what is compiled.

        A graph that had seen the offsets of sequences would belong to packs of as many.
        """
        plan, spec, turn = context.plan, self.spec, context.rotation
        assert turn is not None, "a model with attention has rotations"
        q, k, v = (self._heads(part) for part in plan.to_heads(spec, parts))
        cu_seqlens = plan.cu_seqlens_of(spec)
        mixed_THK = packed_attention(rotate(q, turn), rotate(k, turn), v, cu_seqlens)
        return plan.from_heads(spec, mixed_THK.flatten(-2))

    def _gated(self, mixed_TC: Tensor, gate: Sequence[Tensor]) -> Tensor:
        """Into the residual stream, through the gate if there is one."""
        for gate_TC in gate:
            mixed_TC = mixed_TC * gate_TC.sigmoid()
        output: Tensor = self.output(mixed_TC)
        return output

    def _heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (-1, self.spec.head_dim))
        return heads


def packed_attention(
    q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, cu_seqlens: Sequence[int]
) -> Tensor:
    """Causal attention of each sequence with itself alone; local.

    Neighbouring sequences of equal length are one call of torch's scaled_dot_product_attention,
    so nothing is computed that a mask would throw away. Where they are of several lengths, on a GPU
    all are one call of torch's `varlen_attn`, if it takes them. Elsewhere the buffer is cut by
    `split`, whose backward is one concatenation; slices would each write a gradient of the whole
    buffer. That one call has not run on hardware.

    Args:
        q_THK: Queries `[T, H, K]`.
        k_TGK: Keys `[T, G, K]`; H is a multiple of G, and neighbouring query heads share one.
        v_TGK: Values `[T, G, K]`.
        cu_seqlens: Offsets of the sequences in the T tokens; some may be empty, or all.

    Returns:
        `[T, H, K]`.
    """
    runs = _equal_runs(cu_seqlens)
    if not runs:
        # A rank may have no document; backward still has to find its way to what was sent here.
        return q_THK
    if len(runs) == 1:
        return _equal_sequences(q_THK, k_TGK, v_TGK, runs[0][0])
    dtype = _lowered(q_THK)
    attend = varlen_call("varlen_attn", q_THK.device, dtype, q_THK.shape[-1])
    if attend is not None:
        longest = max(length for _, length in runs)
        places = PackOffsets.of(cu_seqlens).derived(_places, q_THK.device)
        mixed_THK: Tensor = attend(
            *(x.to(dtype) for x in (q_THK, k_TGK, v_TGK)),
            *(places, places),
            *(longest, longest),
            window_size=(-1, 0),
            enable_gqa=q_THK.shape[1] != k_TGK.shape[1],
        )
        return mixed_THK
    lengths = [count * length for count, length in runs]
    queries, keys, values = (x.split(lengths) for x in (q_THK, k_TGK, v_TGK))
    return torch.cat(
        [
            _equal_sequences(q, k, v, count)
            for q, k, v, (count, _) in zip(queries, keys, values, runs, strict=True)
        ]
    )


def _lowered(x: Tensor) -> torch.dtype:
    """The dtype that autocast gives to what torch itself computes attention of."""
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


def _places(cu_seqlens: tuple[int, ...], device: torch.device) -> Tensor:
    """Offsets of the sequences on a device, without the empty ones."""
    kept = [0, *(b for a, b in itertools.pairwise(cu_seqlens) if b > a)]
    places = torch.tensor(kept, dtype=torch.int32)
    # From pinned memory, as otherwise the host would wait for the micro-batch before this one.
    return (
        places.pin_memory().to(device, non_blocking=True)
        if device.type == "cuda"
        else places.to(device)
    )


def _equal_runs(cu_seqlens: Sequence[int]) -> list[tuple[int, int]]:
    """`(how many, of which length)` for neighbours of equal length, without the empty ones.

    In packed rows most are whole rows, and so neighbours are computed as one batch.
    """
    lengths = (b - a for a, b in itertools.pairwise(cu_seqlens) if b > a)
    return [(len(list(same)), length) for length, same in itertools.groupby(lengths)]


def _equal_sequences(q: Tensor, k: Tensor, v: Tensor, count: int) -> Tensor:
    q_NHLK, k_NGLK, v_NGLK = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in (q, k, v))
    mixed_NHLK = F.scaled_dot_product_attention(
        q_NHLK, k_NGLK, v_NGLK, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
    )
    return mixed_NHLK.transpose(1, 2).flatten(0, 1)
