"""Decoding by the length of the context: recurrent models, and one with attention beside them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack

import torch

from pcomm.core.testing.timing import Timing
from pcomm.integration.bench.directories import Directories
from pcomm.integration.bench.ours import Texts, begin, loaded, open_engine
from pcomm.integration.bench.rows import Found
from pcomm.integration.bench.settings import Settings
from pcomm.integration.bench.streams import same_at_begin
from pcomm.integration.bench.theirs import TheirDecoding, TheirModel
from pcomm.integration.bench.turns import Turn, num_threads, random_tokens, take_turns

__all__ = ["measure_contexts"]


def measure_contexts(settings: Settings, directories: Directories) -> Found:
    """Tokens/s of one stream on one thread behind prompts of several lengths. Local.

    All models and lengths take turns. What each writes makes its context a little longer.

    Args:
        settings: Models and lengths.
        directories: Directories of the models.
    """
    found, recurrent = Found("context"), (settings.models.delta, settings.models.mamba)
    contexts, cases = settings.contexts, list[Turn]()
    generator = torch.Generator().manual_seed(0)
    steps = settings.steps
    num_tokens = (settings.rounds + 1) * steps + 1
    texts: dict[tuple[str, int], Texts] = {}
    decodings: dict[tuple[str, int], TheirDecoding] = {}
    with num_threads(settings.threads[-1]), ExitStack() as stack:
        for shape in (*recurrent, settings.models.gpt):
            print(f"context: prompts of {shape.name} ...", file=sys.stderr, flush=True)
            directory = directories.of(shape)
            model = loaded(directory)
            theirs = TheirModel(directory) if shape in recurrent else None
            for context in contexts:
                prompt = random_tokens(context, model.vocabulary, generator)
                engine = stack.enter_context(open_engine(model, max_model_len=context + num_tokens))
                key = shape.name, context
                texts[key] = begin(engine, [prompt], num_tokens)
                cases.append(_ours(_name("pcomm", *key), texts[key], steps))
                if theirs is not None:
                    decodings[key] = theirs.decoding(prompt, chunk=settings.their_chunk)
                    cases.append(
                        _theirs(_name("transformers", *key), decodings[key].step_us, steps)
                    )
        print("context: steps ...", file=sys.stderr, flush=True)
        with num_threads(1):
            times = take_turns(cases, settings.rounds)
    for shape in (*recurrent, settings.models.gpt):
        _add(found, shape.name, contexts, times, has_theirs=shape in recurrent)
    for key, decoding in decodings.items():
        equal = same_at_begin(texts[key].tokens["text 0"], decoding.tokens)
        place = f"{key[0]}, context {key[1]}"
        found.value(f"equal tokens @ {place}", equal, f"of {len(decoding.tokens)} tokens", 1)
    return found


def _ours(name: str, texts: Texts, steps: int) -> Turn:
    return lambda: {name: texts.step_us(steps)}


def _theirs(name: str, step_us: Callable[[], float], steps: int) -> Turn:
    return lambda: {name: sum(step_us() for _ in range(steps)) / steps}


def _name(whose: str, shape: str, context: int) -> str:
    return f"{whose} {shape} @ context {context}"


def _add(
    found: Found,
    shape: str,
    contexts: tuple[int, ...],
    times: Mapping[str, Timing],
    *,
    has_theirs: bool,
) -> None:
    first = times[_name("pcomm", shape, contexts[0])]
    off = 0.0
    for context in contexts:
        ours, theirs = _name("pcomm", shape, context), _name("transformers", shape, context)
        off = max(off, abs(first.ratio_to(times[ours]) - 1) * 100)
        beside = (theirs, times[theirs]) if has_theirs else None
        found.tokens(ours, times[ours], 1, beside=beside)
        if has_theirs:
            found.tokens(theirs, times[theirs], 1)
    span = f"from context {contexts[0]} to {contexts[-1]}"
    rounds = len(first.rounds_us)
    found.value(f"pcomm {shape}, most off {span}", off, "% of tokens/s", rounds)
    if has_theirs:
        found.at_most(f"{shape}: % of tokens/s off {span}", 10.0, off)
