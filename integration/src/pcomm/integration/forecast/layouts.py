"""Layouts of a training run on so many ranks, counted and ranked by the time of a step.

A layout is counted as the dry run counts it, and only one that can be of use: what parameters alone
take has to fit, and what has to be computed and sent must not take longer than the best step that
was found. Where a micro-batch does not fit, a smaller one is tried, and then recomputing.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

from pcomm.core.errors import PcommError
from pcomm.integration.config.rules import validate
from pcomm.integration.config.sections import (
    WHOLE_STAGE,
    AutoSize,
    AutoStage,
    Config,
    ParallelConfig,
    Resolved,
)
from pcomm.integration.config.strict_section import toml_value
from pcomm.integration.forecast.counted_step import CountedStep, count_step
from pcomm.integration.forecast.dry_run import parameters_by_kind, synthetic_batches
from pcomm.integration.forecast.machine import Machine, StepTime, predict_step
from pcomm.integration.forecast.replay import Replay
from pcomm.integration.parallelize import topology_of

__all__ = [
    "CountedLayout",
    "Ranking",
    "candidates",
    "least_memory",
    "least_seconds",
    "rank_layouts",
    "settings_of",
    "words_of",
]

# Bytes of an fp32 number.
_FLOAT = 4

# Numbers that an optimizer keeps for each parameter, at the least.
_AVERAGES = {"adamw": 2, "muon": 1}


@dataclass(frozen=True)
class CountedLayout:
    """A layout, and a step of it.

    Args:
        config: The configuration on these ranks.
        step: The counted step of rank 0.
        time: The time of that step.
        fits: True if the step needs no more memory than a rank has.
    """

    config: Resolved
    step: CountedStep
    time: StepTime
    fits: bool


@dataclass(frozen=True)
class Ranking:
    """What was counted, and what was left out.

    Args:
        layouts: Layouts that fit, the fastest first, and then those that do not.
        refused: How many the rules refuse, by what they refuse.
        too_large: How many are left out since parameters alone do not fit.
        slower: How many are left out since what they compute and send takes longer than the best.
        not_reached: How many are left out since the time was over.
    """

    layouts: Sequence[CountedLayout]
    refused: Mapping[str, int]
    too_large: int
    slower: int
    not_reached: int


def rank_layouts(
    config: Config,
    num_ranks: int,
    machine: Machine,
    *,
    limit_s: float,
    replay: Replay | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Ranking:
    """The layouts of a run on `num_ranks` ranks, ranked. Local, without ranks and without text.

    Args:
        config: The run; of `parallel`, `cp_strategy` and `sequence` are kept. The micro-batch and
            `recompute` are where it begins.
        num_ranks: Number of ranks.
        machine: Speeds of a rank and its links.
        replay: Times of operations on this machine; None for the rates of `machine` alone.
        limit_s: Seconds after which no other layout is begun; the first is counted anyway.
        progress: Told in a line what is done.

    Raises:
        PcommError: No layout can run; the error of the plainest one.
    """
    end = time.monotonic() + limit_s
    refused: Counter[str] = Counter()
    resolved, first_error = [], None
    for one in candidates(config, num_ranks, machine.ranks_per_host):
        try:
            resolved.append(validate(one, num_ranks))
        except PcommError as error:
            refused[error.asked] += 1
            first_error = first_error or error
    if not resolved:
        assert first_error is not None
        raise first_error
    parameters = parameters_by_kind(resolved[0])
    fitting = [c for c in resolved if least_memory(c, parameters) <= machine.memory_bytes]
    too_large = len(resolved) - len(fitting)
    if not fitting:
        # The one that needs least is shown, to tell by how much it does not fit.
        fitting = [min(resolved, key=lambda c: least_memory(c, parameters))]
        too_large -= 1
    bounds = {id(c): least_seconds(c, machine, parameters) for c in fitting}
    layouts: list[CountedLayout] = []
    counting = _Counting(num_ranks, machine, replay)
    slower = not_reached = 0
    best = float("inf")
    for number, one in enumerate(sorted(fitting, key=lambda c: bounds[id(c)]), 1):
        if bounds[id(one)] >= best:
            slower += 1
        elif layouts and time.monotonic() > end:
            not_reached += 1
        else:
            progress(f"layout {number} of {len(fitting)}: {words_of(one)}")
            try:
                found = counting.largest(one)
            except PcommError as error:
                refused[error.asked] += 1
                first_error = first_error or error
                continue
            layouts.append(found)
            best = min(best, found.time.seconds if found.fits else best)
    if not layouts:
        assert first_error is not None
        raise first_error
    layouts.sort(key=lambda one: (not one.fits, one.time.seconds))
    return Ranking(layouts, dict(refused.most_common()), too_large, slower, not_reached)


def words_of(config: Resolved) -> str:
    """A layout in the words of its keys; keys that are as usual are left away."""
    parallel, train = config.parallel, config.train
    words = [f"dp {parallel.dp}"]
    words += [
        f"{key} {getattr(parallel, key)}"
        for key in ("tp", "cp", "ep")
        if getattr(parallel, key) > 1
    ]
    if parallel.data == "hybrid":
        words.append(f"hybrid over {parallel.shard_ranks}")
    elif parallel.data == "shard":
        words.append(f"shard, zero {parallel.zero}")
    micro = config.train.global_batch_tokens // parallel.dp
    if train.micro_batch_tokens != micro:
        words.append(f"micro-batches of {train.micro_batch_tokens:,}")
    if train.recompute:
        words.append("recompute")
    return ", ".join(words)


def settings_of(config: Resolved, base: Config) -> list[str]:
    """The words of `--set` that make this layout of the configuration it was found for."""
    parallel, train = config.parallel, config.train
    keys = ("tp", "cp", "cp_strategy", "ep", "data", "sequence", "failed")
    is_usual = base.parallel.zero == "auto" and parallel.zero == WHOLE_STAGE
    is_whole = train.micro_batch_tokens * parallel.dp == train.global_batch_tokens
    wanted = {
        "parallel": {
            "dp": "auto" if base.parallel.dp == "auto" else parallel.dp,
            **{key: getattr(parallel, key) for key in keys},
            "zero": "auto" if is_usual else parallel.zero,
            "shard_ranks": parallel.shard_ranks if parallel.data == "hybrid" else "auto",
        },
        "train": {
            "micro_batch_tokens": "auto" if is_whole else train.micro_batch_tokens,
            "recompute": train.recompute,
        },
    }
    return [
        f"{section}.{key}={toml_value(value)}"
        for section, values in wanted.items()
        for key, value in values.items()
        if value != getattr(getattr(base, section), key)
    ]


def candidates(config: Config, num_ranks: int, ranks_per_host: int) -> Iterator[Config]:
    """Every way to share the work among the ranks, of which the rules may refuse some. Local."""
    divisors = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0]
    for tp in divisors:
        for cp in (size for size in divisors if num_ranks // tp % size == 0):
            dp = num_ranks // tp // cp
            for ep in divisors if config.model.experts else [1]:
                for data, zero, shard_ranks in _sharings(dp * cp, tp, ranks_per_host):
                    parallel = ParallelConfig(
                        dp=dp,
                        tp=tp,
                        cp=cp,
                        cp_strategy=config.parallel.cp_strategy if cp > 1 else "auto",
                        ep=ep,
                        data=data,
                        zero=zero,
                        shard_ranks=shard_ranks,
                        sequence=config.parallel.sequence and tp > 1,
                    )
                    yield replace(config, parallel=parallel)


_Sharing = tuple[Literal["replicate", "shard", "hybrid"], AutoStage, AutoSize]


def _sharings(sharers: int, tp: int, ranks_per_host: int) -> Iterator[_Sharing]:
    """What ranks of dp and cp hold: `data`, `zero` and `shard_ranks`."""
    yield "replicate", "auto", "auto"
    if sharers == 1:
        return
    yield "shard", "auto", "auto"
    yield "shard", 1, "auto"
    on_host = max(1, ranks_per_host // tp)
    if on_host < sharers and sharers % on_host == 0 and on_host > 1:
        yield "hybrid", "auto", on_host


@dataclass(frozen=True)
class _Counting:
    num_ranks: int
    machine: Machine
    replay: Replay | None

    def largest(self, config: Resolved) -> CountedLayout:
        """The layout with the largest micro-batch that fits, and recomputing where none does."""
        found = self.count(config)
        if found.fits:
            return found
        train = config.train
        row, micro = train.sequence_length, train.micro_batch_tokens
        share = train.global_batch_tokens // config.parallel.dp
        # Activations are about as many as tokens.
        activations = found.step.memory.activations
        left = self.machine.memory_bytes - (found.step.memory.peak - activations)
        smaller = [
            n for n in range(row, micro, row) if share % n == 0 and n * activations <= left * micro
        ]
        tries = {(max(smaller, default=row), train.recompute), (max(smaller, default=row), True)}
        for tokens, recompute in sorted({*tries, (row, True)}, key=lambda one: (one[1], -one[0])):
            if share % tokens or (tokens, recompute) == (micro, train.recompute):
                continue
            less = replace(train, micro_batch_tokens=tokens, recompute=recompute)
            other = self.count(replace(config, train=less))
            if other.fits:
                return other
            found = min(found, other, key=lambda one: one.step.memory.peak)
        return found

    def count(self, config: Resolved) -> CountedLayout:
        """A step of the layout."""
        with _without_warnings():
            step = count_step(config, synthetic_batches(config))
        time = predict_step(step, self.machine, self.num_ranks, self.replay)
        return CountedLayout(config, step, time, step.memory.peak <= self.machine.memory_bytes)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Within it nothing is told of how a layout is sharded: most of them will never run."""
    logger = logging.getLogger("pcomm")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def least_memory(config: Resolved, parameters: Mapping[str, int]) -> float:
    """Bytes of a rank that parameters, their gradients and averages take at the least. Local.

    Args:
        config: The layout.
        parameters: Parameters of the whole model, by kind.
    """
    parallel = config.parallel
    experts = parameters.get("experts", 0)
    dense = (sum(parameters.values()) - experts) / parallel.tp
    holders = parallel.dp * parallel.cp * parallel.tp // parallel.ep
    shares = 1 if parallel.data == "replicate" else holders
    averages = _AVERAGES[config.train.optimizer]
    return _kept(dense, parallel.shard_ranks, parallel.zero, averages) + _kept(
        experts / parallel.ep, shares, parallel.zero, averages
    )


