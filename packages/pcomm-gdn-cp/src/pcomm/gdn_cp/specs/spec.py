"""The protocol of a mixer: which projections travel, which state it keeps, what it convolves.

A new kind of mixer is one new file beside this one, or outside of this package: a frozen dataclass
with these facts. Counts are those of one tensor-parallel rank. The gate `z` of a Gated DeltaNet or
Mamba-2 layer is in no specification on purpose: the gated norm works token by token, so it runs
after the way back, where `z` is already.
"""

# F segments, H heads, K key dim, V value dim

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from pcomm.core.errors import ConfigError

__all__ = [
    "Convolution",
    "RecurrentState",
    "Section",
    "Spec",
    "Transition",
    "check_spec",
    "is_spec",
]

_FACTS = ("sections", "output", "state", "convolution")


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


class Transition(Protocol):
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
    transition: Transition

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
