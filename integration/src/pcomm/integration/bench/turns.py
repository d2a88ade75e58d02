"""Cases that take turns, in rounds: what is compared happened in the same round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from pcomm.core.testing.timing import Timing

__all__ = ["Turn", "num_threads", "random_tokens", "take_turns"]

Turn = Callable[[], Mapping[str, float]]
"""A turn of a case: microseconds by the name of what was timed."""


def take_turns(cases: Sequence[Turn], rounds: int, *, warm_up: bool = True) -> dict[str, Timing]:
    """In each round every case once. Local.

    Args:
        cases: Turns, which name what they have timed; each name belongs to one case.
        rounds: Number of rounds that count.
        warm_up: True for one round before them.
    """
    found: dict[str, list[float]] = {}
    for index in range(rounds + warm_up):
        for case in cases:
            for name, taken_us in case().items():
                found.setdefault(name, [])
                if index or not warm_up:
                    found[name].append(taken_us)
    return {name: Timing(name, tuple(times)) for name, times in found.items()}


@contextmanager
def num_threads(number: int) -> Iterator[None]:
    """Threads of torch within the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def random_tokens(length: int, vocabulary: int, generator: torch.Generator) -> list[int]:
    """Token ids of a prompt. Local.

    Args:
        length: Number of tokens.
        vocabulary: Number of token ids.
        generator: Source of the draws, so that each prompt is another one.
    """
    tokens: list[int] = torch.randint(vocabulary, (length,), generator=generator).tolist()
    return tokens