def _kept(parameters: float, shares: int, zero: int, averages: int) -> float:
    weights = 1 / shares if zero == 3 else 1.0
    gradients = 1 / shares if zero >= 2 else 1.0
    return _FLOAT * parameters * (weights + gradients + averages / shares)


def least_seconds(config: Resolved, machine: Machine, parameters: Mapping[str, int]) -> float:
    """What a step takes at the least, by its products and by what has to be sent. Local.

    Products run at the full rate, gradients are summed beside them, and ranks of tp wait for the
    sums of each block. What ranks of cp and of ep exchange is left out.

    Args:
        config: The layout.
        machine: Speeds of a rank and its links.
        parameters: Parameters of the whole model, by kind.
    """
    parallel, train, model = config.parallel, config.train, config.model
    rate = machine.bf16_tflops if train.dtype == "bf16" else machine.fp32_tflops
    idle = parameters.get("experts", 0) * (1 - model.experts_per_token / max(1, model.experts))
    table = 0 if model.tie_embeddings else parameters["embedding"]
    weights = sum(parameters.values()) - idle - table
    num_ranks = parallel.dp * parallel.cp * parallel.tp
    computing = 6 * weights * train.global_batch_tokens / num_ranks / (rate * 1e12)
    topology, rails = topology_of(parallel), {rail.name: rail for rail in machine.rails()}

    def sending(axes: str, num_bytes: float) -> float:
        ranks = tuple(next(iter(topology.groups(axes))))
        sent = num_bytes * (len(ranks) - 1) / len(ranks)
        return sent / rails[machine.rail_of(ranks)].bytes_per_s

    number = 2 if train.dtype == "bf16" else _FLOAT
    tokens = train.global_batch_tokens // (parallel.dp * parallel.cp)
    # A block ends with a sum, forward and backward; most have two.
    waiting = sending("tp", 2 * 2 * model.layers * tokens * model.width * number)
    dense = (sum(parameters.values()) - parameters.get("experts", 0)) / parallel.tp
    gradients = sending("data.inner", _FLOAT * dense)
    if parallel.data != "replicate":
        gradients += sending("data.inner", number * dense)
    gradients += sending("data.outer", 2 * _FLOAT * dense / parallel.shard_ranks)
    return max(computing + waiting, gradients)
