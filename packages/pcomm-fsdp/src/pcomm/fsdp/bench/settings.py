"""What is measured: ranks, links, models and rounds. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from pcomm.core.errors import ConfigError

__all__ = [
    "FSDP2",
    "FSDP2_TUNED",
    "FSDP2_TWO_RAILS",
    "MODELS",
    "NO_PREFETCH",
    "ONE",
    "OURS",
    "THEIRS",
    "TWO",
    "TWO_RAILS",
    "UNSHARDED",
    "Settings",
    "Widths",
]

# Names of what is compared. Those that do not say so use one rail.
UNSHARDED = "unsharded"
FSDP2 = "FSDP2"
FSDP2_TUNED = "FSDP2 tuned"
FSDP2_TWO_RAILS = "FSDP2 tuned, 2 rails"
ONE = "pcomm, 1 group"
NO_PREFETCH = "pcomm, 2 groups, no prefetch"
TWO = "pcomm, 2 groups"
TWO_RAILS = "pcomm, 2 groups, 2 rails"
THEIRS = (FSDP2, FSDP2_TUNED, FSDP2_TWO_RAILS)
OURS = (ONE, NO_PREFETCH, TWO, TWO_RAILS)

MODELS = ("linear", "transformer")


@dataclass(frozen=True)
class Widths:
    """Sizes of a model.

    Args:
        width: Of hidden states.
        depth: Layers, each of which is a unit.
        rows: Rows of the batch of each rank; the transformer makes sequences of 32 of them.
    """

    width: int
    depth: int
    rows: int


@dataclass(frozen=True)
class Settings:
    """A run of the benchmark.

    Args:
        ranks: Data-parallel sizes, one after another.
        models: Names of what is trained.
        mbit_per_s: What each link carries each way.
        rounds: How often each case has its turn.
        alone_rounds: The same on one rank, where a turn is short.
        is_small: Tiny models, which take no time and show nothing.

    Raises:
        ConfigError: Numbers or names that cannot be measured.
    """

    ranks: tuple[int, ...] = (2, 4)
    models: tuple[str, ...] = MODELS
    mbit_per_s: float = 400.0
    rounds: int = 7
    alone_rounds: int = 41
    is_small: bool = False

    def __post_init__(self) -> None:
        if not self.ranks or min(self.ranks) < 2 or max(self.ranks) > 16:
            raise ConfigError(
                f"pcomm bench fsdp --ranks {','.join(map(str, self.ranks))}",
                found="a number of ranks below 2 or above 16",
                why="One rank sends nothing, and is measured in every run; the ranks share the "
                "cores of this machine.",
                fix="Use numbers such as 2,4.",
            )
        unknown = [name for name in self.models if name not in MODELS]
        if unknown or not self.models:
            raise ConfigError(
                f"pcomm bench fsdp --models {','.join(self.models)}",
                found=f"unknown: {', '.join(unknown) or 'no name at all'}",
                why="There is a model for each name that is known here.",
                fix=f"Use some of {','.join(MODELS)}.",
            )
        if self.rounds < 3 or self.alone_rounds < 3:
            raise ConfigError(
                f"pcomm bench fsdp --rounds {min(self.rounds, self.alone_rounds)}",
                found="fewer than 3 rounds",
                why="The median of so few is a matter of luck.",
                fix="Use 7.",
            )
        if not 1 <= self.mbit_per_s <= 100_000:
            raise ConfigError(
                f"pcomm bench fsdp --mbit {self.mbit_per_s:g}",
                found="a rate out of range",
                why="A link slower than that takes for ever, and a faster one is no limit here.",
                fix="Use 400.",
            )

    def widths(self, model: str) -> Widths:
        """Sizes of a model: 18 and 9 MiB of parameters, unless small ones were asked for."""
        if self.is_small:
            return Widths(64, 3, 32)
        return {"linear": Widths(768, 8, 192), "transformer": Widths(224, 4, 128)}[model]
