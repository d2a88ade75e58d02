"""What is measured or predicted: parts and numbers of rounds. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from pcomm.core.command.bench.options import check_counts, check_parts, check_rounds
from pcomm.core.errors import ConfigError

__all__ = ["MEASURED", "PARTS", "SIMULATED", "Settings"]

MEASURED = ("host", "step", "reshard", "recovery")
"""Parts with times of this machine; all but the first start processes."""

SIMULATED = "simulated"
"""The part that only counts GPUs."""

PARTS = (*MEASURED, SIMULATED)
"""Everything that can be asked for."""


@dataclass(frozen=True)
class Settings:
    """A run of the benchmark.

    Args:
        parts: Parts that are run.
        rounds: Number of rounds of steps, and of moves of a state.
        kills: Number of kills.
        state_mib: Size of the state that is moved, in MiB.
        placements: Number of random placements behind each prediction.
    """

    parts: tuple[str, ...] = MEASURED
    rounds: int = 41
    kills: int = 20
    state_mib: int = 100
    placements: int = 60

    def __post_init__(self) -> None:
        check_parts("ntp", self.parts, PARTS)
        if SIMULATED in self.parts and len(self.parts) > 1:
            raise ConfigError(
                f"pcomm bench ntp --parts {','.join(self.parts)}",
                found="measurements beside predictions",
                why="Predictions have a file of their own, apart from what was measured.",
                fix=f"Run --parts {SIMULATED} by itself.",
            )
        check_counts("ntp", {"--kills": [self.kills]})
        check_rounds("ntp", self.rounds, fewest=7, better=41)
