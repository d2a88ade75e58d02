"""Streams of `LLM` beside transformers' `generate`, and beside the matrix products alone."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from pcomm.core.testing.timing import Timing
from pcomm.inference import Engine
from pcomm.integration.bench.kernels_alone import Products
from pcomm.integration.bench.ours import begin
from pcomm.integration.bench.rows import Found
from pcomm.integration.bench.settings import Settings
from pcomm.integration.bench.theirs import TheirModel
from pcomm.integration.bench.turns import Turn, num_threads, random_tokens, take_turns
from pcomm.integration.llm import LLM, LoadedModel

__all__ = ["measure_streams"]

# Bytes for keys and values: those of all streams, and prompts of rounds before in the cache.
_MEMORY_BYTES = 2**30
# What `generate` is asked for: keys and values that grow, and those of full length.
_CACHES = {"generate": False, "generate, static cache": True}

_ALONE, _WIDE = "linears alone", "linears by F.linear"
_STEP, _FIRST = "ms a step", "ms to the first token"


def measure_streams(settings: Settings, directory: Path) -> Found:
    """Tokens/s and time to the first token, by streams and threads. Local.

    Args:
        settings: Numbers of streams and threads, and lengths.
        directory: The model.
    """
    found, name = Found("streams"), settings.models.large.name
    if settings.model is not None:
        name = settings.model.resolve().name
    theirs = TheirModel(directory)
    longest = max(settings.prompt, *settings.mixed) + 3 * settings.steps + 64
    with LLM(directory, max_model_len=longest, memory_bytes=_MEMORY_BYTES) as llm:
        cases = _Cases(settings, llm, theirs)
        for threads in settings.threads:
            for count in settings.streams:
                print(f"streams: {count} with {threads} threads ...", file=sys.stderr, flush=True)
                with num_threads(threads):
                    times = take_turns(cases.of(count), settings.rounds)
                place = f"{name}, threads {threads}, streams {count}"
                _add(found, place, count, threads, times)
        if settings.dtype == "float32":
            equal, written = cases.equal_tokens()
            found.value(f"equal tokens @ {name}", equal, f"of {written} tokens", 1)
    return found


class _Cases:
    def __init__(self, settings: Settings, llm: LLM, theirs: TheirModel) -> None:
        assert isinstance(llm.loaded, LoadedModel), "one process has the model"
        assert isinstance(llm.engine, Engine)
        self._settings, self._engine, self._theirs = settings, llm.engine, theirs
        self._vocabulary, model = llm.loaded.vocabulary, llm.loaded.model
        self._products = {_ALONE: Products(model), _WIDE: Products(model, wide=True)}
        self._generator = torch.Generator().manual_seed(0)

    def of(self, count: int) -> list[Turn]:
        """Cases of so many streams."""
        settings = self._settings

        def ours() -> Mapping[str, float]:
            texts = begin(self._engine, self._prompts(count), 2 * settings.steps + 64)
            step_us = texts.step_us(settings.steps)
            texts.end()
            return {f"pcomm, {_FIRST}": texts.median_first_us, "pcomm": step_us}

        def products(name: str) -> Turn:
            run = self._products[name].caller(count, count)

            def again() -> Mapping[str, float]:
                start = time.perf_counter()
                for _ in range(settings.steps):
                    run()
                return {name: (time.perf_counter() - start) * 1e6 / settings.steps}

            return again

        def of_theirs(name: str, is_static: bool) -> Turn:
            def run() -> Mapping[str, float]:
                made = self._theirs.generate(
                    self._prompts(count), settings.steps + 1, is_static=is_static
                )
                return {f"{name}, {_FIRST}": made.first_us, name: made.step_us}

            return run

        cases: list[Turn] = [ours, *map(products, self._products)]
        if count <= settings.most_of_theirs:
            cases += [of_theirs(name, is_static) for name, is_static in _CACHES.items()]
        return cases

    def equal_tokens(self) -> tuple[int, int]:
        """Greedy tokens that both write, until the first that differs, and how many there are."""
        (prompt,), steps = self._prompts(1), self._settings.steps
        texts = begin(self._engine, [prompt], steps + 1)
        texts.step_us(steps)
        (ours,) = texts.tokens.values()
        (theirs,) = self._theirs.generate([prompt], steps + 1).tokens
        return same_at_begin(ours, theirs), steps + 1

    def _prompts(self, count: int) -> list[list[int]]:
        """Prompts of one length, or of mixed ones where transformers would have to fill them up."""
        settings, vocabulary = self._settings, self._vocabulary
        lengths = [settings.prompt] * count
        if count > settings.most_of_theirs:
            shortest, longest = settings.mixed
            lengths = [
                shortest + place * (longest - shortest) // (count - 1) for place in range(count)
            ]
        return [random_tokens(length, vocabulary, self._generator) for length in lengths]


def same_at_begin(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Number of tokens before the first that differs. Local."""
    pairs = list(zip(ours, theirs, strict=True))
    return next((place for place, (a, b) in enumerate(pairs) if a != b), len(pairs))


def _add(found: Found, place: str, count: int, threads: int, times: Mapping[str, Timing]) -> None:
    ours, linears = times["pcomm"], times[_ALONE]
    names = [name for name in _CACHES if name in times]
    fastest = min(names, key=lambda name: times[name].median_us, default=None)
    beside = None if fastest is None else (f"{fastest} @ {place}", times[fastest])
    found.tokens(f"pcomm @ {place}", ours, count, beside=beside)
    for name in names:
        found.tokens(f"{name} @ {place}", times[name], count)
    alone = f"{_ALONE} @ {place}"
    found.time(alone, linears, _STEP)
    found.time(f"{_WIDE} @ {place}", times[_WIDE], _STEP, beside=(alone, linears))
    for name in ("pcomm", *names):
        found.time(f"{name} @ {place}", times[name], _STEP, beside=(alone, linears))
        found.time(f"{name} @ {place}", times[f"{name}, {_FIRST}"], _FIRST)
    where = f"threads {threads}, streams {count}"
    if beside is not None and count in (1, 8):
        goal = 2.8 if count == 1 else 2.5
        found.at_least(f"tokens/s over {fastest}, {where}", goal, beside[1].ratio_to(ours))
    if count == 1:
        found.at_most(f"step over its linears alone, {where}", 1.2, ours.ratio_to(linears))
