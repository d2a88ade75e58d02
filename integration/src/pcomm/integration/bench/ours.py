"""Texts of an engine: when the first token of each came, and how long later steps took."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pcomm.inference import Engine, Request, SamplingParams
from pcomm.integration.llm import LoadedModel, load_model

__all__ = ["Texts", "begin", "loaded", "open_engine"]

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
