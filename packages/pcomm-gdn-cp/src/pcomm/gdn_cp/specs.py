"""The protocol of a mixer, and the three kinds: Gated DeltaNet, Mamba-2 and softmax attention.

It says which projections travel, which state a mixer keeps and what it convolves. A new kind of
mixer is one more class here, or outside of this package: a frozen dataclass with these facts.
Counts are those of one tensor-parallel rank. The gate `z` of a Gated DeltaNet or Mamba-2 layer is
in no specification on purpose: the gated norm works token by token, so it runs after the way back,
where `z` is already.
"""

# F segments, H heads, K key dim, V value dim

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from pcomm.core.errors import ConfigError
from pcomm.gdn_cp.ops.entry import full_precision

__all__ = [
    "AttentionSpec",
    "Convolution",
    "GdnSpec",
    "Mamba2Spec",
    "MatrixTransition",
    "RecurrentState",
    "ScalarTransition",
    "Section",
    "Spec",
    "StateTransition",
    "Summary",
    "check_counts",
    "check_spec",
    "is_integer",
    "is_spec",
]


@dataclass(frozen=True)
class Section:
    """One projection of a mixer: columns by heads.

    Args:
        name: Name within the mixer, such as `"q"`.
        num_heads: Number of heads that lie side by side.
        head_width: Number of columns of one head.
    """

    name: str
    num_heads: int
    head_width: int

    @property
    def width(self) -> int:
        """Columns of all heads."""
        return self.num_heads * self.head_width


@dataclass(frozen=True)
class Convolution:
    """A causal convolution before the core, one filter a channel.

    Args:
        width: Number of taps.
        sections: The sections that pass through it, in the order of its channels.
    """

    width: int
    sections: tuple[Section, ...]

    @property
    def reach(self) -> int:
        """Tokens before itself that each output depends on."""
        return self.width - 1

    @property
    def channels(self) -> int:
        """Columns of all its sections."""
        return sum(section.width for section in self.sections)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its sections."""
        return tuple(section.name for section in self.sections)


class StateTransition(Protocol):
    """What a segment of a sequence does to a state: the affine map S -> M S + B of each head.

    A core sums a segment up as M and B, its *summary*. Ranks exchange summaries, and apply those of
    the earlier segments of a sequence to find the state in which a segment of theirs starts.
    """

    def shape(self, key_dim: int) -> tuple[int, int]:
        """Rows and columns of M for one head with a state of `key_dim` rows."""
        ...

    def apply(self, summary: tuple[Tensor, Tensor], state: Tensor) -> Tensor:
        """The state after a segment. Differentiable; local.

        Args:
            summary: M, `[F, H, *shape(K)]`, and B, `[F, H, K, V]`, of one dtype.
            state: `[F, H, K, V]`, the state before each segment, of their dtype.

        Returns:
            `[F, H, K, V]`.
        """
        ...


# M and B of each segment and head.
Summary = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class MatrixTransition:
    """M is a matrix for each head, `[..., K, K]`: Gated DeltaNet and its relatives."""

    def shape(self, key_dim: int) -> tuple[int, int]:
        """Rows and columns of M for one head."""
        return (key_dim, key_dim)

    def apply(self, summary: Summary, state: Tensor) -> Tensor:
        """The state after a segment, `[..., K, V]`, also under autocast in full precision."""
        matrix, written = summary
        with full_precision(written):
            return matrix @ state + written


@dataclass(frozen=True)
class ScalarTransition:
    """M is one number for each head, `[..., 1, 1]`: Mamba-2 and other states that only decay."""

    def shape(self, key_dim: int) -> tuple[int, int]:
        """Rows and columns of M for one head."""
        return (1, 1)

    def apply(self, summary: Summary, state: Tensor) -> Tensor:
        """The state after a segment, `[..., K, V]`."""
        decay, written = summary
        return decay * state + written


@dataclass(frozen=True)
class RecurrentState:
    """The state that a recurrence carries from token to token.

    Args:
        num_heads: Number of heads, those of the output.
        key_dim: Number of rows of the state of one head.
        value_dim: Number of columns of the state of one head.
        transition: Effect of a segment of a sequence on it.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    transition: StateTransition

    @property
    def shape(self) -> tuple[int, int, int]:
        """Heads, key dimension, value dimension."""
        return (self.num_heads, self.key_dim, self.value_dim)


