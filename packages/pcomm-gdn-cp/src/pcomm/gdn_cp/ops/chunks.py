"""What both chunked cores share: chunks of a pack, states in their order, and reads of a state.

Each sequence is cut into chunks of `C` tokens from its own start, so what is computed for it does
not depend on its neighbours. Chunks are numbered by *step*: first the first chunk of every
sequence, longest sequence first, then the second chunks, and so on. The sequences that still have
a chunk at a step are then a prefix of that order, and their chunks lie side by side.
"""

# T tokens, N sequences, M chunks, C tokens of a chunk, H (value) heads, D dimension of a head,
# G key heads, R value heads for each key head, K key dim, V value dim

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from pcomm.core.collectives.autograd import with_adjoint
from pcomm.core.errors import ConfigError
from pcomm.gdn_cp.ops.entry import (
    apply_function,
    check_shape,
    differentiable_once,
    full_precision,
)
from pcomm.gdn_cp.pack_offsets import KeepsDerived, PackOffsets

__all__ = [
    "KERNEL_CHUNK",
    "ChunkLayout",
    "ChunkTables",
    "chunk_tables",
    "decay_from_start",
    "decay_to_end",
    "default_chunk",
    "from_chunks",
    "gradient_of_decays",
    "logs_of_decays",
    "pairwise_decay",
    "read_chunks",
    "side_by_side",
    "state_for_scan",
    "state_to_pack_order",
    "to_chunks",
]

# Tokens of a chunk of the Triton kernels, which invert matrices of this size.
KERNEL_CHUNK = 64


def default_chunk(key_dim: int, *, is_corrected: bool) -> int:
    """Tokens of a chunk for this key or state dimension: 64, or 32 for a narrow delta rule.

    Longer chunks mean fewer states, of `key_dim` rows each, and more products between tokens,
    which short sequences waste on padding. Measured on CPU: `benchmarks/cores.py`.

    Args:
        key_dim: Rows of a state.
        is_corrected: True for the delta rule, which also inverts a matrix of each chunk.
    """
    return 32 if is_corrected and key_dim < 128 else 64


@dataclass(frozen=True)
class ChunkLayout(KeepsDerived):
    """How a pack of sequences is cut into chunks: integers of the host, equal if their cause is.

    Args:
        cu_seqlens: Offsets of the sequences in the packed tokens, from 0 to the number of tokens;
            equal neighbours are an empty sequence.
        chunk: Tokens of a chunk.
    """

    cu_seqlens: tuple[int, ...]
    chunk: int

    @classmethod
    def of(cls, cu_seqlens: Sequence[int], chunk: int) -> ChunkLayout:
        """The layout of these offsets; those of a plan keep it, with its index tensors.

        Raises:
            ConfigError: The chunk has no tokens.
            LayoutError: The offsets do not start at 0, or decrease.
        """
        if chunk < 1:
            raise ConfigError(
                f"ChunkLayout.of: chunk={chunk}",
                found="a chunk without tokens",
                why="Sequences are cut into chunks of this many tokens.",
                fix="Use a positive number, such as 64.",
            )
        return PackOffsets.of(cu_seqlens).derived(cls, chunk)

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences together."""
        return self.cu_seqlens[-1]

    @property
    def num_sequences(self) -> int:
        """Sequences, empty ones included."""
        return len(self.cu_seqlens) - 1

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return tuple(stop - start for start, stop in pairwise(self.cu_seqlens))

    @cached_property
    def chunk_counts(self) -> tuple[int, ...]:
        """Chunks of each sequence."""
        return tuple(-(-length // self.chunk) for length in self.lengths)

    @cached_property
    def num_chunks(self) -> int:
        """Chunks of all sequences together."""
        return sum(self.chunk_counts)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The sequences, those with most chunks first and equals as they come."""
        return tuple(
            sorted(range(self.num_sequences), key=self.chunk_counts.__getitem__, reverse=True)
        )

    @cached_property
    def step_sizes(self) -> tuple[int, ...]:
        """For each step, how many sequences have a chunk left: a prefix of `order`."""
        longest = max(self.chunk_counts, default=0)
        ending = [0] * (longest + 1)
        for count in self.chunk_counts:
            ending[count] += 1
        active, sizes = self.num_sequences, []
        for step in range(longest):
            active -= ending[step]
            sizes.append(active)
        return tuple(sizes)

    @property
    def is_plain(self) -> bool:
        """Whether cutting the tokens every `chunk` places gives the chunks as they are."""
        return self.num_sequences == 1 and self.num_tokens % self.chunk == 0

    def indices(self, device: torch.device) -> ChunkIndices:
        """The index tensors on `device`, made once and kept with the layout.

        `Plan.prepare` calls this beforehand, so that no layer waits for the copy.
        """
        return self.derived(_indices, device)


