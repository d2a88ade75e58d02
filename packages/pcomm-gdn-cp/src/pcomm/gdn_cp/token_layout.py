"""Which rank holds which tokens of a pack between the layers, and index tensors of them."""

# R ranks, N sequences, t tokens of a rank, T of all that it works on

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from pcomm.core.errors import ConfigError, LayoutError, near_misses
from pcomm.core.exchange.positions import RowOrder, expand_ranges
from pcomm.core.layout import Layout
from pcomm.gdn_cp.pack_offsets import KeepsDerived, PackOffsets, check_offsets

__all__ = ["IndexTensors", "LayoutName", "LocalTokenIndices", "TokenIndices", "TokenLayout"]


LayoutName = Literal["zigzag", "contiguous"]
LAYOUTS: tuple[LayoutName, ...] = ("zigzag", "contiguous")


@dataclass(frozen=True)
class TokenLayout(KeepsDerived):
    """A pack of sequences and how its tokens lie on the ranks; integers only.

    With `zigzag` each sequence is cut into 2 x `size` equal chunks, of which rank r holds chunk r
    and the r-th last. A rank's tensor holds its two chunks of the first sequence, then those of the
    second, and so on. Under causal attention every rank then has the same work. With `contiguous`
    rank r holds the r-th of `size` equal ranges of the buffer, wherever sequences begin. Sequences
    may be empty. One rank holds all tokens as they are, whatever the lengths.

    Args:
        cu_seqlens: Offsets of the sequences, from 0 to the number of tokens of all ranks.
        size: Number of ranks.
        layout_name: `zigzag` or `contiguous`.

    Raises:
        ConfigError: No such layout.
        LayoutError: The offsets, or a length, do not fit the layout.
    """

    cu_seqlens: tuple[int, ...]
    size: int
    layout_name: LayoutName

    def __post_init__(self) -> None:
        if self.layout_name not in LAYOUTS:
            raise ConfigError(
                f"make_plan: layout={self.layout_name!r}",
                found="no such layout",
                why="A plan must know which tokens each rank holds between the layers.",
                fix=near_misses(str(self.layout_name), LAYOUTS),
            )
        # Here, so that a pack which does not fit is refused when the plan is made.
        if self.size < 1:
            raise LayoutError(
                self.layout_name,
                found=f"{self.size} ranks",
                why="Tokens lie on at least one rank.",
                fix="Pass the size of the context-parallel group.",
            )
        are_integers = {*map(type, self.cu_seqlens)} <= {int}
        check_offsets(f"{self.layout_name}: cu_seqlens", self.cu_seqlens, are_integers=are_integers)
        check_lengths = _check_zigzag if self.layout_name == "zigzag" else _check_contiguous
        check_lengths(self.cu_seqlens, self.size)

    @cached_property
    def layout(self) -> Layout:
        """The runs of tokens that each rank holds."""
        # The offsets are checked: thousands need not be looked at again.
        if self._chunks is None:
            layout = Layout.even(self.num_tokens, self.size)
        else:
            starts_RN2, lengths_RN2 = self._chunks
            edges_R = torch.stack([starts_RN2, starts_RN2 + lengths_RN2], -1).flatten(1).numpy()
            edges = (array("q", own.tobytes()) for own in edges_R)
            layout = Layout.of_edges(self.num_tokens, edges, are_sound=True)
        layout.adopt(RowOrder.of, self.row_order)
        return layout

    @cached_property
    def offsets(self) -> PackOffsets:
        """`cu_seqlens`, with the index tensors that cores make of whole sequences."""
        return PackOffsets.of(self.cu_seqlens)

    @property
    def num_tokens(self) -> int:
        """Tokens of all ranks together."""
        return self.cu_seqlens[-1]

    @property
    def local_tokens(self) -> int:
        """Tokens of each rank."""
        return self.num_tokens // self.size

    @property
    def num_sequences(self) -> int:
        """Sequences, empty ones included."""
        return len(self.cu_seqlens) - 1

    @property
    def order(self) -> Tensor:
        """The tokens of the first rank, then those of the second, and so on; on the CPU."""
        return self.row_order.order

    @cached_property
    def row_order(self) -> RowOrder:
        """The order of the layout, made without its thousands of runs, which few modes need."""
        with torch.inference_mode(False):
            if self._chunks is None:
                return RowOrder(torch.arange(self.num_tokens))
            starts_RN2, lengths_RN2 = self._chunks
            return RowOrder(expand_ranges(starts_RN2.flatten(), lengths_RN2.flatten()))

    @cached_property
    def _chunks(self) -> tuple[Tensor, Tensor] | None:
        """`[R, N, 2]` each: first token and length of the two chunks of each sequence on each rank.

        Empty sequences have none. None where every rank has one range.
        """
        if self.layout_name == "contiguous" or self.size == 1:
            return None
        with torch.inference_mode(False):
            offsets_N = torch.tensor([*dict.fromkeys(self.cu_seqlens)])
            chunk_N1 = (offsets_N.diff() // (2 * self.size))[:, None]
            early_R = torch.arange(self.size)
            place_R12 = torch.stack([early_R, 2 * self.size - 1 - early_R], -1)[:, None]
            starts_RN2 = offsets_N[:-1, None] + place_R12 * chunk_N1
            return starts_RN2, chunk_N1.expand_as(starts_RN2)

    def of_rank(self, rank: int) -> Tensor:
        """The tokens of `rank`, as they lie there; on the CPU."""
        first = rank * self.local_tokens
        return self.order.narrow(0, first, self.local_tokens).clone()

    def __reduce__(self) -> tuple[type[TokenLayout], tuple[tuple[int, ...], int, LayoutName]]:
        # Without what was derived: a pickle is integers.
        return TokenLayout, (self.cu_seqlens, self.size, self.layout_name)

    def local_cu_seqlens(self, rank: int) -> tuple[int, ...]:
        """Offsets, in the tensor of `rank`, of what it holds of each sequence."""
        if self.layout_name == "zigzag":
            return tuple(offset // self.size for offset in self.cu_seqlens)
        first = rank * self.local_tokens
        return tuple(min(max(o - first, 0), self.local_tokens) for o in self.cu_seqlens)


def _check_zigzag(offsets: tuple[int, ...], size: int) -> None:
    chunks = 2 * size
    wrong = [n for n, (a, b) in enumerate(pairwise(offsets)) if (b - a) % chunks]
    if wrong and size > 1:
        n = wrong[0]
        raise LayoutError(
            f"zigzag: {len(offsets) - 1} sequences over {size} ranks",
            found=f"sequence {n} has {offsets[n + 1] - offsets[n]} tokens; so {len(wrong)} in all "
            f"are no multiple of {chunks}",
            why=f"Each sequence is cut into {chunks} equal chunks, two for each rank.",
            fix=f"Pad every sequence to a multiple of {chunks}, or use the contiguous layout.",
        )


def _check_contiguous(offsets: tuple[int, ...], size: int) -> None:
    if offsets[-1] % size:
        raise LayoutError(
            f"contiguous: {offsets[-1]} tokens over {size} ranks",
            found=f"a remainder of {offsets[-1] % size}",
            why="Every rank holds an equal range of the buffer.",
            fix=f"Pad the buffer to a multiple of {size}, as a sequence of its own or of the last.",
        )


class IndexTensors:
    """Index tensors of one rank of a pack, kept for each device.

    Args:
        tokens: The pack and its layout.
        rank: This rank's place in the group.
    """

    def __init__(self, tokens: TokenLayout, rank: int) -> None:
        self.tokens, self.rank = tokens, rank
        self._known: dict[tuple[str, tuple[int, ...], torch.device], Tensor] = {}

    def on(self, device: torch.device, make: Callable[..., Tensor], *arguments: int) -> Tensor:
        """The tensor that the method `make` computes, on `device`; kept by the name of `make`."""
        key = (make.__name__, arguments, device)
        if key not in self._known:
            # A tensor made in inference mode could not be used in training, and these are kept.
            with torch.inference_mode(False):
                self._known[key] = make(*arguments).to(device)
        return self._known[key]


class TokenIndices(IndexTensors):
    """Some tokens of a pack in some order; here all of them in the order of the pack."""

    def core_tokens(self) -> Tensor:
        """`[T]`: the tokens by their places in the pack; int64 on the CPU."""
        return torch.arange(self.tokens.num_tokens)

    def core_positions(self) -> Tensor:
        """`[T]`: the place of each of these tokens in its sequence; int64 on the CPU."""
        return self.tokens.derived(_positions)[self.core_tokens()]


class LocalTokenIndices(TokenIndices):
    """The tokens that a rank holds between layers."""

    def core_tokens(self) -> Tensor:
        """This rank's tokens, in the order of its tensor."""
        return self.tokens.of_rank(self.rank)


def _positions(tokens: TokenLayout) -> Tensor:
    """The place of every token of the pack in its sequence."""
    offsets = torch.tensor(tokens.cu_seqlens)
    first = offsets[:-1].repeat_interleave(offsets.diff(), output_size=tokens.num_tokens)
    return torch.arange(tokens.num_tokens) - first
