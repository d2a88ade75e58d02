"""What is measured: packs of sequences, numbers of ranks and rounds. Needs no torch."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from core_bench.runner import option
from pcomm.core.errors import ConfigError

# Of the layer; the rest of its shape is that of `exchange_case`, which needs torch.
KEY_HEADS = 4
HIDDEN_DIM = 256


@dataclass(frozen=True)
class PackCase:
    """Sequences that are exchanged together.

    Args:
        label: Such as `64 random sequences`.
        cu_seqlens: Their offsets.
        is_random: True for log-normal lengths, false for equal ones.
    """

    label: str
    cu_seqlens: tuple[int, ...]
    is_random: bool

    @property
    def num_sequences(self) -> int:
        """Sequences of the pack."""
        return len(self.cu_seqlens) - 1


# Under torchrun its processes are the ranks.
_LAUNCHED = int(os.environ.get("WORLD_SIZE", "1"))


@dataclass(frozen=True)
class Settings:
    ranks: tuple[int, ...] = option(
        (2, 4) if _LAUNCHED == 1 else (_LAUNCHED,), "context-parallel sizes"
    )
    sequences: tuple[int, ...] = option((1, 4, 16, 64, 256), "sequences")
    # On all ranks together.
    tokens: int = option(8192, "of a pack", metavar="T")
    rounds: int = option(9, "turns of each form", metavar="R")
    no_plans: bool = option(False, "do not time how plans are made")
    # Of a form for one pack; a slow form has fewer rounds, at least 3.
    seconds: float = 40.0

    def __post_init__(self) -> None:
        heads = KEY_HEADS
        if not self.ranks or any(size < 2 or heads % size for size in self.ranks):
            raise ConfigError(
                f"pcomm bench gdn-cp --ranks {_words(self.ranks)}",
                found=f"{heads} key heads",
                why="The forms that plans are compared with give each rank the same number of "
                "whole heads of every section, and one rank has nothing to exchange.",
                fix=f"Use numbers of ranks above 1 that divide {heads}, such as 2,4.",
            )
        if not self.sequences or min(self.sequences) < 1 or self.rounds < 3:
            raise ConfigError(
                f"pcomm bench gdn-cp --sequences {_words(self.sequences)} --rounds {self.rounds}",
                found="a pack without sequences, or fewer than 3 rounds",
                why="There must be something to time, and a median of what was timed.",
                fix="Use numbers of sequences from 1 on, and 9 rounds.",
            )
        if self.tokens % self.unit or self.tokens < self.unit * max(self.sequences):
            raise ConfigError(
                f"pcomm bench gdn-cp --tokens {self.tokens}",
                found=f"{max(self.sequences)} sequences over {_words(self.ranks)} ranks",
                why=f"Every sequence is cut into equal chunks, so its length is a multiple of "
                f"{self.unit}, and at least that.",
                fix=f"Use a multiple of {self.unit}, at least {self.unit * max(self.sequences)}.",
            )

    @property
    def unit(self) -> int:
        """What every length is a multiple of: two chunks for each rank, whatever their number."""
        return 2 * math.lcm(*self.ranks)

    def packs(self) -> list[PackCase]:
        """For each number of sequences one pack of equal lengths and one of random lengths."""
        found = []
        for count in self.sequences:
            share, rest = divmod(self.tokens // self.unit, count)
            equal = [(share + (i < rest)) * self.unit for i in range(count)]
            if count == 1:
                found.append(_pack("1 sequence", equal, True))
                continue
            lengths = random_lengths(count, self.tokens, self.unit)
            found.append(_pack(f"{count} equal sequences", equal, False))
            found.append(_pack(f"{count} random sequences", lengths, True))
        return found


def random_lengths(count: int, num_tokens: int, unit: int) -> list[int]:
    """Log-normal lengths (sigma 1) in multiples of `unit`, none empty; the same in every run."""
    generator = random.Random(count)
    weights = [generator.lognormvariate(0.0, 1.0) for _ in range(count)]
    left = num_tokens // unit - count
    ends = [round(left * end / sum(weights)) for end in accumulate(weights, initial=0.0)]
    return [(1 + b - a) * unit for a, b in pairwise(ends)]


def _pack(label: str, lengths: list[int], is_random: bool) -> PackCase:
    return PackCase(label, tuple(accumulate(lengths, initial=0)), is_random)


def _words(values: Sequence[int]) -> str:
    return ",".join(map(str, values))