class ChunkIndices(NamedTuple):
    """The index tensors of a layout on one device.

    Args:
        tokens_MC: The token of each place, int64; padding repeats a token of its own sequence.
        padding_MC: Mask of padding places, bool.
        chunk_T: The chunk of each token, int64.
        slot_T: The token's place in its chunk, int64.
        order_N: The sequences, those with most chunks first, int64.
        rank_N: Each sequence's place in `order_N`, int64.
    """

    tokens_MC: Tensor
    padding_MC: Tensor
    chunk_T: Tensor
    slot_T: Tensor
    order_N: Tensor
    rank_N: Tensor


def _indices(layout: ChunkLayout, device: torch.device) -> ChunkIndices:
    starts_N = torch.tensor(layout.cu_seqlens[:-1], dtype=torch.int64)
    lengths_N = torch.tensor(layout.lengths, dtype=torch.int64)
    order_N = torch.tensor(layout.order, dtype=torch.int64)
    sizes_S = torch.tensor(layout.step_sizes, dtype=torch.int64)
    num_steps, chunk = len(layout.step_sizes), layout.chunk

    first_S = sizes_S.cumsum(0) - sizes_S
    step_M = torch.arange(num_steps).repeat_interleave(sizes_S)
    sequence_M = order_N[torch.arange(layout.num_chunks) - first_S[step_M]]
    place_MC = step_M[:, None] * chunk + torch.arange(chunk)
    length_M1 = lengths_N[sequence_M][:, None]
    padding_MC = place_MC >= length_M1
    tokens_MC = starts_N[sequence_M][:, None] + place_MC.minimum(length_M1 - 1)

    is_token_MC = ~padding_MC
    place_of_T = torch.empty(layout.num_tokens, dtype=torch.int64)
    place_of_T[tokens_MC[is_token_MC]] = is_token_MC.flatten().nonzero().flatten()
    chunk_T, slot_T = place_of_T // chunk, place_of_T % chunk
    found = (tokens_MC, padding_MC, chunk_T, slot_T, order_N, order_N.argsort())
    return ChunkIndices(*(x.to(device) for x in found))


class ChunkTables(NamedTuple):
    """What the Triton kernels look up, int32; the chunks of a sequence lie side by side.

    Args:
        chunks_M4: First token of each chunk, the one behind its last, the one behind the last of
            its sequence, and the sequence.
        sequences_N4: First token of each sequence, the one behind its last, its first chunk, and
            its number of chunks.
    """

    chunks_M4: Tensor
    sequences_N4: Tensor


