"""A long prompt through the engine, beside its matrix products and attention kernels alone."""

# Shape suffixes: H query heads, G key heads, T tokens, K head dim.

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch.nn import functional as F

from pcomm.inference import Engine, KVSpec
from pcomm.integration.bench.kernels_alone import AttentionCalls, Products
from pcomm.integration.bench.ours import begin, loaded, open_engine
from pcomm.integration.bench.rows import Found
from pcomm.integration.bench.settings import Settings
from pcomm.integration.bench.theirs import TheirModel
from pcomm.integration.bench.turns import Turn, num_threads, random_tokens, take_turns

__all__ = ["measure_prompt"]

_UNIT = "ms to the first token"
_KERNELS = "its linears and attention kernels"
_ONE_CALL = "one product and one causal call a layer"


def measure_prompt(settings: Settings, directory: Path) -> Found:
    """Time to the first token of one prompt in several chunks. Local.

    Beside it stand the same kernels alone, in the same chunks: matrix products of as many rows, and
    torch's attention with the arguments that the engine gives it. Then the same without chunks, and
    the prompt in transformers.

    Args:
        settings: Length of the prompt and of its chunks.
        directory: The model, with attention in every layer.
    """
    found, length = Found("prompt"), settings.long_prompt
    name = settings.models.large.name if settings.model is None else settings.model.resolve().name
    model, theirs = loaded(directory), TheirModel(directory)
    generator = torch.Generator().manual_seed(0)

    def prompt() -> list[int]:
        return random_tokens(length, model.vocabulary, generator)

    with (
        num_threads(settings.threads[-1]),
        open_engine(model, max_model_len=length + 2, max_batch_tokens=settings.chunk) as engine,
    ):
        specs = model.model.memory_specs()
        attention = _recorded(engine, prompt(), len(specs))
        products = Products(model.model)
        of_chunks = [
            products.caller(
                min(settings.chunk, length - done), int(done + settings.chunk >= length)
            )
            for done in range(0, length, settings.chunk)
        ]

        def ours() -> Mapping[str, float]:
            texts = begin(engine, [prompt()], 2)
            texts.end()
            return {"pcomm": texts.median_first_us}

        def kernels() -> None:
            for of_chunk in of_chunks:
                of_chunk()
            attention.again()

        of_all, spec = products.caller(length, 1), specs[0]
        assert isinstance(spec, KVSpec)
        q_1HTK, k_1GTK = (
            torch.ones(1, heads, length, spec.head_dim, dtype=spec.dtype)
            for heads in (model.model.config.heads, spec.heads)
        )

        @torch.inference_mode()
        def one_call() -> None:
            of_all()
            for _ in specs:
                F.scaled_dot_product_attention(
                    q_1HTK, k_1GTK, k_1GTK, is_causal=True, enable_gqa=True
                )

        def whole() -> None:
            theirs.decoding(prompt())

        times = take_turns(
            [
                ours,
                _timed(_KERNELS, kernels),
                _timed(_ONE_CALL, one_call),
                _timed("transformers", whole),
            ],
            # A turn takes seconds.
            max(3, settings.rounds // 2),
        )
    place = f"{name}, {length} tokens, {settings.threads[-1]} threads"
    alone = f"{_KERNELS} @ {place}"
    found.time(alone, times[_KERNELS], _UNIT)
    found.time(f"{_ONE_CALL} @ {place}", times[_ONE_CALL], _UNIT)
    for case in ("pcomm", "transformers"):
        found.time(f"{case} @ {place}", times[case], _UNIT, beside=(alone, times[_KERNELS]))
    found.value(f"pcomm @ {place}", attention.num_calls, "calls of torch's attention", 1)
    ratio = times["pcomm"].ratio_to(times[_KERNELS])
    found.at_most(f"prompt of {length} tokens over {_KERNELS}", 1.3, ratio)
    return found


def _recorded(engine: Engine, prompt: list[int], layers: int) -> AttentionCalls:
    """Calls of torch's attention for one prompt."""
    calls = AttentionCalls(layers)
    with calls:
        begin(engine, [prompt], 2, after_step=calls.end_step).end()
    return calls


def _timed(name: str, run: Callable[[], None]) -> Turn:
    def turn() -> Mapping[str, float]:
        start = time.perf_counter()
        run()
        return {name: (time.perf_counter() - start) * 1e6}

    return turn
