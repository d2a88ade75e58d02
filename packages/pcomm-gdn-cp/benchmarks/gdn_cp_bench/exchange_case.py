"""One form of the exchange on one rank, the numbers it has to deliver, and the two baselines.

The core is left out: its inputs are looked at, and what goes back is a prepared tensor. So a case
is what a layer does to bring its projections to the core and the core's output back, forward and
backward, and nothing else.
"""

# t tokens of this rank, T of all, s of one sequence here, S on all ranks, R ranks, W columns of all
# sections with z, V columns of the output, C columns

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

import torch
from torch import Tensor

from gdn_cp_bench.settings import KEY_HEADS
from pcomm.core.collectives.protocol import Collectives
from pcomm.gdn_cp.specs import GdnSpec

Tensors = tuple[Tensor, ...]
# From the sections of this rank's tokens and the output of its core.
Move = Callable[[Tensor, Tensor], tuple[Tensors, Tensor]]

# An eighth of the widths of a Gated DeltaNet layer of Qwen3-Next (16 and 32 heads of 128, hidden
# states of 2048), so that the ratios of what is sent are nearly its own.
SPEC = GdnSpec(num_key_heads=KEY_HEADS, num_value_heads=8, key_dim=64, value_dim=64)
# Sections in the order of the projection: queries, keys, values, the gate z, b, a.
WIDTHS = (
    *(section.width for section in SPEC.sections[:3]),
    SPEC.output.width,
    *(section.width for section in SPEC.sections[3:]),
)


@dataclass(frozen=True)
class ExchangeCase:
    """A form of the exchange that can be run again and again.

    Args:
        leaves: Inputs of `forward`, at whose gradients backward ends.
        forward: Returns the core's inputs, and the core's output back at its tokens.
        arriving: The gradients of these.
        expected: Results that `run` must return; None in place of one that is not compared.
    """

    leaves: Tensors
    forward: Callable[[], Tensors]
    arriving: Tensors
    expected: Callable[[], tuple[Tensor | None, ...]]

    def run(self) -> Tensors:
        """Forward and backward: what came out, then the gradients of the leaves."""
        outputs = self.forward()
        return (*outputs, *self.backward(outputs))

    def backward(self, outputs: Tensors) -> Tensors:
        """The gradients of the leaves."""
        return torch.autograd.grad(outputs, self.leaves, self.arriving)

    def differs(self, found: Tensors) -> str:
        """Where `found` is not what is expected; empty if nowhere.

        Numbers only move, or are added up with few others, so rounding is all that is allowed.
        """
        for place, (ours, wanted) in enumerate(zip(found, self.expected(), strict=True)):
            if wanted is None:
                continue
            if ours.shape != wanted.shape:
                return f"tensor {place} has shape {tuple(ours.shape)}, not {tuple(wanted.shape)}"
            if not torch.allclose(ours, wanted, rtol=1e-6, atol=0.0):
                worst = float((ours - wanted).detach().abs().max())
                return f"tensor {place} is off by {worst:.3g}"
        return ""


