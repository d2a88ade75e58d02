"""Bits per byte on held-out documents."""

from __future__ import annotations

import torch

from pcomm.integration.config import Config
from pcomm.integration.data.batches import evaluation_batches
from pcomm.integration.data.token_cache import TokenCorpus
from pcomm.integration.metrics.sink import bits_per_byte
from pcomm.integration.parallelize import EVERYONE, Parallel
from pcomm.integration.train.precision import autocast
from pcomm.integration.train.tensors import BatchTensors

__all__ = ["evaluate"]


def evaluate(parallel: Parallel, corpus: TokenCorpus, config: Config) -> float | None:
    """Bits per byte of `corpus` under the model; every target counts once.

    Collective over all ranks. The replicas share the batches; each bit is that of a byte of
    text, so models with different tokenizers compare.

    Returns:
        The same number on all ranks; None if there are no held-out documents.
    """
    train = config.train
    sums = torch.zeros(2, dtype=torch.float64, device=parallel.device)
    for batch in evaluation_batches(
        corpus,
        sequence_length=train.sequence_length,
        batch_tokens=train.micro_batch_tokens,
        max_tokens=train.eval_tokens,
        dp_rank=parallel.dp_rank,
        dp_size=parallel.dp_size,
    ):
        with torch.inference_mode(), autocast(train.dtype, parallel.device):
            inputs = BatchTensors.of(batch, parallel.plan(batch.cu_seqlens), parallel.device)
            nats = parallel.model.token_losses(inputs.tokens, inputs.targets, inputs.plan)
        # Tensor-parallel ranks all have the losses of their tokens; the first one counts them.
        if parallel.tp_rank == 0:
            sums[0] += nats.double().sum()
            # Context-parallel ranks all have the whole batch.
            sums[1] += batch.num_bytes if parallel.cp_rank == 0 else 0
    total = parallel.groups[EVERYONE].collectives.all_reduce(sums)
    nats_of_all, num_bytes = total.tolist()
    return bits_per_byte(nats_of_all, int(num_bytes)) if num_bytes else None
