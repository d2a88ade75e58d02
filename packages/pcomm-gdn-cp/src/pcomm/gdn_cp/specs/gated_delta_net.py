"""Gated DeltaNet, as in Qwen3-Next."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from pcomm.gdn_cp.ops.transitions import MatrixTransition
from pcomm.gdn_cp.specs.counts import check_counts
from pcomm.gdn_cp.specs.spec import Convolution, RecurrentState, Section

__all__ = ["GdnSpec"]


@dataclass(frozen=True)
class GdnSpec:
    """A Gated DeltaNet mixer; value heads are a multiple of key heads.

    Args:
        num_key_heads: Number of heads of queries and keys.
        num_value_heads: Number of heads of values, of both gates and of the output.
        key_dim: Width of a key head.
        value_dim: Width of a value head.
        conv_width: Number of taps of the short convolution.

    Raises:
        ConfigError: A count that is no integer >= 1, or value heads that are no multiple of the
            key heads.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int = 4

    def __post_init__(self) -> None:
        check_counts(self, self.num_value_heads, self.num_key_heads)

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """Queries, keys, values, and what the gates beta and alpha are made of."""
        keys, values = self.num_key_heads, self.num_value_heads
        return (
            Section("q", keys, self.key_dim),
            Section("k", keys, self.key_dim),
            Section("v", values, self.value_dim),
            Section("b", values, 1),
            Section("a", values, 1),
        )

    @cached_property
    def output(self) -> Section:
        """What the recurrence returns."""
        return Section("output", self.num_value_heads, self.value_dim)

    @cached_property
    def state(self) -> RecurrentState:
        """One matrix for each value head; a segment multiplies it by a matrix."""
        return RecurrentState(
            self.num_value_heads, self.key_dim, self.value_dim, MatrixTransition()
        )

    @cached_property
    def convolution(self) -> Convolution:
        """Over queries, keys and values."""
        return Convolution(self.conv_width, self.sections[:3])
