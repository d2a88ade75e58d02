"""What a caller chooses about a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from pcomm.core.errors import ConfigError, near_misses

__all__ = ["Policy", "Rounding"]

Rounding = Literal["max", "nice"]


@dataclass(frozen=True)
class Policy:
    """How degrees are chosen, and what a rank may hold.

    Args:
        rounding: `"max"` uses every surviving rank. `"nice"` uses the fewest ranks that are as
            fast: 30 survivors with 128 heads become 26, since both have 5 heads on the busiest
            rank. The others are idle, the slowest first, and so is a rank that is so slow that
            it would hold the others up.
        rank_bytes: Bytes of split parameters, gradients and optimizer state on a rank at the full
            degree; 0 if `memory_limit` is 0.
        memory_limit: Bytes that these may take on any rank; 0 for no limit.
        drops_replicas: True to plan without a replica one of whose tensor-parallel groups has lost
            all ranks: its degree is 0, it gets no tokens, and what is left of it is idle. False
            makes that an error.

    Raises:
        ConfigError: An unknown rounding, negative bytes, or a limit without `rank_bytes`.
    """

    rounding: Rounding = "max"
    rank_bytes: int = 0
    memory_limit: int = 0
    drops_replicas: bool = False

    def __post_init__(self) -> None:
        if self.rounding not in get_args(Rounding):
            raise ConfigError(
                f"Policy: rounding={self.rounding!r}",
                found=f"known are {', '.join(get_args(Rounding))}",
                why="The rounding says how many of the surviving ranks are used.",
                fix=near_misses(self.rounding, get_args(Rounding)),
            )
        without_bytes = self.memory_limit > 0 and self.rank_bytes == 0
        if min(self.rank_bytes, self.memory_limit) < 0 or without_bytes:
            raise ConfigError(
                "Policy: memory_limit",
                found=f"rank_bytes={self.rank_bytes}, memory_limit={self.memory_limit}",
                why="The bytes at a reduced degree are those at the full degree times the growth.",
                fix="Give rank_bytes of at least 1 with a limit, or neither.",
            )
