"""Steps of an engine that decodes, beside the matrix products alone, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from pcomm.core.testing.timing import Timing
from pcomm.inference.bench.plain_llama import PlainLlama
from pcomm.inference.engine.engine import Engine
from pcomm.inference.engine.request import Request
from pcomm.inference.engine.sampling_params import SamplingParams
from pcomm.inference.memory import LayerMemory
from pcomm.inference.model import KVSpec, Model
from pcomm.inference.step_batch import StepBatch

__all__ = ["NoModel", "decoding_engine", "time_bookkeeping", "time_decoding"]

_BLOCK_SIZE = 16
# Steps before those that count.
_WARM_UP = 3


class NoModel:
    """A model that computes nothing; what a step takes is the engine's.

    Args:
        vocabulary: Number of token ids.
    """

    def __init__(self, vocabulary: int = 64) -> None:
        self.vocabulary = vocabulary

    def memory_specs(self) -> Sequence[KVSpec]:
        """One layer, so that blocks are handed out."""
        return [KVSpec(1, 1, torch.float32)]

    def step(self, batch: StepBatch, memory: Sequence[LayerMemory | None]) -> Tensor:
        """Logits of the same token always."""
        return torch.zeros(len(batch.logits_rows), self.vocabulary)


def decoding_engine(
    model: Model, vocabulary: int, prompts: Sequence[int], num_steps: int
) -> Engine:
    """An engine in which every request decodes, and goes on for at least so many steps.

    Args:
        model: The model.
        vocabulary: Number of token ids.
        prompts: Length of the prompt of each request.
        num_steps: Steps of decoding that follow.
    """
    # Prompts that end in different steps go on for longer.
    budget = max(2048, len(prompts))
    num_steps += _WARM_UP + 2 + sum(prompts) // budget
    longest = max(prompts) + num_steps
    engine = Engine(
        model,
        vocabulary=vocabulary,
        max_model_len=longest,
        block_size=_BLOCK_SIZE,
        # Twice what they need: the scheduler keeps some free for requests that run.
        num_blocks=2 * sum(-(-(prompt + num_steps) // _BLOCK_SIZE) for prompt in prompts),
        num_state_slots=2,
        max_batch_tokens=budget,
        max_requests=len(prompts),
        prefix_cache=False,
    )
    params = SamplingParams(temperature=0.0, max_tokens=num_steps, ignore_eos=True)
    for index, length in enumerate(prompts):
        tokens = tuple((index + place) % vocabulary for place in range(length))
        engine.add(Request(str(index), tokens, params))
    while len(engine.step()) < len(prompts):
        assert engine.has_work, "requests end before all of them decode"
    for _ in range(_WARM_UP):
        engine.step()
    return engine


def time_bookkeeping(
    rows: int, *, rounds: int, clock: Callable[[], float] = time.thread_time
) -> tuple[Timing, Mapping[str, float]]:
    """Microseconds of a step with a model that does nothing, and medians of its phases.

    Args:
        rows: Number of requests that decode.
        rounds: Number of steps.
        clock: Seconds; the default leaves out what other programs take from this thread.
    """
    engine = decoding_engine(NoModel(), 64, [8] * rows, rounds)
    found = _times({"step": engine.step}, rounds, clock)
    phases = engine.stats().host_us
    engine.close()
    return Timing(f"step of {rows} rows without a model", found["step"]), phases


def time_decoding(
    model: PlainLlama, prompts: Sequence[int], *, rounds: int
) -> tuple[Timing, Timing]:
    """Microseconds of an engine's step, and of the matrix products of one, in turns.

    Args:
        model: The model.
        prompts: Length of the prompt of each stream.
        rounds: Number of steps.
    """
    engine = decoding_engine(model, model.shape.vocabulary, prompts, rounds)

    def linears() -> None:
        with torch.inference_mode():
            model.linears(len(prompts))

    linears()
    found = _times({"step": engine.step, "linears": linears}, rounds, time.perf_counter)
    engine.close()
    return Timing("step", found["step"]), Timing("linears alone", found["linears"])


def _times(
    cases: Mapping[str, Callable[[], object]], rounds: int, clock: Callable[[], float]
) -> dict[str, tuple[float, ...]]:
    found: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, run in cases.items():
            start = clock()
            run()
            found[name].append((clock() - start) * 1e6)
    return {name: tuple(times) for name, times in found.items()}
