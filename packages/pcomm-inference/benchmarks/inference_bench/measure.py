"""What one run measures: calls that do nothing, an engine without a model, steps, products."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from core_bench.runner import Timing, take_turns, time_cases
from inference_bench.command import Settings
from inference_bench.plain_llama import SHAPES, PlainLlama, Shape, WideWeight
from pcomm.core.collectives.identity import IdentityCollectives
from pcomm.core.errors import ConfigError
from pcomm.core.layout import Layout
from pcomm.core.tensor_parallel import WeightProduct
from pcomm.core.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from pcomm.core.tensor_parallel.vocabulary import VocabularyParallelEmbedding
from pcomm.inference.engine.engine import Engine
from pcomm.inference.engine.request import Request
from pcomm.inference.layers import Int8Weight
from pcomm.inference.layers.packed_weight import invariant_weight, packed_weight
from pcomm.inference.model import KVSpec, LayerMemory, Model, StepBatch
from pcomm.inference.sampling.params import SamplingParams


@dataclass(frozen=True)
class Bookkeeping:
    """A step without a model.

    Args:
        rows: Number of requests.
        step: Duration of the whole step.
        phases_us: Median of each phase, in microseconds.
    """

    rows: int
    step: Timing
    phases_us: Mapping[str, float]


@dataclass(frozen=True)
class Decoding:
    """Steps of one model in which every stream gets a token.

    Args:
        shape: The model.
        threads: Number of threads.
        streams: Number of streams.
        context: Length of their prompts, in tokens.
        step: Duration of a step of the engine.
        linears: Duration of its matrix products alone.
    """

    shape: Shape
    threads: int
    streams: int
    context: int
    step: Timing
    linears: Timing

    @property
    def place(self) -> str:
        """Its name in rows."""
        shape, streams = f"{self.shape.name}, threads {self.threads}", self.streams
        return f"{shape}, streams {streams}, context {self.context}"

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all streams together that are written in a second."""
        return self.streams / (self.step.median_us / 1e6)


@dataclass(frozen=True)
class Products:
    """The matrix products of one model by the form of its weights.

    Args:
        shape: The model.
        threads: Number of threads.
        rows: Number of tokens.
        forms: Duration of all products, by form.
    """

    shape: Shape
    threads: int
    rows: int
    forms: Mapping[str, Timing]

    @property
    def place(self) -> str:
        """Its name in rows."""
        return f"{self.shape.name}, threads {self.threads}, rows {self.rows}"


@dataclass(frozen=True)
class Measured:
    """Results of a run.

    Args:
        no_ops: Duration of each case of `inference_bench.measure`.
        bookkeeping: Steps without a model.
        streams: Decoding by the number of streams.
        contexts: Decoding of one stream by its context.
        products: Matrix products by the number of tokens.
    """

    no_ops: dict[str, Timing]
    bookkeeping: list[Bookkeeping]
    streams: list[Decoding]
    contexts: list[Decoding]
    products: list[Products]


