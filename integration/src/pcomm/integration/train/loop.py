"""What both loops of training share, a plain one and a resilient one.

The order of a step is theirs: a resilient run notes a row before it commits the step, may make the
step again, and saves before it evaluates, since its rows are written once whatever happens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from pcomm.core import Group, Groups
from pcomm.core.checkpoint import ShardView
from pcomm.integration.checkpoint.folders import Checkpoint
from pcomm.integration.checkpoint.saver import Saver
from pcomm.integration.checkpoint.state import read
from pcomm.integration.config.sections import Resolved
from pcomm.integration.data.batches import TrainBatches, evaluation_batches, padded
from pcomm.integration.data.inputs import DeviceBatch
from pcomm.integration.data.preparation import Prepared
from pcomm.integration.data.token_cache import TokenCorpus
from pcomm.integration.metrics.rows import bits_per_byte
from pcomm.integration.models.language_model import LanguageModel
from pcomm.integration.parallelize import ALL_RANKS, place_of, plan_sequences
from pcomm.integration.precision import autocast
from pcomm.ntp import NtpPlan

__all__ = [
    "Outcome",
    "batches_of",
    "describe_mixture",
    "describe_run",
    "evaluate",
    "is_due",
    "open_saver",
    "read_checkpoint",
]


@dataclass(frozen=True)
class Outcome:
    """How a run ended; the same on all ranks.

    Args:
        steps: Number of optimizer steps done, over all starts.
        bits_per_byte: Bits per byte of the held-out documents after the last step; None if there
            are none, with `train.eval_every = "none"`, or if the run was interrupted.
        is_interrupted: True if a rank was asked to stop, by Ctrl-C or SIGTERM, before the end.
    """

    steps: int
    bits_per_byte: float | None
    is_interrupted: bool


def is_due(every: int | Literal["end", "none"], step: int) -> bool:
    """Whether `train.eval_every` or `checkpoint.every` asks for something after `step` steps."""
    return isinstance(every, int) and step % every == 0


def describe_run(config: Resolved, prepared: Prepared) -> str:
    """Data, length and optimizer of a run; a line for each source of a mixture. Local."""
    train, corpus = config.train, prepared.train
    batches = batches_of(config, prepared)
    micro_batches = train.global_batch_tokens // train.micro_batch_tokens // config.parallel.dp
    accumulated = f" ({micro_batches} micro-batches a rank)" if micro_batches > 1 else ""
    epochs = batches.epochs(train.steps)
    length = "" if config.data.weights else f" are {epochs[0]:.2f} epochs"
    optimizer = f"AdamW, learning rate {train.learning_rate:g}"
    if train.optimizer == "muon":
        optimizer = (
            f"Muon for the matrices of blocks, learning rate {train.muon_learning_rate:g}, "
            f"momentum {train.muon_momentum:g}; {optimizer} for all else"
            f"{', experts included' if config.model.experts else ''}"
        )
    schedule = f"schedule {train.schedule} after {train.warmup_steps} steps of warm-up"
    if 0 < train.steps <= train.warmup_steps:
        schedule = (
            f"its warm-up of {train.warmup_steps} steps leaves none of {train.steps} to the "
            f"schedule {train.schedule} (train.warmup_steps)"
        )
    lines = [
        f"{corpus.num_documents:,} documents of {corpus.num_tokens:,} tokens, and "
        f"{prepared.held_out.num_documents:,} held out; {train.steps:,} steps of "
        f"{train.global_batch_tokens:,} tokens{accumulated}{length}",
        *describe_mixture(config, corpus, epochs),
        f"{optimizer}, {schedule}, weight decay {train.weight_decay:g}",
    ]
    return "\n".join(lines)


def describe_mixture(config: Resolved, corpus: TokenCorpus, epochs: Sequence[float]) -> list[str]:
    """A line for each source of a mixture, none without weights. Local.

    Args:
        config: The validated configuration.
        corpus: The train split.
        epochs: How often the run reads each source, of `TrainBatches.epochs`.
    """
    data = config.data
    largest = max(data.weights, default=1.0)
    total = sum(weight / largest for weight in data.weights)
    return [
        f"{weight / largest / total:.1%} of the rows from {path}: {own.num_documents:,} documents "
        f"of {own.num_tokens:,} tokens, {times:.2f} epochs"
        for path, weight, own, times in zip(
            data.path, data.weights, corpus.sources(), epochs, strict=False
        )
    ]


def batches_of(config: Resolved, prepared: Prepared) -> TrainBatches:
    """The batches of a run. Local."""
    train = config.train
    return TrainBatches(
        prepared.train,
        seed=train.seed,
        sequence_length=train.sequence_length,
        global_batch_tokens=train.global_batch_tokens,
        micro_batch_tokens=train.micro_batch_tokens,
        weights=config.data.weights,
    )


def open_saver(config: Resolved, run_dir: Path, group: Group) -> Saver:
    """The saver that `[checkpoint]` describes; see `Saver`. Local."""
    options = config.checkpoint
    return Saver(
        run_dir,
        group,
        keep=None if options.keep == "all" else options.keep,
        keep_best=options.keep_best,
        is_asynchronous=options.asynchronous,
    )


def read_checkpoint(
    checkpoint: Checkpoint, views: Mapping[str, ShardView], group: Group | None = None
) -> None:
    """Fill a model and its optimizer from a checkpoint; see `read`."""
    if checkpoint.step == 0:
        # Converted from a directory of weights: the optimizer begins anew.
        views = {name: view for name, view in views.items() if name.startswith("model.")}
    read(checkpoint, views, group)


def evaluate(
    model: LanguageModel,
    groups: Groups,
    corpus: TokenCorpus,
    config: Resolved,
    plan: NtpPlan | None = None,
) -> float | None:
    """Bits per byte of `corpus` under the model; every target counts once.

    Collective over all ranks. The replicas share the batches; each bit is that of a byte of
    text, so models with different tokenizers compare.

    Args:
        model: The model.
        groups: The groups of the run.
        corpus: The held-out split.
        config: The validated configuration.
        plan: Plan of the ranks in use, where it is not the one of the configuration.

    Returns:
        The same number on all ranks; None if there are no held-out documents.
    """
    train, cp = config.train, groups["cp"]
    place = place_of(config, groups, plan)
    sums = torch.zeros(2, dtype=torch.float64, device=model.device)
    for batch in evaluation_batches(
        corpus,
        sequence_length=train.sequence_length,
        batch_tokens=train.micro_batch_tokens,
        max_tokens=None if train.eval_tokens == "all" else train.eval_tokens,
        dp_rank=place.replica,
        dp_size=place.num_replicas,
    ):
        whole, strategy = padded(batch, place.token_multiple), config.parallel.cp_strategy
        with torch.inference_mode(), autocast(train.dtype, model.device):
            sequences = plan_sequences(model, whole.cu_seqlens, cp, strategy=strategy)
            nats = model.token_losses(*DeviceBatch.of(whole, sequences, model.device))
        # Tensor-parallel ranks all have the losses of their tokens; the first one counts them.
        if place.tp == 0:
            sums[0] += nats.double().sum()
            # Context-parallel ranks all have the whole batch.
            sums[1] += batch.num_bytes if place.cp == 0 else 0
    total = groups[ALL_RANKS].collectives.all_reduce(sums)
    nats_of_all, num_bytes = total.tolist()
    return bits_per_byte(nats_of_all, num_bytes) if num_bytes else None
