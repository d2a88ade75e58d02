"""One form of the exchange on one rank, and the numbers that every form has to deliver.

The core is left out: its inputs are looked at, and what goes back is a prepared tensor. So a case
is what a layer does to bring its projections to the core and the core's output back, forward and
backward, and nothing else.
"""

# t tokens of this rank, T of all, W columns of all sections with z, V columns of the output

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, pairwise

import torch
from torch import Tensor

from pcomm.gdn_cp.bench.settings import SPEC

__all__ = ["WIDTHS", "Case", "Numbers", "held_chunks", "held_rows"]

Tensors = tuple[Tensor, ...]
# From the sections of this rank's tokens and the output of its core.
Move = Callable[[Tensor, Tensor], tuple[Tensors, Tensor]]

# Sections in the order of the projection: queries, keys, values, the gate z, b, a.
WIDTHS = (
    *(section.width for section in SPEC.sections[:3]),
    SPEC.output.width,
    *(section.width for section in SPEC.sections[3:]),
)


@dataclass(frozen=True)
class Case:
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


class Numbers:
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

    def by_heads(self, move: Move, parts: Callable[[Tensor], Tensors] | None = None) -> Case:
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
    ) -> Case:
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

        return Case(
            (x, y),
            forward,
            (*parts(self.sections_grad_TW), self.held(self.output_grad_TV)),
            lambda: (*parts(self.sections_TW), self.held(self.output_TV), *leaf_grads()),
        )


def held_chunks(cu_seqlens: tuple[int, ...], rank: int, size: int) -> list[range]:
    """The chunks of `rank` in the zigzag layout, sequence by sequence; written apart from plans."""
    found = []
    for start, stop in pairwise(cu_seqlens):
        chunk = (stop - start) // (2 * size)
        for place in (rank, 2 * size - 1 - rank):
            found.append(range(start + place * chunk, start + (place + 1) * chunk))
    return found


def held_rows(cu_seqlens: tuple[int, ...], rank: int, size: int) -> Tensor:
    """The tokens of these chunks, in their order."""
    return torch.tensor([*chain.from_iterable(held_chunks(cu_seqlens, rank, size))])
