"""What is compared: an engine, a model of transformers and kernels alone, which take turns."""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from core_bench.runner import Timing
from core_bench.runner import take_turns as in_turns
from pcomm.core.errors import UnsupportedError
from pcomm.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, WeightProduct
from pcomm.inference import Engine, Request, SamplingParams
from pcomm.integration.llm import LoadedModel, load_model

Turn = Callable[[], Mapping[str, float]]
"""A turn of a case: microseconds by the name of what was timed."""


def take_turns(cases: Sequence[Turn], rounds: int, *, warm_up: bool = True) -> dict[str, Timing]:
    """In each round every case once. Local.

    Args:
        cases: Turns, which name what they have timed; each name belongs to one case.
        rounds: Number of rounds that count.
        warm_up: True for one round before them.
    """
    turns = {str(place): case for place, case in enumerate(cases)}
    return in_turns(turns, rounds, warm_up=warm_up)


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


_BLOCK_SIZE = 16


def loaded(directory: Path) -> LoadedModel:
    """The model of a directory, in the dtype of its weights. Local."""
    return load_model(directory)


@contextmanager
def open_engine(
    model: LoadedModel,
    *,
    max_model_len: int,
    num_requests: int = 1,
    num_texts: int | None = None,
    max_batch_tokens: int = 2048,
    prefix_cache: bool = False,
) -> Iterator[Engine]:
    """An engine with memory for some texts of full length.

    Args:
        model: The model; several engines may share it.
        max_model_len: Most tokens of a prompt and its text.
        num_requests: Most requests that run at once.
        num_texts: Number of texts whose keys, values and states are kept; None for twice those
            that run.
        max_batch_tokens: Most tokens of a step.
        prefix_cache: True to keep what was computed of prompts.
    """
    kept = 2 * num_requests if num_texts is None else num_texts
    engine = Engine(
        model.model,
        vocabulary=model.vocabulary,
        tokenizer=model.tokenizer,
        max_model_len=max_model_len,
        block_size=_BLOCK_SIZE,
        num_blocks=kept * -(-max_model_len // _BLOCK_SIZE),
        # A text may leave a state at several places.
        num_state_slots=4 * kept,
        max_requests=num_requests,
        max_batch_tokens=max_batch_tokens,
        prefix_cache=prefix_cache,
    )
    try:
        yield engine
    finally:
        engine.close()


@dataclass
class Texts:
    """Texts that an engine writes together, each with its likeliest tokens.

    Args:
        engine: The engine, which has no other requests.
        names: Their requests, in the order of the prompts.
        tokens: Tokens of each so far.
        first_us: Microseconds from before the requests were added to the first token of each.
        cached: Tokens of each prompt that the prefix cache had.
    """

    engine: Engine
    names: list[str]
    tokens: dict[str, list[int]] = field(default_factory=dict)
    first_us: dict[str, float] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)

    def step(self) -> None:
        """One step of the engine.

        Raises:
            Exception: That by which a text has ended.
        """
        for output in self.engine.step():
            if output.error is not None:
                raise output.error
            self.tokens[output.request_id] += output.token_ids
            self.cached[output.request_id] = output.cached_tokens

    def step_us(self, num_steps: int) -> float:
        """Mean microseconds of the next steps, in which every text gets a token."""
        start = time.perf_counter()
        for _ in range(num_steps):
            self.step()
        return (time.perf_counter() - start) * 1e6 / num_steps

    @property
    def median_first_us(self) -> float:
        """Microseconds to the first token of the median text."""
        return statistics.median(self.first_us.values())

    def end(self) -> None:
        """Take the texts out of the engine."""
        for name in self.names:
            self.engine.abort(name)