def chunk_tables(offsets: tuple[int, ...], device: torch.device) -> ChunkTables:
    """The tables of a pack on a device; kept by `PackOffsets.derived`."""
    chunks, sequences = list[int](), list[int]()
    for number, (start, stop) in enumerate(pairwise(offsets)):
        firsts = range(start, stop, KERNEL_CHUNK)
        sequences += (start, stop, len(chunks) // 4, len(firsts))
        for first in firsts:
            chunks += (first, min(first + KERNEL_CHUNK, stop), stop, number)
    made = (torch.tensor(x, dtype=torch.int32).view(-1, 4) for x in (chunks, sequences))
    return ChunkTables(*(x.to(device) for x in made))


def to_chunks(x_THD: Tensor, layout: ChunkLayout) -> Tensor:
    """The tokens of every chunk, head by head, with zeros in the places of padding.

    Args:
        x_THD: `[T, H, ...]`, any dtype and strides.
        layout: Layout of `T` tokens.

    Returns:
        `[M, H, C, ...]`, contiguous, dtype of `x_THD`. Its gradient goes back by a gather, so it
        is the same in every run, and what arrives at padding is ignored.
    """
    if layout.is_plain:
        cut = x_THD.reshape(layout.num_chunks, layout.chunk, *x_THD.shape[1:])
        return cut.transpose(1, 2).contiguous()
    return with_adjoint(
        x_THD, lambda x: _gather_chunks(x, layout), lambda grad: from_chunks(grad, layout)
    )


def from_chunks(x_MHCD: Tensor, layout: ChunkLayout) -> Tensor:
    """The tokens in the order of the pack: what `to_chunks` undoes, without the padding.

    Args:
        x_MHCD: `[M, H, C, ...]`, any dtype and strides.
        layout: The layout that `to_chunks` was given.

    Returns:
        `[T, H, ...]`, contiguous.
    """
    if layout.is_plain:
        return x_MHCD.transpose(1, 2).flatten(0, 1).contiguous()
    return with_adjoint(
        x_MHCD, lambda x: _gather_tokens(x, layout), lambda grad: to_chunks(grad, layout)
    )


def _gather_chunks(x_THD: Tensor, layout: ChunkLayout) -> Tensor:
    indices, (num_heads, *rest) = layout.indices(x_THD.device), x_THD.shape[1:]
    heads_H1 = torch.arange(num_heads, device=x_THD.device)[:, None]
    rows_MHC = indices.tokens_MC[:, None] * num_heads + heads_H1
    chunks = x_THD.reshape(-1, *rest).index_select(0, rows_MHC.flatten())
    chunks = chunks.view(*rows_MHC.shape, *rest)
    if layout.num_chunks * layout.chunk == layout.num_tokens:
        return chunks
    return chunks.masked_fill_(indices.padding_MC.view(-1, 1, layout.chunk, *[1] * len(rest)), 0)


def _gather_tokens(x_MHCD: Tensor, layout: ChunkLayout) -> Tensor:
    indices, (num_heads, chunk, *rest) = layout.indices(x_MHCD.device), x_MHCD.shape[1:]
    heads_H = torch.arange(num_heads, device=x_MHCD.device)
    rows_TH = (indices.chunk_T[:, None] * num_heads + heads_H) * chunk + indices.slot_T[:, None]
    tokens = x_MHCD.reshape(-1, *rest).index_select(0, rows_TH.flatten())
    return tokens.view(*rows_TH.shape, *rest)


# -- states, from the shape that callers have to the one of the scans ------------------------
#
# Callers have `[N, H, K, V]` in the order of the pack. The scans want the longest sequence first,
# and the value heads of a key head side by side behind the key dimension, `[N, G, K, R, V]`.


def state_for_scan(
    asked: str,
    state_NHKV: Tensor | None,
    layout: ChunkLayout,
    like: Tensor,
    num_groups: int,
    key_dim: int,
) -> Tensor:
    """The state before each sequence as the scans take it, zeros where there is none.

    Args:
        asked: Name of the call, for the error.
        state_NHKV: `[N, H, K, V]` in the order of the pack, or nothing.
        layout: Chunks of the pack.
        like: `[M, G, R, C, V]` values: their dtype and device are the scan's.
        num_groups: `G`.
        key_dim: `K`.

    Returns:
        `[N, G, K, R, V]`, longest sequence first.

    Raises:
        ConfigError: The state has another shape.
    """
    num_repeats, width = like.shape[2], like.shape[-1]
    num_sequences = layout.num_sequences
    if state_NHKV is None:
        return like.new_zeros(num_sequences, num_groups, key_dim, num_repeats, width)
    shape = (num_sequences, num_groups * num_repeats, key_dim, width)
    check_shape(f"{asked}: initial_state", state_NHKV, shape)
    state = state_NHKV.to(like.dtype)
    if num_sequences > 1:
        state = state.index_select(0, layout.indices(like.device).order_N)
    state = state.reshape(num_sequences, num_groups, num_repeats, key_dim, width)
    return state.transpose(2, 3).contiguous()


def state_to_pack_order(state_NGKRV: Tensor, layout: ChunkLayout) -> Tensor:
    """`[N, H, K, V]` in the order of the pack: what `state_for_scan` undoes."""
    state = state_NGKRV.transpose(2, 3).flatten(1, 2)
    if layout.num_sequences > 1:
        return state.index_select(0, layout.indices(state.device).rank_N)
    return state.contiguous()


# -- what queries read from a decaying state, chunk by chunk ---------------------------------
#
# With the state that enters the chunk, S, and the values v_j that the chunk has written under keys
# k_j, token i reads o_i = e^{c_i} S^T q_i + sum over j <= i of e^{c_i - c_j} (q_i k_j) v_j, where c
# is the logarithm of the decay since the chunk began. Only differences c_i - c_j <= 0 are ever
# exponentiated, and the others are masked before, so that nothing overflows in either direction.


def logs_of_decays(g_MHC: Tensor, num_key_heads: int) -> tuple[Tensor, Tensor]:
    """The logarithm of each token's decay, and that of the decay from the start of its chunk on.

    Args:
        g_MHC: `[M, H, C]`, logarithm of each token's decay, at most 0; zero where padded.
        num_key_heads: `G`, which divides `H`.

    Returns:
        `[M, G, R, C]` each. A decay that the dtype cannot tell from 0 counts as its smallest
        number, so that minus infinity is allowed and large values cost the others no digits. The
        second one is a constant for autograd: see `gradient_of_decays`.
    """
    kind = torch.finfo(g_MHC.dtype)
    least = math.log(kind.smallest_normal * kind.eps)
    num_chunks, num_heads, chunk = g_MHC.shape
    shape = (num_chunks, num_key_heads, num_heads // num_key_heads, chunk)
    g_MGRC = g_MHC.clamp(min=least).view(shape)
    return g_MGRC, g_MGRC.detach().cumsum(-1)


def decay_from_start(decay_MGRC: Tensor) -> Tensor:
    """`[M, G, R, C]`: the decay from the start of the chunk to each token, it included."""
    return _decays(decay_MGRC.detach().clone())


def decay_to_end(decay_MGRC: Tensor) -> tuple[Tensor, Tensor]:
    """`[M, G, R, C]` from each token to the end of its chunk, `[M, G, 1, R, 1]` of whole chunks."""
    to_end = _decays(decay_MGRC[..., -1:] - decay_MGRC)
    return to_end, _decays(decay_MGRC[:, :, None, :, -1:].clone())


def _decays(log: Tensor) -> Tensor:
    """`exp(log)` in the place of `log`, and 0 below the square of a rounding, 1e-14 in fp32.

    What is left of a token then changes no digit of what newer ones write. Smaller decays, and
    products of them, would be denormal numbers, with which processors are a hundred times slower.
    """
    least = 2 * math.log(torch.finfo(log.dtype).eps)
    return F.threshold(log, least, -math.inf, inplace=True).exp_()


def pairwise_decay(decay_MGRC: Tensor) -> Tensor:
    """`[M, G, R, C, C]`: the decay from token j to token i, zero where j comes after i.

    A constant for autograd: the functions that use it know its gradient.
    """
    decay, chunk = decay_MGRC.detach(), decay_MGRC.shape[-1]
    later_CC = torch.ones(chunk, chunk, dtype=torch.bool, device=decay.device).triu(1)
    log_MGRCC = decay[..., :, None] - decay[..., None, :]
    return _decays(log_MGRCC.masked_fill_(later_CC, -torch.inf))


def gradient_of_decays(
    pairs_MGRCC: Tensor | None, started_MGRC: Tensor | None, ending_MGRC: Tensor | None
) -> Tensor:
    """What the logarithm of each token's decay gets, from terms that have their decays already.

    The term of tokens i and j has passed the decay of every token t from j + 1 to i, and each of
    these gets it. Terms are only added, so an error is a rounding of what the decays leave over.
    The sum over i less that over j, as in arXiv 2312.06635, would cost less; but behind strong
    decays, what is left of the two is a rounding of terms that have passed none.

    Args:
        pairs_MGRCC: Terms that decayed from token j to token i, if there are any; those of
            j >= i do not count.
        started_MGRC: Terms that decayed from the start of the chunk to token i, if any.
        ending_MGRC: Terms that decayed from token j to the end of the chunk, if any.

    Returns:
        `[M, G, R, C]`.
    """
    total = None if started_MGRC is None else started_MGRC.flip(-1).cumsum(-1).flip(-1)
    # What has passed the token behind each.
    passed = [] if ending_MGRC is None else [ending_MGRC.cumsum(-1)]
    if pairs_MGRCC is not None:
        passed.append(pairs_MGRCC.cumsum(-1).tril_(-1).sum(-2))
    for x in passed:
        moved = F.pad(x[..., :-1], (1, 0))
        total = moved if total is None else total.add_(moved)
    assert total is not None
    return total


def read_chunks(
    q_MGCK: Tensor,
    k_MGCK: Tensor,
    values_MGRCV: Tensor,
    states_MGKRV: Tensor,
    g_MGRC: Tensor,
    decay_MGRC: Tensor,
    pairwise_MGRCC: Tensor,
) -> Tensor:
    """What each token reads from the state after its own write.

    Args:
        q_MGCK: `[M, G, C, K]` queries, scaled.
        k_MGCK: `[M, G, C, K]` keys.
        values_MGRCV: `[M, G, R, C, V]`, what each token wrote under its key.
        states_MGKRV: `[M, G, K, R, V]`, the state that enters each chunk.
        g_MGRC: `[M, G, R, C]` first of `logs_of_decays`, which gets the gradient of all decays.
        decay_MGRC: `[M, G, R, C]` second of them.
        pairwise_MGRCC: `pairwise_decay` of it.

    Returns:
        `[M, G, R, C, V]`, differentiable once in everything but the last two.
    """
    tensors = (q_MGCK, k_MGCK, values_MGRCV, states_MGKRV, g_MGRC, decay_MGRC, pairwise_MGRCC)
    read: Tensor = apply_function(_ReadChunks, *tensors)
    return read


class _ReadChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        values: Tensor,
        states: Tensor,
        g: Tensor,
        decay: Tensor,
        pairs: Tensor,
    ) -> Tensor:
        with full_precision(q):
            scores = (q @ k.mT).unsqueeze(2) * pairs
            wide = (q @ states.flatten(-2)).unflatten(-1, states.shape[-2:])
            of_state = wide.transpose(2, 3) * decay_from_start(decay).unsqueeze(-1)
            read = (scores @ values).add_(of_state)
        ctx.save_for_backward(q, k, values, states, decay, pairs, of_state)
        return read

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, values, states, decay, pairs, of_state = ctx.saved_tensors
        (grad,) = grads
        with full_precision(q):
            scores = (q @ k.mT).unsqueeze(2) * pairs
            grad_values = scores.mT @ grad
            products = grad @ values.mT
            grad_g = gradient_of_decays(scores.mul_(products), (grad * of_state).sum(-1), None)
            grad_pairs = products.mul_(pairs).sum(2)
            decayed = side_by_side(grad, decay_from_start(decay))
            grad_q = grad_pairs @ k
            grad_q += decayed @ states.flatten(-2).mT
            grad_k = grad_pairs.mT @ q
            grad_states = (q.mT @ decayed).view_as(states)
        return grad_q, grad_k, grad_values, grad_states, grad_g, None, None


def side_by_side(x_MGRCV: Tensor, factor_MGRC: Tensor) -> Tensor:
    """`[M, G, C, R V]`: `x` times `factor`, the value heads of a key head beside each other.

    So one product with the keys serves all of them, and the keys need no copies.
    """
    num_chunks, num_groups, num_repeats, chunk, width = x_MGRCV.shape
    wide = x_MGRCV.new_empty(num_chunks, num_groups, chunk, num_repeats, width)
    torch.mul(x_MGRCV.transpose(2, 3), factor_MGRC.transpose(2, 3).unsqueeze(-1), out=wide)
    return wide.flatten(-2)
