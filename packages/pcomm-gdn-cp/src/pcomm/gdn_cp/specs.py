"""What a plan has to know about a mixer: which projections travel to heads, and how wide they are.

Counts are those of one tensor-parallel rank. The gate `z` of a Gated DeltaNet or Mamba-2 layer is
in no specification on purpose: the gated norm works token by token, so it runs after the way back,
where `z` is already.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from pcomm.core.errors import ConfigError

__all__ = ["AttentionSpec", "GdnSpec", "Mamba2Spec", "Section", "Spec", "is_integer"]

Transition = Literal["matrix", "number"]


@dataclass(frozen=True)
class Section:
    """One projection of a mixer: columns by heads.

    Args:
        name: Such as `"q"`.
        num_heads: Heads that lie side by side.
        head_width: Columns of a head.
    """

    name: str
    num_heads: int
    head_width: int

    @property
    def width(self) -> int:
        """Columns of all heads."""
        return self.num_heads * self.head_width


@dataclass(frozen=True)
class GdnSpec:
    """A Gated DeltaNet mixer; value heads are a multiple of key heads.

    Args:
        num_key_heads: Heads of queries and keys.
        num_value_heads: Heads of values, of both gates and of the output.
        key_dim: Width of a key head.
        value_dim: Width of a value head.
        conv_width: Taps of the short convolution.

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
        _check(self, self.num_value_heads, self.num_key_heads)

    @property
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

    @property
    def output(self) -> Section:
        """What the recurrence returns."""
        return Section("output", self.num_value_heads, self.value_dim)

    @property
    def has_state(self) -> bool:
        """Whether sequences can be continued from a state."""
        return True

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Heads, key dimension, value dimension."""
        return (self.num_value_heads, self.key_dim, self.value_dim)

    @property
    def transition(self) -> Transition:
        """What a piece of a sequence does to a state: a matrix for each head."""
        return "matrix"

    @property
    def conv_channels(self) -> int:
        """Columns that pass through the convolution: queries, keys, values."""
        return sum(section.width for section in self.sections[:3])


@dataclass(frozen=True)
class Mamba2Spec:
    """A Mamba-2 mixer; heads are a multiple of groups.

    Args:
        num_heads: Heads of x, dt and the output.
        head_dim: Width of a head.
        num_groups: Groups of B and C.
        state_dim: Width of a group.
        conv_width: Taps of the short convolution.

    Raises:
        ConfigError: A count that is no integer >= 1, or heads that are no multiple of the groups.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    conv_width: int = 4

    def __post_init__(self) -> None:
        _check(self, self.num_heads, self.num_groups)

    @property
    def sections(self) -> tuple[Section, ...]:
        """The inputs x, B, C and the time steps."""
        return (
            Section("x", self.num_heads, self.head_dim),
            Section("B", self.num_groups, self.state_dim),
            Section("C", self.num_groups, self.state_dim),
            Section("dt", self.num_heads, 1),
        )

    @property
    def output(self) -> Section:
        """What the recurrence returns."""
        return Section("output", self.num_heads, self.head_dim)

    @property
    def has_state(self) -> bool:
        """Whether sequences can be continued from a state."""
        return True

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Heads, state dimension, head dimension."""
        return (self.num_heads, self.state_dim, self.head_dim)

    @property
    def transition(self) -> Transition:
        """What a piece of a sequence does to a state: one number for each head."""
        return "number"

    @property
    def conv_channels(self) -> int:
        """Columns that pass through the convolution: x, B, C."""
        return sum(section.width for section in self.sections[:3])


@dataclass(frozen=True)
class AttentionSpec:
    """A softmax attention mixer; `heads` for it is what is known as Ulysses.

    Args:
        num_heads: Heads of queries and the output.
        num_kv_heads: Heads of keys and values.
        head_dim: Width of a head.

    Raises:
        ConfigError: A count that is no integer >= 1, or heads that are no multiple of the key and
            value heads.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        _check(self, self.num_heads, self.num_kv_heads)

    @property
    def sections(self) -> tuple[Section, ...]:
        """Queries, keys, values."""
        return (
            Section("q", self.num_heads, self.head_dim),
            Section("k", self.num_kv_heads, self.head_dim),
            Section("v", self.num_kv_heads, self.head_dim),
        )

    @property
    def output(self) -> Section:
        """What attention returns."""
        return Section("output", self.num_heads, self.head_dim)

    @property
    def has_state(self) -> bool:
        """Softmax attention has none."""
        return False


Spec = GdnSpec | Mamba2Spec | AttentionSpec


def is_integer(value: object) -> bool:
    """Whether `value` is an integer that counts something: a truth value does not."""
    return isinstance(value, int) and not isinstance(value, bool)


def _check(spec: Spec, num_heads: int, num_shared: int) -> None:
    name = type(spec).__name__
    values = {field.name: getattr(spec, field.name) for field in fields(spec)}
    if not all(is_integer(value) and value >= 1 for value in values.values()):
        raise ConfigError(
            name,
            found=f"{values}",
            why="A mixer has at least one head, column and tap of each kind, in whole numbers.",
            fix="Use integers >= 1, those of one tensor-parallel rank.",
        )
    if num_heads % num_shared:
        raise ConfigError(
            name,
            found=f"{num_heads} heads over {num_shared} shared heads, of {values}",
            why="Every key head or group serves the same number of consecutive heads.",
            fix="Make the number of heads a multiple of that of key heads or groups.",
        )