@runtime_checkable
class Spec(Protocol):
    """A mixer, as far as a plan has to know it: immutable, hashable, equal to its copies.

    Its text, `str(spec)`, is what ranks compare with `make_plan(verify=True)`. A frozen dataclass
    has all of this.
    """

    @property
    def sections(self) -> tuple[Section, ...]:
        """The projections that travel. Each has a number of heads that divides the output's."""
        ...

    @property
    def output(self) -> Section:
        """What the core returns."""
        ...

    @property
    def state(self) -> RecurrentState | None:
        """What a sequence can be continued from; None if it takes all earlier tokens."""
        ...

    @property
    def convolution(self) -> Convolution | None:
        """The short convolution before the core; None for a mixer without one."""
        ...


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


@dataclass(frozen=True)
class Mamba2Spec:
    """A Mamba-2 mixer; heads are a multiple of groups.

    Args:
        num_heads: Number of heads of x, dt and the output.
        head_dim: Width of a head.
        num_groups: Number of groups of B and C.
        state_dim: Width of a group.
        conv_width: Number of taps of the short convolution.

    Raises:
        ConfigError: A count that is no integer >= 1, or heads that are no multiple of the groups.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    conv_width: int = 4

    def __post_init__(self) -> None:
        check_counts(self, self.num_heads, self.num_groups)

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """The inputs x, B, C and the time steps."""
        return (
            Section("x", self.num_heads, self.head_dim),
            Section("B", self.num_groups, self.state_dim),
            Section("C", self.num_groups, self.state_dim),
            Section("dt", self.num_heads, 1),
        )

    @cached_property
    def output(self) -> Section:
        """What the recurrence returns."""
        return Section("output", self.num_heads, self.head_dim)

    @cached_property
    def state(self) -> RecurrentState:
        """One matrix for each head; a segment multiplies it by a number."""
        return RecurrentState(self.num_heads, self.state_dim, self.head_dim, ScalarTransition())

    @cached_property
    def convolution(self) -> Convolution:
        """Over x, B and C."""
        return Convolution(self.conv_width, self.sections[:3])


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


def is_integer(value: object) -> bool:
    """Whether `value` is an integer that counts something: a truth value does not."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_counts(spec: Any, num_heads: int, num_shared: int) -> None:
    """Refuse a specification whose integers cannot be. Local.

    Args:
        spec: A dataclass with integers only.
        num_heads: Number of heads of its output.
        num_shared: Number of its key heads or groups, each of which serves several of these.

    Raises:
        ConfigError: A field that is no integer >= 1, or heads that are no multiple.
    """
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


_FACTS = ("sections", "output", "state", "convolution")


def is_spec(value: object) -> bool:
    """Whether `value` has the facts of a `Spec`: `isinstance` at a fiftieth of its time. Local."""
    # A class has the names of the facts as well.
    return not isinstance(value, type) and all(hasattr(value, fact) for fact in _FACTS)


def check_spec(spec: Spec) -> None:
    """Refuse a mixer whose facts contradict each other. Local.

    Raises:
        ConfigError: Two sections have one name; the heads of a section do not divide the output's;
            the state has other heads than the output; the convolution takes other sections.
    """
    names = [section.name for section in (*spec.sections, spec.output)]
    num_heads, found = spec.output.num_heads, ""
    uneven = [section for section in spec.sections if num_heads % section.num_heads]
    if len({*names}) < len(names):
        found = f"sections {names}, of which two have one name"
    elif uneven:
        found = f"{num_heads} heads of the output and {uneven[0].num_heads} of {uneven[0].name!r}"
    elif spec.state is not None and spec.state.num_heads != num_heads:
        found = f"a state of {spec.state.num_heads} heads and an output of {num_heads}"
    elif spec.convolution is not None and not {*spec.convolution.sections} <= {*spec.sections}:
        found = f"a convolution of {spec.convolution.names} and sections {names[:-1]}"
    if found:
        raise ConfigError(
            f"make_plan: {type(spec).__name__}",
            found=found,
            why="Ranks share out the output's heads, each with its sections, state and channels.",
            fix="Name each section once, with a number of heads that divides the output's; give "
            "the state the output's heads, and the convolution some of the sections.",
        )
