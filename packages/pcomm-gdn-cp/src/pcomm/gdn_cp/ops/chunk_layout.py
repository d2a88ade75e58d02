"""Packed sequences in chunks: where each token goes, and which chunks can be worked on together.

Each sequence is cut into chunks of `C` tokens from its own start, so what is computed for it does
not depend on its neighbours. Chunks are numbered by *step*: first the first chunk of every
sequence, longest sequence first, then the second chunks, and so on. The sequences that still have
a chunk at a step are then a prefix of that order, and their chunks lie side by side.
"""

# T tokens, N sequences, M chunks, C tokens of a chunk, H heads, D dimension of a head

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from pcomm.core.collectives.adjoint import with_adjoint
from pcomm.core.errors import ConfigError
from pcomm.gdn_cp.ops.derived import KeepsDerived
from pcomm.gdn_cp.ops.pack_offsets import PackOffsets

__all__ = ["ChunkIndices", "ChunkLayout", "default_chunk", "from_chunks", "to_chunks"]


def default_chunk(key_dim: int) -> int:
    """Tokens of a chunk for heads of this key or state dimension: 32, or 64 from 128 on.

    Longer chunks mean fewer states, of `key_dim` rows each, and more products between tokens,
    which short sequences waste on padding. Measured on CPU: `benchmarks/cores.py`.
    """
    return 64 if key_dim >= 128 else 32


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
    return chunks.masked_fill_(indices.padding_MC.view(-1, 1, layout.chunk, *[1] * len(rest)), 0)


def _gather_tokens(x_MHCD: Tensor, layout: ChunkLayout) -> Tensor:
    indices, (num_heads, chunk, *rest) = layout.indices(x_MHCD.device), x_MHCD.shape[1:]
    heads_H = torch.arange(num_heads, device=x_MHCD.device)
    rows_TH = (indices.chunk_T[:, None] * num_heads + heads_H) * chunk + indices.slot_T[:, None]
    tokens = x_MHCD.reshape(-1, *rest).index_select(0, rows_TH.flatten())
    return tokens.view(*rows_TH.shape, *rest)
