"""Memory of a rank that trains a GPT of 1B or 8B, counted without memory, and by arithmetic.

The model, its shards, the optimizer and the trainer are those of a run; what they allocate is
followed by `StepCounter`. Models of few layers are counted, and what a layer adds is added for the
others. A test counts the whole models.

The tensors are fake ones of a CPU. Where CUDA has other operations, these stand in: a norm is one
operation that keeps its input and a number of each row, and the loss takes as many logits at a time
as on a device. Torch's attention keeps on both what flash attention keeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import astuple
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pcomm.core.tensor_parallel import optimizers, vocabulary
from pcomm.integration.config.rules import validate
from pcomm.integration.config.sections import Config, Resolved
from pcomm.integration.config.toml import apply_overrides
from pcomm.integration.forecast.counted_step import Memory, StepCounter
from pcomm.integration.forecast.dry_run import synthetic_batches
from pcomm.integration.forecast.lone_rank import lone_world
from pcomm.integration.parallelize import build_model, open_run_groups
from pcomm.integration.train.trainer import Trainer
from what_fits import MODELS, Size

__all__ = [
    "FIRST",
    "RUNS",
    "Norm",
    "Run",
    "begin_of_row",
    "kept_by_a_layer",
    "moments",
    "peak",
    "section",
]

VOCABULARY, KV_HEADS = 128_256, 8
# One row on each rank.
TOKENS = 8192


class Run(NamedTuple):
    """A model in training."""

    model: str
    """Its name in `what_fits.MODELS`."""

    ranks: int
    """Ranks that share parameters, gradients and optimizer; 1 for a rank alone."""

    recompute: bool
    """Whether blocks are computed again in backward."""

    @property
    def size(self) -> Size:
        """Its shape."""
        return MODELS[self.model]

    def config(self, layers: int) -> Resolved:
        """Its configuration with so many layers."""
        size = self.size
        words = [
            f"model.layers={layers}",
            f"model.width={size.width}",
            f"model.heads={size.heads}",
            f"model.kv_heads={KV_HEADS}",
            f"model.mlp_width={size.mlp_width}",
            f"model.tie_embeddings={str(size.is_tied).lower()}",
            f"data.vocabulary={VOCABULARY}",
            f"train.sequence_length={TOKENS}",
            f"train.global_batch_tokens={TOKENS * self.ranks}",
            "train.dtype='bf16'",
            f"train.recompute={str(self.recompute).lower()}",
            *(["parallel.data='shard'"] if self.ranks > 1 else []),
        ]
        return validate(apply_overrides(Config(), words), self.ranks)


RUNS = [
    Run(name, ranks, again) for name, ranks in (("1B", 1), ("8B", 8)) for again in (False, True)
]
# From so many layers on each adds as much as the next: with fewer, not as many are gathered ahead.
FIRST = 3


class Norm(torch.autograd.Function):
    """What torch's kernel of CUDA takes, keeps and gives, without its numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """As many numbers as `x` has."""
        of_rows = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(x, weight, of_rows)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        """As many as the input and the weight have."""
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _norm(x: Tensor, shape: Any, weight: Tensor, eps: float) -> Tensor:
    normed: Tensor = Norm.apply(x, weight)  # type: ignore[no-untyped-call]
    return normed


@contextmanager
def _as_on_gpu() -> Iterator[None]:
    """Within it operations are those of CUDA, on tensors of the CPU without memory."""
    with (
        mock.patch.object(vocabulary, "_CPU_BYTES", vocabulary._DEVICE_BYTES),
        mock.patch.object(optimizers, "_pieces", lambda tensor: [tensor]),
        mock.patch.object(F, "rms_norm", _norm),
    ):
        yield


