"""Mamba-2."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from pcomm.gdn_cp.ops.transitions import ScalarTransition
from pcomm.gdn_cp.specs.counts import check_counts
from pcomm.gdn_cp.specs.spec import Convolution, RecurrentState, Section

__all__ = ["Mamba2Spec"]


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
