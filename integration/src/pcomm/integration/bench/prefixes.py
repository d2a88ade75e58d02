"""Time to the first token of a prompt whose beginning is cached, and of one that is new."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from pcomm.integration.bench.ours import begin, loaded, open_engine
from pcomm.integration.bench.rows import Found
from pcomm.integration.bench.settings import Settings
from pcomm.integration.bench.shapes import Shape
from pcomm.integration.bench.turns import num_threads, random_tokens, take_turns

__all__ = ["measure_prefix"]

_UNIT = "ms to the first token"


def measure_prefix(settings: Settings, shape: Shape, directory: Path) -> Found:
    """Prompts that begin as one before, in turns with new ones, on one thread. Local.

    Args:
        settings: Length of the prompts.
        shape: Shape of the model.
        directory: The model.
    """
    found, model = Found("prefix"), loaded(directory)
    length = settings.prefix_prompt
    shared = length * 9 // 10
    generator = torch.Generator().manual_seed(0)
    beginning = random_tokens(shared, model.vocabulary, generator)
    cached: list[int] = []

    with (
        num_threads(1),
        open_engine(
            model,
            max_model_len=length + 2,
            # New prompts stay in the cache, too, and none has to be given up.
            num_texts=settings.rounds + 4,
            prefix_cache=True,
        ) as engine,
    ):

        def first(prompt: list[int]) -> float:
            texts = begin(engine, [prompt], 2)
            cached.append(texts.cached["text 0"])
            texts.end()
            return texts.median_first_us

        def rest() -> list[int]:
            return random_tokens(length - shared, model.vocabulary, generator)

        def new() -> Mapping[str, float]:
            return {"new": first(random_tokens(length, model.vocabulary, generator))}

        def hit() -> Mapping[str, float]:
            return {"hit": first(beginning + rest())}

        # The first computes it; the second parts there, and a state is copied where they part.
        first(beginning + rest())
        first(beginning + rest())
        cached.clear()
        times = take_turns([new, hit], settings.rounds)
    known = cached[1::2]
    assert set(cached[::2]) == {0}, "prompts that are new were in the cache"
    place = f"{shape.name}, {length} tokens"
    whole = f"new prompt @ {place}"
    found.time(whole, times["new"], _UNIT)
    found.time(f"nine tenths cached @ {place}", times["hit"], _UNIT, beside=(whole, times["new"]))
    found.value(f"nine tenths cached @ {place}", min(known), "cached tokens", len(known))
    share = (length - min(known)) / length
    what = f"{shape.name}: a prompt with {1 - share:.0%} in the cache, over a new one"
    found.at_most(what, share + 0.1, times["hit"].ratio_to(times["new"]))
    return found