def measure(settings: Settings) -> Measured:
    """Measure all, one after another; the number of threads is as before in the end."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        _tell("operations that do nothing")
        no_ops = time_no_ops(rounds=settings.rounds)
        bookkeeping = []
        for rows in settings.rows:
            _tell(f"bookkeeping of {rows} rows")
            bookkeeping.append(Bookkeeping(rows, *time_bookkeeping(rows, rounds=settings.rounds)))
        streams, contexts, products = [], [], []
        for shape in (one for one in SHAPES if one.name in settings.shapes):
            model = PlainLlama(
                shape, max(settings.contexts) + settings.prompt + settings.rounds + 64
            )
            forms = WeightForms(model)
            for threads in settings.threads:
                torch.set_num_threads(threads)
                _tell(f"{shape.name}, {threads} threads, products alone")
                products += [
                    Products(shape, threads, rows, forms.time(rows, rounds=settings.rounds))
                    for rows in settings.product_rows
                ]
                streams += [
                    _decoding(model, threads, count, settings.prompt, settings.rounds)
                    for count in settings.streams
                ]
                contexts += [
                    _decoding(model, threads, 1, context, settings.rounds)
                    for context in settings.contexts
                ]
    finally:
        torch.set_num_threads(before)
    return Measured(no_ops, bookkeeping, streams, contexts, products)


def _decoding(model: PlainLlama, threads: int, streams: int, context: int, rounds: int) -> Decoding:
    shape = model.shape
    _tell(f"{shape.name}, {threads} threads, {streams} streams of {context} tokens")
    step, linears = time_decoding(model, [context] * streams, rounds=rounds)
    return Decoding(shape, threads, streams, context, step, linears)


def _tell(what: str) -> None:
    # It takes minutes, and results go to stdout.
    print(f"{what} ...", file=sys.stderr, flush=True)


# One token of a model of that width, as in a step of decoding.
_WIDTH, _VOCABULARY = 4096, 256
# What each case is compared with.
BARE = {
    "autograd.Function.apply, gradients on": "a call",
    "autograd.Function.apply, no_grad": "a call",
    "autograd.Function.apply, inference_mode": "a call",
    "comparing an int of the constructor": "a call",
    "group.size()": "a call",
    "dist.get_world_size(group)": "a call",
    "torch.tensor([])": "a call",
    "a copy before a reduction": "a call",
    "gloo all_reduce, one rank": "a call",
    "gloo all_gather, one rank": "a call",
    "nn.Linear": "F.linear",
    "ColumnParallelLinear": "F.linear",
    "RowParallelLinear": "F.linear",
    "VocabularyParallelEmbedding": "F.embedding",
}


class _NoOp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def time_no_ops(*, rounds: int) -> dict[str, Timing]:
    """Microseconds of each case of `BARE`, of what they are compared with, on one thread.

    Raises:
        ConfigError: torch.distributed is in use in this process.
    """
    if dist.is_initialized():
        raise ConfigError(
            "pcomm bench inference",
            found="a default process group in this process",
            why="The costs of a world of one rank are measured, which needs a group of its own.",
            fix="Run it as one process, without torchrun.",
        )
    x, narrow = torch.zeros(1, 1, _WIDTH), torch.zeros(1, 64)
    like = torch.empty_like(x)
    alone, layout = IdentityCollectives(), Layout.even(64, 1)
    column = ColumnParallelLinear(64, layout, alone)
    row = RowParallelLinear(layout, 64, alone)
    embedding = VocabularyParallelEmbedding(Layout.even(_VOCABULARY, 1), 64, alone)
    plain, ids = nn.Linear(64, 64, bias=False), torch.zeros(1, dtype=torch.int64)
    weight, table, size = plain.weight, embedding.weight, alone.size
    apply: Callable[[Tensor], Tensor] = _NoOp.apply
    recorded = x.clone().requires_grad_()
    with _world_of_one() as group:
        found = time_cases(
            {"autograd.Function.apply, gradients on": lambda: apply(recorded)}, rounds=rounds
        )
        with torch.no_grad():
            found |= time_cases(
                {"autograd.Function.apply, no_grad": lambda: apply(x)}, rounds=rounds
            )
        with torch.inference_mode():
            found |= time_cases(
                {
                    "a call": lambda: None,
                    "autograd.Function.apply, inference_mode": lambda: apply(x),
                    "comparing an int of the constructor": lambda: size > 1,
                    "group.size()": group.size,
                    "dist.get_world_size(group)": lambda: dist.get_world_size(group),
                    "torch.tensor([])": lambda: torch.tensor([]),
                    "a copy before a reduction": x.clone,
                    "F.linear": lambda: F.linear(narrow, weight),
                    "nn.Linear": lambda: plain(narrow),
                    "ColumnParallelLinear": lambda: column(narrow),
                    "RowParallelLinear": lambda: row(narrow),
                    "F.embedding": lambda: F.embedding(ids, table),
                    "VocabularyParallelEmbedding": lambda: embedding(ids),
                },
                rounds=rounds,
                clock=time.thread_time,
            )
            # Other threads do these, so their time counts too.
            found |= time_cases(
                {
                    "gloo all_reduce, one rank": lambda: dist.all_reduce(x, group=group),
                    "gloo all_gather, one rank": lambda: dist.all_gather([like], x, group=group),
                },
                rounds=rounds,
            )
    return found


@contextmanager
def _world_of_one() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


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
    case = f"step of {rows} rows without a model"
    found = take_turns({case: _clocked(engine.step, clock)}, rounds, warm_up=False)
    phases = engine.stats().host_us
    engine.close()
    return found[case], phases


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
    cases = {"step": engine.step, "linears alone": linears}
    turns = {name: _clocked(run, time.perf_counter) for name, run in cases.items()}
    found = take_turns(turns, rounds, warm_up=False)
    engine.close()
    return found["step"], found["linears alone"]


WIDE = "linears, F.linear"


class WeightForms:
    """The products of a model with its weights as they are, packed, as int8, and batch-invariant.

    Args:
        model: Model; a weight that is not packed is measured as it is.
    """

    def __init__(self, model: PlainLlama) -> None:
        weights = [*(weight for layer in model.layers for weight in layer), model.table_VD]
        self._inputs = [weight.shape[1] for weight in weights]
        self._dtype = model.dtype
        self._forms: dict[str, list[WeightProduct]] = {
            WIDE: [WideWeight(one) for one in weights],
            "linears, packed weights": [packed_weight(one) or WideWeight(one) for one in weights],
            "linears, int8 weights": [Int8Weight(one) for one in weights],
            "linears, batch-invariant weights": [
                invariant_weight(one) or WideWeight(one) for one in weights
            ],
        }

    @torch.inference_mode()
    def time(self, rows: int, *, rounds: int) -> dict[str, Timing]:
        """Microseconds of all products of `rows` tokens, by form, in turns."""
        inputs = {width: torch.ones(rows, width, dtype=self._dtype) for width in self._inputs}

        def run(products: list[WeightProduct]) -> None:
            for width, product in zip(self._inputs, products, strict=True):
                product(inputs[width], None)

        cases = {form: partial(run, products) for form, products in self._forms.items()}
        # What is made in the first call of a shape does not count: it is the round before.
        return take_turns({n: _clocked(c, time.perf_counter) for n, c in cases.items()}, rounds)


def _clocked(run: Callable[[], object], clock: Callable[[], float]) -> Callable[[], float]:
    """A turn of `run`, in microseconds of `clock`."""

    def turn() -> float:
        start = clock()
        run()
        return (clock() - start) * 1e6

    return turn
