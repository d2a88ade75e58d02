"""What is measured: parts, sizes of messages, numbers of rounds. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from pcomm.core.command.bench.options import check_counts, check_parts, check_rounds

__all__ = ["PARTS", "Settings"]

PARTS = ("host", "compile", "emulated", "ranks", "one-gpu")
"""What can be measured; the first two need neither a GPU nor other ranks."""


@dataclass(frozen=True)
class Settings:
    """A run of the benchmark.

    Args:
        parts: Parts that are measured.
        world: Number of ranks that launches and kernels are made for, without being there.
        architectures: Architectures that kernels are compiled for, 90 for Hopper.
        sizes: Sizes of the whole tensors that are sent, in bytes.
        rounds: Number of rounds of each measurement.
    """

    parts: tuple[str, ...] = PARTS[:2]
    world: int = 8
    architectures: tuple[int, ...] = (90, 100)
    sizes: tuple[int, ...] = tuple(1 << power for power in range(13, 27))
    rounds: int = 101

    def __post_init__(self) -> None:
        check_parts("nvls", self.parts, PARTS)
        check_counts("nvls", {"--sizes": self.sizes})
        check_rounds("nvls", self.rounds, fewest=7, better=101)