@cache
def moments(run: Run, layers: int) -> tuple[Memory, Memory]:
    """Memory when rank 0 holds most, before and after the gradients of all blocks are there."""
    config, counter, found = run.config(layers), StepCounter(), list[Memory]()
    world = lone_world(run.ranks)
    groups = open_run_groups(config, world, open_with=counter.open_groups)
    with counter.counting(), _as_on_gpu():
        model = build_model(config, groups, world.device)
        trainer = Trainer(model, groups, config, synthetic_batches(config), compares=False)
        parameters = [p for _, p in trainer.replicas.named_parameters()]

        def note() -> None:
            states = [s for state in trainer.optimizer.state.values() for s in state.values()]
            found.append(counter.counted(parameters, states).memory)

        def split(gradient: Tensor) -> None:
            note()
            counter.begin()

        def at_the_rows(module: nn.Module, given: object, rows: Tensor) -> None:
            rows.register_hook(split)

        for index in range(2):
            if index == 1:
                model.embedding.register_forward_hook(at_the_rows)
            counter.begin()
            trainer.change(index)
        note()
    before, after = found
    return before, after


def peak(run: Run) -> Memory:
    """Memory of the whole model when rank 0 holds most, from what two small ones hold."""
    few, more = moments(run, FIRST), moments(run, FIRST + 1)
    further = run.size.layers - FIRST
    whole = [
        Memory(*(a + further * (b - a) for a, b in zip(astuple(one), astuple(other), strict=True)))
        for one, other in zip(few, more, strict=True)
    ]
    return max(whole, key=lambda memory: memory.peak)


def kept_by_a_layer(run: Run) -> int:
    """Bytes that a layer keeps for backward, by arithmetic.

    Of each token: two inputs of norms in fp32, which are the stream; in bf16 two normed ones,
    queries, keys and values, the first two turned, what attention gives, gate and up, and their
    product; in fp32 a number of each head and of each norm. Cosines and sines are rounded twice in
    each layer. A rank alone keeps its weights rounded to bf16, one of many the norms' in fp32.
    """
    width, keys = run.size.width, KV_HEADS * run.size.width // run.size.heads
    own = 4 * 2 * width if run.ranks > 1 else 0
    if run.recompute:
        return TOKENS * 4 * width + own
    of_token = 2 * 4 * width + 2 * 2 * width + 2 * (width + 2 * keys) + 2 * (width + keys)
    of_token += 2 * width + 3 * 2 * run.size.mlp_width + 4 * run.size.heads + 2 * 4
    of_token += 2 * 2 * 3 * (run.size.width // run.size.heads // 2)
    if run.ranks == 1:
        matrices = width * (2 * width + 2 * keys) + 3 * width * run.size.mlp_width
        own = 2 * matrices
    return TOKENS * of_token + own


_HEAD = """
## Memory of a rank in training

A GPT in the shape of Llama 3.2 1B on one rank, and of Llama 3.1 8B in shards of pcomm-fsdp over 8:
one row of {tokens:,} tokens a rank, bf16 computing, weights and AdamW in fp32, what the blocks keep
by arithmetic, all else counted. GB of tensors when the rank holds most. A GPU has to have more:
its context, NCCL's buffers, workspaces of kernels, and what its allocator leaves unused. **None of
it was compared with a GPU**; on CPUs the same count is within 0.04 % of torch's allocator
([rows](benchmarks/forecast.csv)). There a norm keeps its result in fp32, too, so
`pcomm train --dry-run` says more.

| model | blocks | weights | optimizer | gradients | blocks keep | the rest | peak |
|---|---|---|---|---|---|---|---|
"""


def section(runs: Iterable[Run] = RUNS) -> str:
    """The part of docs/gpu-counts.md about memory, with the lines of these runs."""
    return _HEAD.format(tokens=TOKENS) + "".join(map(row, runs))


def begin_of_row(run: Run) -> str:
    """The line of a run up to its numbers."""
    ranks = "1 rank" if run.ranks == 1 else f"shards on {run.ranks}"
    return f"| {run.model}, {ranks} | {'computed again' if run.recompute else 'kept'} |"


def row(run: Run) -> str:
    """The line of a run."""
    memory, layers = peak(run), run.size.layers
    # Behind the last block nothing is kept any more.
    kept = 0 if memory.gradients else layers * kept_by_a_layer(run)
    parts = (memory.weights, memory.optimizer, memory.gradients, kept, memory.activations - kept)
    cells = [f"{part / 1e9:.1f}" for part in (*parts, memory.peak)]
    return f"{begin_of_row(run)} {' | '.join(cells)} |\n"