class CaseTensors:
    """Sections and outputs of a whole pack, and what of them a rank has between layers.

    Args:
        cu_seqlens: Offsets of the sequences.
        rank: This rank.
        size: Number of ranks.
    """

    def __init__(self, cu_seqlens: tuple[int, ...], rank: int, size: int) -> None:
        self.cu_seqlens, self.rank, self.size = cu_seqlens, rank, size
        self.rows_t = held_rows(cu_seqlens, rank, size)
        # The same on every rank, so that each knows what the others send.
        generator = torch.Generator().manual_seed(1)

        def numbers(width: int) -> Tensor:
            return torch.rand(cu_seqlens[-1], width, generator=generator) + 0.5

        self.sections_TW, self.sections_grad_TW = numbers(sum(WIDTHS)), numbers(sum(WIDTHS))
        self.output_TV, self.output_grad_TV = numbers(WIDTHS[3]), numbers(WIDTHS[3])

    def held(self, whole: Tensor) -> Tensor:
        """The rows of this rank, as they lie between layers."""
        return whole.index_select(0, self.rows_t)

    def leaf(self, x: Tensor) -> Tensor:
        """A copy of its own whose gradient is asked for."""
        return x.detach().clone().requires_grad_()

    def head_columns(self, whole_TW: Tensor) -> list[Tensor]:
        """`[T, W / ranks]` of each section: the heads of this rank."""
        return [part.chunk(self.size, -1)[self.rank] for part in whole_TW.split(WIDTHS, -1)]

    def core_parts(self, whole_TW: Tensor) -> Tensors:
        """What a core with this rank's heads wants: q, k, v side by side, then z, b and a."""
        q, k, v, *gates = self.head_columns(whole_TW)
        return torch.cat([q, k, v], -1), *(gate.contiguous() for gate in gates)

    def own_heads(self, whole_TV: Tensor) -> Tensor:
        """`[T, V / ranks]`: the output of the heads of this rank."""
        return whole_TV.chunk(self.size, -1)[self.rank]

    def by_heads(
        self, move: Move, parts: Callable[[Tensor], Tensors] | None = None
    ) -> ExchangeCase:
        """A form that brings sections to the ranks that have their heads, and the output back.

        Args:
            move: Call that moves `[t, W]` and the core's output `[T, V / ranks]` to the core's
                parts and the output `[t, V]`.
            parts: Finds what `move` delivers in the sections of the whole pack, `core_parts` by
                default.
        """

        def leaf_grads() -> Tensors:
            return self.held(self.sections_grad_TW), self.own_heads(self.output_grad_TV)

        output = self.own_heads(self.output_TV)
        return self.case(output, move, parts or self.core_parts, leaf_grads)

    def case(
        self,
        output: Tensor,
        move: Move,
        parts: Callable[[Tensor], Tensors],
        leaf_grads: Callable[[], Tensors],
    ) -> ExchangeCase:
        """A form that moves the sections of this rank's tokens, and brings `output` back.

        Args:
            output: Output of the core of this rank.
            move: Call that moves `[t, W]` and the output to the core's parts and `[t, V]`.
            parts: Finds what `move` delivers in the sections of the whole pack.
            leaf_grads: Finds the gradients of the sections and of the output.
        """
        x, y = self.leaf(self.held(self.sections_TW)), self.leaf(output)

        def forward() -> Tensors:
            moved, back = move(x, y)
            return *moved, back

        return ExchangeCase(
            (x, y),
            forward,
            (*parts(self.sections_grad_TW), self.held(self.output_grad_TV)),
            lambda: (*parts(self.sections_TW), self.held(self.output_TV), *leaf_grads()),
        )


def held_rows(cu_seqlens: tuple[int, ...], rank: int, size: int) -> Tensor:
    """The tokens of these chunks, in their order."""
    return torch.tensor([*chain.from_iterable(held_chunks(cu_seqlens, rank, size))])


def held_chunks(cu_seqlens: tuple[int, ...], rank: int, size: int) -> list[range]:
    """The chunks of `rank` in the zigzag layout, sequence by sequence; written apart from plans."""
    found = []
    for start, stop in pairwise(cu_seqlens):
        chunk = (stop - start) // (2 * size)
        for place in (rank, 2 * size - 1 - rank):
            found.append(range(start + place * chunk, start + (place + 1) * chunk))
    return found


