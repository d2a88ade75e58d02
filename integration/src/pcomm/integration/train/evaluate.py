"""Bits per byte on held-out documents."""

from __future__ import annotations

import torch

from pcomm.core import Groups
from pcomm.integration.config_resolved import Resolved
from pcomm.integration.data.batches import evaluation_batches
from pcomm.integration.data.packing import padded
from pcomm.integration.data.token_cache import TokenCorpus
from pcomm.integration.metrics.bits_per_byte import bits_per_byte
from pcomm.integration.models.language_model import LanguageModel
from pcomm.integration.parallelize import ALL_RANKS, place_of, plan_sequences
from pcomm.integration.train.device_batch import DeviceBatch
from pcomm.integration.train.precision import autocast
from pcomm.ntp import Plan

__all__ = ["evaluate"]


def evaluate(
    model: LanguageModel,
    groups: Groups,
    corpus: TokenCorpus,
    config: Resolved,
    plan: Plan | None = None,
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
    return bits_per_byte(nats_of_all, int(num_bytes)) if num_bytes else None