def begin(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    after_step: Callable[[], None] | None = None,
) -> Texts:
    """Add prompts and step until each has its first token. Local.

    Args:
        engine: An engine without requests.
        prompts: Token ids of each prompt.
        max_tokens: Most tokens of each text.
        after_step: Called after each of these steps.
    """
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    texts = Texts(engine, [f"text {place}" for place in range(len(prompts))])
    texts.tokens = {name: [] for name in texts.names}
    start = time.perf_counter()
    for name, prompt in zip(texts.names, prompts, strict=True):
        engine.add(Request(name, tuple(prompt), params))
    while len(texts.first_us) < len(prompts):
        texts.step()
        if after_step is not None:
            after_step()
        now_us = (time.perf_counter() - start) * 1e6
        for name in texts.names:
            if texts.tokens[name]:
                texts.first_us.setdefault(name, now_us)
    return texts


# Shape suffixes: B texts, T tokens.


def check_transformers(benchmark: str) -> None:
    """Find out before anything is measured.

    Args:
        benchmark: Its name, for the error.

    Raises:
        UnsupportedError: transformers is not installed.
    """
    if find_spec("transformers") is None:
        raise UnsupportedError(
            f"pcomm bench {benchmark}",
            found="transformers is not installed",
            why="It makes the models, and is what pcomm is compared with; nothing else needs it.",
            fix="Run `python3 -m pip install transformers`.",
        )


@dataclass(frozen=True)
class Generated:
    """What one call of `generate` has written.

    Args:
        tokens: New tokens of each text.
        first_us: Microseconds until the first token of all texts.
        step_us: Mean microseconds of each later step; 0 if there is none.
        all_us: Microseconds of the whole call.
    """

    tokens: list[list[int]]
    first_us: float
    step_us: float
    all_us: float


class TheirModel:
    """A directory, read by transformers in the dtype of its weights, with torch's attention.

    Args:
        directory: A Hugging Face directory.
    """

    def __init__(self, directory: Path) -> None:
        import transformers

        build: Any = transformers.AutoModelForCausalLM.from_pretrained
        self.model = build(directory, dtype="auto", local_files_only=True).eval()
        # Texts go on for as long as is asked, without a look for their end.
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0

    def generate(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, *, is_static: bool = False
    ) -> Generated:
        """Continue prompts of one length together, each with its likeliest tokens.

        Args:
            prompts: Token ids of each prompt.
            num_tokens: Number of tokens to write.
            is_static: True for keys and values in tensors of full length from the start, which
                torch need not copy to extend them.
        """
        tokens_BT = torch.tensor(prompts)
        clock = _Clock()
        cache = {"cache_implementation": "static", "disable_compile": True} if is_static else {}
        start = time.perf_counter()
        with torch.inference_mode():
            found_BT: Tensor = self.model.generate(
                tokens_BT,
                attention_mask=torch.ones_like(tokens_BT),
                max_new_tokens=num_tokens,
                do_sample=False,
                use_cache=True,
                stopping_criteria=[clock],
                **cache,
            )
        end = time.perf_counter()
        first, last, steps = clock.times[0], clock.times[-1], len(clock.times) - 1
        return Generated(
            found_BT[:, tokens_BT.shape[1] :].tolist(),
            (first - start) * 1e6,
            (last - first) * 1e6 / steps if steps else 0.0,
            (end - start) * 1e6,
        )

    def decoding(
        self, prompt: Sequence[int], *, static_length: int | None = None, chunk: int | None = None
    ) -> TheirDecoding:
        """One text whose prompt is computed.

        Args:
            prompt: Token ids.
            static_length: Most tokens of the text, for keys and values in tensors of that length;
                None for those that grow.
            chunk: Tokens of the prompt that are computed together; None for all. In torch their
                recurrent layers take memory that grows faster than the prompt.
        """
        found = TheirDecoding(self.model, static_length)
        for start in range(0, len(prompt), chunk or len(prompt)):
            found.read(prompt[start : start + chunk] if chunk else prompt)
        return found