def fused_exchange(
    sections_tW: Tensor,
    output_TV: Tensor,
    cu_seqlens_N: Tensor,
    columns_W: Tensor,
    collectives: Collectives,
) -> tuple[tuple[Tensor, ...], Tensor]:
    """The core's parts (q, k, v side by side, then z, b, a), and its output back at my tokens.

    Args:
        sections_tW: `[t, W]`, all sections of my tokens.
        output_TV: `[T, V / R]`, what the core returns for my heads.
        cu_seqlens_N: Offsets of the sequences.
        columns_W: `column_order`.
        collectives: Differentiable collectives.
    """
    size = collectives.size
    rows_T, back_T = _row_order(cu_seqlens_N, size)
    by_rank = sections_tW.index_select(-1, columns_W)
    message = torch.cat(by_rank.split(by_rank.shape[-1] // size, -1))
    pack_TW = collectives.all_to_all(message).index_select(0, rows_T)
    widths = [width // size for width in WIDTHS]
    parts = pack_TW.split([sum(widths[:3]), *widths[3:]], -1)
    received = collectives.all_to_all(output_TV.index_select(0, back_T))
    return parts, torch.cat(received.chunk(size), -1)


def column_order(size: int) -> Tensor:
    """`[W]`: the columns by the rank that gets them, and for each rank section by section."""
    columns = torch.arange(sum(WIDTHS)).split(WIDTHS)
    return torch.cat([section.view(size, -1) for section in columns], -1).flatten()


def _row_order(cu_seqlens_N: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """For each token of the pack its row among those received, and the inverse of that."""
    token_T = torch.arange(int(cu_seqlens_N[-1]))
    sequence_T = torch.bucketize(token_T, cu_seqlens_N[1:], right=True)
    start_T = cu_seqlens_N[sequence_T]
    width_T = (cu_seqlens_N[sequence_T + 1] - start_T) // (2 * size)
    place_T = token_T - start_T
    chunk_T = place_T // width_T
    # Chunks in the order in which the ranks hold them, two for each.
    slot_T = torch.where(chunk_T < size, 2 * chunk_T, 4 * size - 2 * chunk_T - 1)
    local = len(token_T) // size
    rows_T = slot_T // 2 * local + start_T // size + slot_T % 2 * width_T + place_T % width_T
    back_T = torch.empty_like(rows_T)
    back_T[rows_T] = token_T
    return rows_T, back_T


def sequence_loop(
    sections_tW: Tensor,
    output_TV: Tensor,
    cu_seqlens: tuple[int, ...],
    cut: Cut,
    collectives: Collectives,
) -> tuple[tuple[Tensor, ...], Tensor]:
    """The core's parts (q, k, v side by side, then z, b, a), and its output back at my tokens.

    Args:
        sections_tW: `[t, W]`, all sections of my tokens.
        output_TV: `[T, V / R]`, what the core returns for my heads.
        cu_seqlens: Offsets of the sequences.
        cut: Splits them into sections.
        collectives: Differentiable collectives.
    """
    size = collectives.size
    lengths = [stop - start for start, stop in pairwise(cu_seqlens)]
    local = [length // size for length in lengths]
    whole = [_to_heads(x_sW, collectives) for x_sW in cut(sections_tW, local)]
    widths = [width // size for width in WIDTHS]
    parts = torch.cat(whole).split([sum(widths[:3]), *widths[3:]], -1)
    back = [_from_heads(y_SC, collectives) for y_SC in cut(output_TV, lengths)]
    return parts, torch.cat(back)


Cut = Callable[[Tensor, list[int]], Sequence[Tensor]]


def slices(pack: Tensor, lengths: list[int]) -> list[Tensor]:
    """The sequences of these lengths, a slice for each."""
    return [pack[start:stop] for start, stop in pairwise(accumulate(lengths, initial=0))]


def split(pack: Tensor, lengths: list[int]) -> Sequence[Tensor]:
    """The same with one backward for all."""
    parts: Sequence[Tensor] = pack.split(lengths)
    return parts


def _to_heads(x_sW: Tensor, collectives: Collectives) -> Tensor:
    """`[S, W / R]`: one sequence with my heads, in its own order."""
    size, parts = collectives.size, []
    for section in x_sW.split(WIDTHS, -1):
        message_RsC = section.unflatten(-1, (size, -1)).transpose(0, 1)
        parts.append(collectives.all_to_all(message_RsC))
    received_RsW = torch.cat(parts, -1)
    # Rank r sent its chunk r, then the r-th last.
    early, late = received_RsW.chunk(2, 1)
    return torch.cat([early, late.flip(0)]).flatten(0, 1)


def _from_heads(y_SC: Tensor, collectives: Collectives) -> Tensor:
    """`[s, V]`: my tokens of one sequence, with all heads."""
    early, late = y_SC.unflatten(0, (2 * collectives.size, -1)).chunk(2)
    received_RsC = collectives.all_to_all(torch.cat([early, late.flip(0)], 1))
    return received_RsC.transpose(0, 1).flatten(1)
