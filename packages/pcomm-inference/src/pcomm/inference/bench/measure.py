"""Everything that one run measures."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pcomm.core.testing.timing import Timing
from pcomm.inference.bench.no_ops import time_no_ops
from pcomm.inference.bench.plain_llama import PlainLlama
from pcomm.inference.bench.settings import Settings, Shape
from pcomm.inference.bench.steps import time_bookkeeping, time_decoding
from pcomm.inference.bench.weight_forms import WeightForms

__all__ = ["Bookkeeping", "Decoding", "Measured", "Products", "measure"]


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


@dataclass(frozen=True)
class Measured:
    """Results of a run.

    Args:
        no_ops: Duration of each case of `pcomm.inference.bench.no_ops`.
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
        for shape in settings.shapes:
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
