"""Softmax attention."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from pcomm.gdn_cp.specs.counts import check_counts
from pcomm.gdn_cp.specs.spec import Section

__all__ = ["AttentionSpec"]


@dataclass(frozen=True)
class AttentionSpec:
    """A softmax attention mixer; `heads` for it is what is known as Ulysses.

    Args:
        num_heads: Number of heads of queries and the output.
        num_kv_heads: Number of heads of keys and values.
        head_dim: Width of a head.

    Raises:
        ConfigError: A count that is no integer >= 1, or heads that are no multiple of the key and
            value heads.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        check_counts(self, self.num_heads, self.num_kv_heads)

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """Queries, keys, values."""
        return (
            Section("q", self.num_heads, self.head_dim),
            Section("k", self.num_kv_heads, self.head_dim),
            Section("v", self.num_kv_heads, self.head_dim),
        )

    @cached_property
    def output(self) -> Section:
        """What attention returns."""
        return Section("output", self.num_heads, self.head_dim)

    @property
    def state(self) -> None:
        """None: a query takes all keys and values before it."""
        return None

    @property
    def convolution(self) -> None:
        """None."""
        return None
