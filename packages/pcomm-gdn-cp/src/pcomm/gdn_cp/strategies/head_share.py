"""Which heads of each projection a rank works on, its slices of the parameters, and what it sends.

Value heads are split evenly. A key head (or group) serves several consecutive value heads; where
those lie on several ranks, each of them gets a copy of the key head. Every rank then has a smaller
mixer of the same kind: whole groups of value heads, one key head for each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pcomm.core.errors import ConfigError, LayoutError, near_misses
from pcomm.core.exchange.fast import ColumnShards
from pcomm.gdn_cp.specs import Section, Spec

__all__ = ["HeadShare", "SectionShare", "Traffic"]


@dataclass(frozen=True)
class Traffic:
    """The collectives of one mixer in one layer, and the bytes that one rank sends in them.

    Args:
        forward: Names of the collectives of forward, in order.
        backward: Names of the collectives of backward, in order.
        forward_bytes: Bytes that this rank has to send to others in forward.
        backward_bytes: Bytes that this rank has to send to others in backward.
    """

    forward: tuple[str, ...] = ()
    backward: tuple[str, ...] = ()
    forward_bytes: int = 0
    backward_bytes: int = 0

    @property
    def num_collectives(self) -> int:
        """Number of collectives, forward and backward."""
        return len(self.forward) + len(self.backward)

    @property
    def sent_bytes(self) -> int:
        """Bytes, forward and backward."""
        return self.forward_bytes + self.backward_bytes


@dataclass(frozen=True)
class SectionShare:
    """How the heads of one section are dealt out.

    Args:
        section: The whole section.
        copies: Number of times each head is repeated before the ranks take equal shards.
        num_heads: Number of heads of a rank, copies counted.
    """

    section: Section
    copies: int
    num_heads: int

    @property
    def width(self) -> int:
        """Columns of a rank."""
        return self.num_heads * self.section.head_width

    @property
    def columns(self) -> ColumnShards:
        """The same for an exchange: a unit is a head."""
        num_heads = self.section.num_heads
        num_ranks = num_heads * self.copies // self.num_heads
        return ColumnShards(num_heads, self.section.head_width, self.copies, num_ranks)

    def heads(self, rank: int) -> tuple[int, ...]:
        """The heads of `rank`, by their numbers in the whole section."""
        first = rank * self.num_heads
        return tuple(i // self.copies for i in range(first, first + self.num_heads))


@dataclass(frozen=True)
class HeadShare:
    """The heads of one rank of `size`.

    Args:
        spec: The whole mixer.
        size: Number of ranks that share its heads; 1 where every rank has all of them.
        rank: Rank of the group whose heads these are.

    Raises:
        LayoutError: The ranks do not divide the heads of the output.
    """

    spec: Spec
    size: int
    rank: int

    def __post_init__(self) -> None:
        num_heads = self.spec.output.num_heads
        if num_heads % self.size:
            raise LayoutError(
                f"make_plan: strategy 'heads' for {self.spec}",
                found=f"{num_heads} heads over {self.size} ranks",
                why="Every rank works on the same number of whole heads, on at least one.",
                fix=f"Use a context-parallel size that divides {num_heads}, or strategy "
                f"{' or '.join(_others(self.spec))}, which need no heads to divide.",
            )

    @cached_property
    def sections(self) -> tuple[SectionShare, ...]:
        """The sections that travel to heads, in the order of the specification."""
        return tuple(self._share(section) for section in self.spec.sections)

    @cached_property
    def output(self) -> SectionShare:
        """The output."""
        return self._share(self.spec.output)

    def heads(self, name: str) -> tuple[int, ...]:
        """The heads of a section on this rank; a key head may be there more than once."""
        return self._find(name).heads(self.rank)

    def take(self, parameter: Tensor, names: str | Sequence[str], *, dim: int = 0) -> Tensor:
        """This rank's slice of a parameter that has an entry for each head or each column.

        Differentiable: the gradient is zero outside the slice, so that the sum over all ranks is
        the gradient of the whole parameter.

        Args:
            parameter: Whole along `dim`, with as many entries there as the sections have heads,
                or columns.
            names: A section, or the sections that lie side by side along `dim`, as
                `("q", "k", "v")` do in the weight of a convolution.
            dim: Dimension along which the heads lie.

        Raises:
            ConfigError: No such section.
            LayoutError: `parameter` has another length along `dim`.
        """
        shares = [self._find(name) for name in ([names] if isinstance(names, str) else names)]
        by_width = [share.section.width for share in shares]
        by_head = [share.section.num_heads for share in shares]
        length = parameter.shape[dim]
        if length not in (sum(by_width), sum(by_head)):
            raise LayoutError(
                f"HeadShare.take: {names!r}",
                found=f"shape {tuple(parameter.shape)}, so {length} along dim {dim}",
                why=f"The sections have {sum(by_head)} heads and {sum(by_width)} columns.",
                fix="Pass the whole parameter, and the dimension along which its heads lie.",
            )
        if self.size == 1:
            return parameter
        sizes = by_width if length == sum(by_width) else by_head
        parts = parameter.split(sizes, dim)
        slices = [self._slice(p, share, dim) for p, share in zip(parts, shares, strict=True)]
        return slices[0] if len(slices) == 1 else torch.cat(slices, dim)

    def shapes(self, names: Sequence[str]) -> list[tuple[int, int]]:
        """Number of this rank's heads, and their width, of each of these sections.

        Args:
            names: The sections.

        Raises:
            ConfigError: No such section.
        """
        shares = [self._find(name) for name in names]
        widths = [(share.width, share.section.head_width) for share in shares]
        return [(width // of_head, of_head) for width, of_head in widths]

    def split(self, columns_TW: Tensor, names: Sequence[str]) -> list[Tensor]:
        """This rank's heads of sections that lie side by side, `[T, heads, head width]` each.

        Args:
            columns_TW: Result of `Plan.to_heads` with these sections fused, or of a convolution
                of it.
            names: The sections, in their order along the columns.

        Raises:
            ConfigError: No such section.
            LayoutError: Another number of columns.
        """
        shares = [self._find(name) for name in names]
        widths = [share.width for share in shares]
        if columns_TW.shape[-1] != sum(widths):
            raise LayoutError(
                f"HeadShare.split: {tuple(names)}",
                found=f"shape {tuple(columns_TW.shape)}",
                why=f"On rank {self.rank} of {self.size} these have {widths} columns.",
                fix="Name the sections that lie side by side, in their order.",
            )
        parts = zip(columns_TW.split(widths, -1), shares, strict=True)
        return [part.unflatten(-1, (-1, share.section.head_width)) for part, share in parts]

    def gathered_columns(self, names: Sequence[str]) -> list[int]:
        """Where the columns of these sections are when those of all ranks lie side by side.

        Rank after rank, and on each section by section. Of the copies of a head it is the first.

        Raises:
            ConfigError: No such section.
        """
        shares = [self._find(name) for name in names]
        stride, before = sum(share.width for share in shares), 0
        columns: list[int] = []
        for share in shares:
            width = share.section.head_width
            for head in range(share.section.num_heads):
                rank, place = divmod(head * share.copies, share.num_heads)
                first = rank * stride + before + place * width
                columns += range(first, first + width)
            before += share.width
        return columns

    def _slice(self, part: Tensor, share: SectionShare, dim: int) -> Tensor:
        unit = part.shape[dim] // share.section.num_heads
        if share.copies == 1:
            return part.narrow(dim, self.rank * share.num_heads * unit, share.num_heads * unit)
        return torch.cat([part.narrow(dim, h * unit, unit) for h in share.heads(self.rank)], dim)

    def _share(self, section: Section) -> SectionShare:
        per_rank = self.spec.output.num_heads // self.size
        served = self.spec.output.num_heads // section.num_heads
        # The longest stretches of value heads that no border of a rank or of a key head cuts.
        together = math.gcd(per_rank, served)
        return SectionShare(section, served // together, per_rank // together)

    def _find(self, name: str) -> SectionShare:
        known = {share.section.name: share for share in (*self.sections, self.output)}
        if name not in known:
            raise ConfigError(
                f"HeadShare: section {name!r}",
                found="no such section",
                why=f"{type(self.spec).__name__} names the projections that have heads.",
                fix=near_misses(name, known),
            )
        return known[name]


def _others(spec: Spec) -> list[str]:
    return ["'docs'", "'state'", "'gather'"] if spec.state is not None else ["'docs'", "'gather'"]
