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
from pcomm.integration.config.rules import validate, validate_resilient
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
from pcomm.integration.forecast.resilient_step import ResilientStep, count_resilient_step
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

# Copies that are tried: of two a host may be lost, and a third takes half as much again.
_MOST_COPIES = 2

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
        resilient: What a resilient run survives; None for another run.
    """

    config: Resolved
    step: CountedStep
    time: StepTime
    fits: bool
    resilient: ResilientStep | None = None


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
    is_resilient: bool = False,
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
        is_resilient: True for a run that goes on without ranks that die.

    Raises:
        PcommError: No layout can run; the error of the plainest one.
    """
    end = time.monotonic() + limit_s
    refused: Counter[str] = Counter()
    resolved, first_error = [], None
    rules = validate_resilient if is_resilient else validate
    for one in candidates(config, num_ranks, machine.ranks_per_host, is_resilient=is_resilient):
        try:
            resolved.append(rules(one, num_ranks))
        except PcommError as error:
            refused[error.asked] += 1
            first_error = first_error or error
    if not resolved:
        assert first_error is not None
        raise first_error
    parameters = parameters_by_kind(resolved[0])

    def least(one: Resolved) -> float:
        return least_memory(one, parameters, is_resilient=is_resilient)

    fitting = [c for c in resolved if least(c) <= machine.memory_bytes]
    too_large = len(resolved) - len(fitting)
    if not fitting:
        # The one that needs least is shown, to tell by how much it does not fit.
        fitting = [min(resolved, key=least)]
        too_large -= 1
    bounds = {id(c): least_seconds(c, machine, parameters) for c in fitting}
    layouts: list[CountedLayout] = []
    counting = _Counting(num_ranks, machine, replay, is_resilient)
    slower = not_reached = 0
    best = float("inf")
    for number, one in enumerate(sorted(fitting, key=lambda c: bounds[id(c)]), 1):
        if bounds[id(one)] >= best:
            slower += 1
        elif layouts and time.monotonic() > end:
            not_reached += 1
        else:
            progress(
                f"layout {number} of {len(fitting)}: {words_of(one, is_resilient=is_resilient)}"
            )
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


def words_of(config: Resolved, *, is_resilient: bool = False) -> str:
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
        copies = f"{parallel.copies} " + ("copy" if parallel.copies == 1 else "copies")
        words.append(f"shard, {copies if is_resilient else f'zero {parallel.zero}'}")
    micro = config.train.global_batch_tokens // parallel.dp
    if train.micro_batch_tokens != micro:
        words.append(f"micro-batches of {train.micro_batch_tokens:,}")
    if train.recompute:
        words.append("recompute")
    return ", ".join(words)


def settings_of(config: Resolved, base: Config, *, is_resilient: bool = False) -> list[str]:
    """The words of `--set` that make this layout of the configuration it was found for."""
    parallel, train = config.parallel, config.train
    keys = ("tp", "cp", "cp_strategy", "ep", "data", "sequence", "failed", "copies")
    is_usual = is_resilient or (base.parallel.zero == "auto" and parallel.zero == WHOLE_STAGE)
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


def candidates(
    config: Config, num_ranks: int, ranks_per_host: int, *, is_resilient: bool = False
) -> Iterator[Config]:
    """Every way to share the work among the ranks, of which the rules may refuse some. Local."""
    divisors = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0]
    for tp in divisors:
        for cp in (size for size in divisors if num_ranks // tp % size == 0):
            dp = num_ranks // tp // cp
            for ep in divisors if config.model.experts and not is_resilient else [1]:
                sharings = (
                    _resilient_sharings(dp * cp)
                    if is_resilient
                    else _sharings(dp * cp, tp, ranks_per_host)
                )
                for data, zero, shard_ranks, copies in sharings:
                    parallel = ParallelConfig(
                        dp=dp,
                        tp=tp,
                        cp=cp,
                        cp_strategy=config.parallel.cp_strategy if cp > 1 else "auto",
                        ep=ep,
                        data=data,
                        zero=zero,
                        shard_ranks=shard_ranks,
                        copies=copies,
                        lost_replica=config.parallel.lost_replica,
                        sequence=config.parallel.sequence and tp > 1,
                    )
                    yield replace(config, parallel=parallel)


_Sharing = tuple[Literal["replicate", "shard", "hybrid"], AutoStage, AutoSize, int]


def _sharings(sharers: int, tp: int, ranks_per_host: int) -> Iterator[_Sharing]:
    """What ranks of dp and cp hold: `data`, `zero`, `shard_ranks` and `copies`."""
    copies = ParallelConfig().copies
    yield "replicate", "auto", "auto", copies
    if sharers == 1:
        return
    yield "shard", "auto", "auto", copies
    yield "shard", 1, "auto", copies
    on_host = max(1, ranks_per_host // tp)
    if on_host < sharers and sharers % on_host == 0 and on_host > 1:
        yield "hybrid", "auto", on_host, copies


def _resilient_sharings(sharers: int) -> Iterator[_Sharing]:
    """The same where ranks may die."""
    yield "replicate", "auto", "auto", ParallelConfig().copies
    # As many copies as ranks are replicas.
    for copies in range(1, min(_MOST_COPIES, sharers - 1) + 1):
        yield "shard", "auto", "auto", copies


@dataclass(frozen=True)
class _Counting:
    num_ranks: int
    machine: Machine
    replay: Replay | None
    is_resilient: bool = False

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
        batches, resilient = synthetic_batches(config), None
        with _without_warnings():
            if self.is_resilient:
                resilient = count_resilient_step(config, batches, self.machine.ranks_per_host)
                step = resilient.step
            else:
                step = count_step(config, batches)
        time = predict_step(step, self.machine, self.num_ranks, self.replay)
        fits = step.memory.peak <= self.machine.memory_bytes
        return CountedLayout(config, step, time, fits, resilient)


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


def least_memory(
    config: Resolved, parameters: Mapping[str, int], *, is_resilient: bool = False
) -> float:
    """Bytes of a rank that parameters, their gradients and averages take at the least. Local.

    Args:
        config: The layout.
        parameters: Parameters of the whole model, by kind.
        is_resilient: True for a run that goes on without ranks that die.
    """
    parallel = config.parallel
    if is_resilient:
        # Each rank of tp holds its part of all experts. Fewer ranks than copies have all.
        own = sum(parameters.values()) / parallel.tp
        shares = max(1.0, parallel.shard_ranks / parallel.copies)
        return _kept(own, shares, 1, _AVERAGES[config.train.optimizer])
    experts = parameters.get("experts", 0)
    dense = (sum(parameters.values()) - experts) / parallel.tp
    holders = parallel.dp * parallel.cp * parallel.tp // parallel.ep
    shares = 1 if parallel.data == "replicate" else holders
    averages = _AVERAGES[config.train.optimizer]
    return _kept(dense, parallel.shard_ranks, parallel.zero, averages) + _kept(
        experts / parallel.ep, shares, parallel.zero, averages
    )


def _kept(parameters: float, shares: float, zero: int, averages: int) -> float:
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
