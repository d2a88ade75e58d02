"""A tiny Llama, where what surrounds the kernels is nearly all of the time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import torch

from pcomm.inference import Engine
from pcomm.integration.bench.ours import begin, loaded, open_engine
from pcomm.integration.bench.rows import Found
from pcomm.integration.bench.settings import Settings
from pcomm.integration.bench.streams import same_at_begin
from pcomm.integration.bench.theirs import TheirModel
from pcomm.integration.bench.turns import Turn, num_threads, random_tokens, take_turns

__all__ = ["measure_tiny"]

_PROMPT = 16
_UNIT = "ms a token"


def measure_tiny(settings: Settings, directory: Path) -> Found:
    """A token of one stream on one thread: a step of the engine, and what transformers does. Local.

    Args:
        settings: Number of steps and rounds.
        directory: The model.
    """
    found, place = Found("tiny"), f"{settings.models.tiny.name} Llama"
    model, theirs, num_tokens = loaded(directory), TheirModel(directory), 4 * settings.steps
    generator = torch.Generator().manual_seed(0)
    longest = _PROMPT + num_tokens + 1

    def prompt() -> list[int]:
        return random_tokens(_PROMPT, model.vocabulary, generator)

    def forward(name: str, length: int | None) -> Turn:
        def run() -> Mapping[str, float]:
            decoding = theirs.decoding(prompt(), static_length=length)
            return {name: sum(decoding.step_us() for _ in range(num_tokens)) / num_tokens}

        return run

    def generate(name: str, is_static: bool) -> Turn:
        def run() -> Mapping[str, float]:
            made = theirs.generate([prompt()], num_tokens, is_static=is_static)
            return {name: made.all_us / num_tokens}

        return run

    with num_threads(1), open_engine(model, max_model_len=longest) as engine:

        def step() -> Mapping[str, float]:
            texts = begin(engine, [prompt()], num_tokens + 1)
            return {"engine step": texts.step_us(num_tokens)}

        def whole() -> Mapping[str, float]:
            start = time.perf_counter()
            begin(engine, [prompt()], num_tokens).step_us(num_tokens - 1)
            return {"engine, whole text": (time.perf_counter() - start) * 1e6 / num_tokens}

        # What is compared with, for each of ours, by the kind of cache.
        forwards = {"forward": None, "forward, static cache": longest}
        generates = {"generate, whole text": False, "generate, static cache, whole text": True}
        times = take_turns(
            [
                step,
                *(forward(name, length) for name, length in forwards.items()),
                whole,
                *(generate(name, is_static) for name, is_static in generates.items()),
            ],
            settings.rounds,
        )
        equal = _equal_tokens(engine, theirs, prompt(), num_tokens)
    pairs = (
        ("engine step", [*forwards], 1.5),
        ("engine, whole text", [*generates], 4.0),
    )
    for ours, others, goal in pairs:
        fastest = min(others, key=lambda name: times[name].median_us)
        for name in others:
            found.time(f"{name} @ {place}", times[name], _UNIT)
        beside = (f"{fastest} @ {place}", times[fastest])
        found.time(f"{ours} @ {place}", times[ours], _UNIT, beside=beside)
        ratio = times[fastest].ratio_to(times["engine step"])
        found.at_least(f"tiny Llama: {fastest}, over a step", goal, ratio)
    found.value(f"equal tokens @ {place}", equal, f"of {num_tokens} tokens", 1)
    return found


def _equal_tokens(engine: Engine, theirs: TheirModel, prompt: list[int], num_tokens: int) -> int:
    texts = begin(engine, [prompt], num_tokens)
    texts.step_us(num_tokens - 1)
    (ours,) = texts.tokens.values()
    return same_at_begin(ours, theirs.generate([prompt], num_tokens).tokens[0])
