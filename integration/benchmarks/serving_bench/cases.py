"""The parts of a run: streams, a tiny model, contexts, cached prefixes and a long prompt."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import torch
from torch.nn import functional as F

from core_bench.runner import Timing
from pcomm.inference import Engine, KVSpec
from pcomm.integration.llm import LLM, LoadedModel
from serving_bench.results import PartResults
from serving_bench.server import check_server, measure_server
from serving_bench.settings import Directories, Settings, Shape
from serving_bench.sides import (
    AttentionCalls,
    Products,
    Texts,
    TheirBatching,
    TheirDecoding,
    TheirModel,
    Turn,
    begin,
    check_transformers,
    loaded,
    num_threads,
    open_engine,
    random_tokens,
    take_turns,
)

# Bytes for keys and values: those of all streams, and prompts of rounds before in the cache.
_MEMORY_BYTES = 2**30
# What `generate` is asked for: keys and values that grow, and those of full length.
_CACHES = {"generate": False, "generate, static cache": True}

_CONTINUOUS = "continuous batching"

_ALONE, _WIDE = "linears alone", "linears by F.linear"
_STEP, _FIRST = "ms a step", "ms to the first token"


def measure_streams(settings: Settings, directory: Path) -> PartResults:
    """Tokens/s and time to the first token, by streams and threads. Local.

    Args:
        settings: Numbers of streams and threads, and lengths.
        directory: The model.
    """
    found, name = PartResults("streams"), settings.models.large.name
    if settings.model is not None:
        name = settings.model.resolve().name
    theirs = TheirModel(directory)
    longest = max(settings.prompt, *settings.mixed) + 3 * settings.steps + 64
    with LLM(directory, max_model_len=longest, memory_bytes=_MEMORY_BYTES) as llm:
        cases = _Cases(settings, llm, theirs)
        for threads in settings.threads:
            for count in settings.streams:
                print(f"streams: {count} with {threads} threads ...", file=sys.stderr, flush=True)
                # Made anew, so that its memory is just what these texts need.
                with (
                    num_threads(threads),
                    closing(TheirBatching(directory, num_texts=count, longest=longest)) as batching,
                ):
                    times = take_turns(cases.of(count, batching), settings.rounds)
                place = f"{name}, threads {threads}, streams {count}"
                _add_streams(found, place, count, threads, times)
        if settings.dtype == "float32":
            with closing(TheirBatching(directory, num_texts=1, longest=longest)) as batching:
                for whose, equal in cases.equal_tokens(batching).items():
                    found.value(f"equal tokens{whose} @ {name}", *equal, 1)
    return found


class _Cases:
    def __init__(self, settings: Settings, llm: LLM, theirs: TheirModel) -> None:
        assert isinstance(llm.loaded, LoadedModel), "one process has the model"
        assert isinstance(llm.engine, Engine)
        self._settings, self._engine, self._theirs = settings, llm.engine, theirs
        self._vocabulary, model = llm.loaded.vocabulary, llm.loaded.model
        self._products = {_ALONE: Products(model), _WIDE: Products(model, wide=True)}
        self._generator = torch.Generator().manual_seed(0)

    def of(self, count: int, batching: TheirBatching) -> list[Turn]:
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

        def continuous() -> Mapping[str, float]:
            # Texts that begin later still have as many steps with all others.
            made = batching.generate(self._prompts(count), 2 * settings.steps)
            return {f"{_CONTINUOUS}, {_FIRST}": made.first_us, _CONTINUOUS: made.step_us}

        cases: list[Turn] = [ours, *map(products, self._products), continuous]
        if count <= settings.most_of_theirs:
            cases += [of_theirs(name, is_static) for name, is_static in _CACHES.items()]
        return cases

    def equal_tokens(self, batching: TheirBatching) -> dict[str, tuple[int, str]]:
        """Greedy tokens of ours that each of theirs writes, until the first that differs."""
        (prompt,), steps = self._prompts(1), self._settings.steps
        texts = begin(self._engine, [prompt], steps + 1)
        texts.step_us(steps)
        (ours,) = texts.tokens.values()
        pairs = {
            "": self._theirs.generate([prompt], steps + 1),
            f", {_CONTINUOUS}": batching.generate([prompt], steps + 1),
        }
        return {
            whose: (same_at_begin(ours, made.tokens[0]), f"of {steps + 1} tokens")
            for whose, made in pairs.items()
        }

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


def _add_streams(
    found: PartResults, place: str, count: int, threads: int, times: Mapping[str, Timing]
) -> None:
    ours, linears = times["pcomm"], times[_ALONE]
    names = [name for name in (*_CACHES, _CONTINUOUS) if name in times]
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


_PROMPT = 16
_MS_A_TOKEN = "ms a token"


def measure_tiny(settings: Settings, directory: Path) -> PartResults:
    """A token of one stream on one thread: a step of the engine, and what transformers does. Local.

    Args:
        settings: Number of steps and rounds.
        directory: The model.
    """
    found, place = PartResults("tiny"), f"{settings.models.tiny.name} Llama"
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
    pairs = (("engine step", [*forwards], 1.5), ("engine, whole text", [*generates], 4.0))
    for ours, others, goal in pairs:
        fastest = min(others, key=lambda name: times[name].median_us)
        for name in others:
            found.time(f"{name} @ {place}", times[name], _MS_A_TOKEN)
        beside = (f"{fastest} @ {place}", times[fastest])
        found.time(f"{ours} @ {place}", times[ours], _MS_A_TOKEN, beside=beside)
        ratio = times[fastest].ratio_to(times["engine step"])
        found.at_least(f"tiny Llama: {fastest}, over a step", goal, ratio)
    found.value(f"equal tokens @ {place}", equal, f"of {num_tokens} tokens", 1)
    return found


def _equal_tokens(engine: Engine, theirs: TheirModel, prompt: list[int], num_tokens: int) -> int:
    texts = begin(engine, [prompt], num_tokens)
    texts.step_us(num_tokens - 1)
    (ours,) = texts.tokens.values()
    return same_at_begin(ours, theirs.generate([prompt], num_tokens).tokens[0])


def measure_contexts(settings: Settings, directories: Directories) -> PartResults:
    """Tokens/s of one stream on one thread behind prompts of several lengths. Local.

    All models and lengths take turns. What each writes makes its context a little longer.

    Args:
        settings: Models and lengths.
        directories: Directories of the models.
    """
    found, recurrent = PartResults("context"), (settings.models.delta, settings.models.mamba)
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
        _add_context(found, shape.name, contexts, times, has_theirs=shape in recurrent)
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


def _add_context(
    found: PartResults,
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


def measure_prefix(settings: Settings, shape: Shape, directory: Path) -> PartResults:
    """Prompts that begin as one before, in turns with new ones, on one thread. Local.

    Args:
        settings: Length of the prompts.
        shape: Shape of the model.
        directory: The model.
    """
    found, model = PartResults("prefix"), loaded(directory)
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
    found.time(whole, times["new"], _FIRST)
    found.time(f"nine tenths cached @ {place}", times["hit"], _FIRST, beside=(whole, times["new"]))
    found.value(f"nine tenths cached @ {place}", min(known), "cached tokens", len(known))
    share = (length - min(known)) / length
    what = f"{shape.name}: a prompt with {1 - share:.0%} in the cache, over a new one"
    found.at_most(what, share + 0.1, times["hit"].ratio_to(times["new"]))
    return found


# Shape suffixes: H query heads, G key heads, T tokens, K head dim.


_KERNELS = "its linears and attention kernels"
_ONE_CALL = "one product and one causal call a layer"


def measure_prompt(settings: Settings, directory: Path) -> PartResults:
    """Time to the first token of one prompt in several chunks. Local.

    Beside it stand the same kernels alone, in the same chunks: matrix products of as many rows, and
    torch's attention with the arguments that the engine gives it. Then the same without chunks, and
    the prompt in transformers.

    Args:
        settings: Length of the prompt and of its chunks.
        directory: The model, with attention in every layer.
    """
    found, length = PartResults("prompt"), settings.long_prompt
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
    found.time(alone, times[_KERNELS], _FIRST)
    found.time(f"{_ONE_CALL} @ {place}", times[_ONE_CALL], _FIRST)
    for case in ("pcomm", "transformers"):
        found.time(f"{case} @ {place}", times[case], _FIRST, beside=(alone, times[_KERNELS]))
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


def measure(settings: Settings) -> list[PartResults]:
    """Measure the parts that were asked for; their models lie in a temporary folder. Local.

    Args:
        settings: Parts, models and lengths.

    Raises:
        UnsupportedError: transformers is not installed, or what the server stands on.
    """
    check_transformers("serving")
    if "server" in settings.parts:
        check_server()
    with tempfile.TemporaryDirectory(prefix="pcomm-bench-") as folder:
        return [found for part in settings.parts for found in _part(part, settings, Path(folder))]


def _part(part: str, settings: Settings, folder: Path) -> list[PartResults]:
    # It takes minutes, and results go to stdout.
    print(f"{part} ...", file=sys.stderr, flush=True)
    directories = Directories(folder)

    def large() -> Path:
        return settings.model or directories.of(settings.models.large, settings.dtype)

    parts: Mapping[str, Callable[[], list[PartResults]]] = {
        "streams": lambda: [measure_streams(settings, large())],
        "tiny": lambda: [measure_tiny(settings, directories.of(settings.models.tiny))],
        "context": lambda: [measure_contexts(settings, directories)],
        "prefix": lambda: [
            measure_prefix(settings, shape, directories.of(shape))
            for shape in (settings.models.gpt, settings.models.hybrid)
        ],
        "prompt": lambda: [measure_prompt(settings, large())],
        "server": lambda: [measure_server(settings, directories.of(settings.models.gpt))],
    }
    return parts[part]()