class TheirBatching:
    """transformers' own continuous batching of a directory: `generate_batch`, whose manager stays.

    Keys and values lie in blocks of exactly the size that the texts need, a step takes all tokens
    of their prompts up to the same limit as ours, and nothing is filled up: without CUDA there are
    no graphs, streams or tables of blocks, which its defaults fill up for.

    Args:
        directory: A Hugging Face directory.
        num_texts: Most texts at once.
        longest: Most tokens of a prompt and its text.
        max_batch_tokens: Most tokens of a step.
    """

    def __init__(
        self, directory: Path, *, num_texts: int, longest: int, max_batch_tokens: int = 2048
    ) -> None:
        from transformers import ContinuousBatchingConfig

        self._model = TheirModel(directory).model
        self._config = ContinuousBatchingConfig(
            page_size=_BLOCK_SIZE,
            num_blocks=num_texts * -(-longest // _BLOCK_SIZE),
            max_batch_tokens=max_batch_tokens,
            max_requests_per_batch=num_texts,
            max_blocks_per_request=0,
            use_cuda_graph=False,
            use_async_batching=False,
            q_padding_interval_size=1,
            kv_padding_interval_size=1,
        )

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Generated:
        """Continue prompts of any lengths together, each with its likeliest tokens.

        Args:
            prompts: Token ids of each prompt.
            num_tokens: Number of tokens to write.

        Raises:
            RuntimeError: A text has failed.
        """
        from transformers import GenerationConfig

        # No token has the id of the end.
        settings = GenerationConfig(
            max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        start = time.perf_counter()
        texts = self._model.generate_batch(
            [list(prompt) for prompt in prompts],
            generation_config=settings,
            continuous_batching_config=self._config,
            record_timestamps=True,
            persistent_manager=True,
            warmup=False,
        ).values()
        end = time.perf_counter()
        if len(texts) != len(prompts) or any(text.error for text in texts):
            raise RuntimeError(f"continuous batching: {[text.error for text in texts]}")
        # The steps in which every text gets a token.
        latest = max(texts, key=lambda text: text.timestamps[0])
        last = min(text.timestamps[-1] for text in texts)
        shared = [moment for moment in latest.timestamps if moment <= last]
        steps = len(shared) - 1
        return Generated(
            [text.generated_tokens for text in texts],
            (shared[0] - start) * 1e6,
            (shared[-1] - shared[0]) * 1e6 / steps if steps else 0.0,
            (end - start) * 1e6,
        )

    def close(self) -> None:
        """End the thread of its manager."""
        self._model.destroy_cached_continuous_batching_manager()


class TheirDecoding:
    """One text of transformers, token by token, by calls of the model with its cache.

    Args:
        model: The model.
        static_length: Length of keys and values as for `TheirModel.decoding`.

    Attributes:
        tokens: Tokens that were written.
    """

    def __init__(self, model: Any, static_length: int | None) -> None:
        import transformers

        self._model, self._num_seen = model, 0
        # Models without attention have another name for it.
        parameters = inspect.signature(model.forward).parameters
        self._cache_word = "cache_params" if "cache_params" in parameters else "past_key_values"
        if static_length is None:
            self._cache: Any = transformers.DynamicCache(config=model.config)
        else:
            self._cache = transformers.StaticCache(config=model.config, max_cache_len=static_length)
        self.tokens: list[int] = []

    def read(self, tokens: Sequence[int]) -> None:
        """Compute more tokens of the prompt; the likeliest next one is the first of the text."""
        self.tokens.clear()
        self._compute(tokens)

    def step_us(self) -> float:
        """Write the likeliest next token; returns the microseconds of the model alone."""
        return self._compute(self.tokens[-1:])

    @torch.inference_mode()
    def _compute(self, tokens: Sequence[int]) -> float:
        tokens_1T = torch.tensor([tokens])
        more = {self._cache_word: self._cache} | self._places(len(tokens))
        start = time.perf_counter()
        logits = self._model(tokens_1T, use_cache=True, logits_to_keep=1, **more).logits
        taken_us = (time.perf_counter() - start) * 1e6
        self.tokens.append(int(logits[0, -1].argmax()))
        return taken_us

    def _places(self, length: int) -> dict[str, Any]:
        """Arguments without which a Qwen3-Next with recurrent layers alone raises an error.

        It asks its cache for the number of tokens, which only attention layers know, for positions
        and masks; neither has an effect there, and with both given it does not ask.
        """
        config = self._model.config
        if config.model_type != "qwen3_next" or "full_attention" in config.layer_types:
            return {}
        first = self._num_seen
        self._num_seen += length
        places = torch.arange(first, first + length).unsqueeze(0)
        return {"position_ids": places, "attention_mask": {"linear_attention": None}}


class _Clock:
    """A stopping criterion that stops nothing: it is called after each token of `generate`."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


# Shape suffixes: H query heads, T tokens, K head dim.


class Products:
    """The matrix products that the layers of a model make, the head apart.

    Args:
        model: Model whose linear layers hold the weights, or what stands in their place. It has a
            `head`.
        wide: True for `F.linear` with other weights of the same sizes, as torch keeps them.
    """

    def __init__(self, model: nn.Module, *, wide: bool = False) -> None:
        kinds = (ColumnParallelLinear, RowParallelLinear)
        layers = [
            (name, module) for name, module in model.named_modules() if isinstance(module, kinds)
        ]
        head = model.get_submodule("head")
        self._layers = [_Product(one, wide) for name, one in layers if name != "head"]
        self._head = _Product(head, wide)
        self._dtype = self._head.dtype

    def caller(self, num_rows: int, num_logits: int) -> Callable[[], None]:
        """A function that computes all products once. Local.

        Args:
            num_rows: Tokens of the step.
            num_logits: Tokens whose logits are computed.
        """
        widths = {layer.width for layer in self._layers}
        inputs = {width: torch.ones(num_rows, width, dtype=self._dtype) for width in widths}
        last = torch.ones(num_logits, self._head.width, dtype=self._dtype)

        @torch.inference_mode()
        def run() -> None:
            for layer in self._layers:
                layer.multiply(inputs[layer.width])
            if num_logits:
                self._head.multiply(last)

        return run


class _Product:
    """What one layer multiplies by, without its bias."""

    def __init__(self, layer: nn.Module, wide: bool) -> None:
        weight = layer.weight
        assert isinstance(weight, Tensor)
        self.width, self.dtype = weight.shape[1], weight.dtype
        self.multiply: Callable[[Tensor], Tensor]
        product: WeightProduct | None = layer.__dict__.get("weight_product")
        if product is not None and not wide:
            self.multiply = lambda x: product(x, None)
            return
        own = torch.ones(weight.shape, dtype=weight.dtype) if wide else weight.detach()
        self.multiply = lambda x: F.linear(x, own)


class AttentionCalls(TorchFunctionMode):
    """Keeps the arguments of torch's attention that are called in its context, for one layer.

    Args:
        layers: Number of layers with attention, which make the same calls in a step.
    """

    def __init__(self, layers: int) -> None:
        super().__init__()
        self._layers = layers
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._num_kept = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Called for each of torch's functions."""
        if func is F.scaled_dot_product_attention:
            self._calls.append((args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def end_step(self) -> None:
        """Forget the calls of all layers but the first since the last step.

        Raises:
            AssertionError: There are none, or not as many in each layer.
        """
        added = len(self._calls) - self._num_kept
        told = f"{added} calls of torch's attention in a step of {self._layers} layers"
        assert added, told
        assert added % self._layers == 0, told
        self._num_kept += added // self._layers
        del self._calls[self._num_kept :]

    @property
    def num_calls(self) -> int:
        """Number of calls of all layers."""
        return self._layers * self._num_kept

    @torch.inference_mode()
    def again(self) -> None:
        """Make the same calls again, once for each layer."""
        for _ in range(self._layers):
            for args, kwargs in self._calls:
                F.scaled_dot_product_attention(*args, **kwargs)
