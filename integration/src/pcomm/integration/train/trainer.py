"""One training step, and everything that it changes."""

from __future__ import annotations

import logging
import time
from typing import NamedTuple

import torch
from torch.optim import AdamW

from pcomm.gdn_cp.plan import Plan
from pcomm.integration.checkpoint.region import Region
from pcomm.integration.checkpoint.state import (
    model_regions,
    optimizer_regions,
    set_optimizer_step,
)
from pcomm.integration.config import Config
from pcomm.integration.data.batches import TrainBatches
from pcomm.integration.data.packing import Batch
from pcomm.integration.parallelize import EVERYONE, Parallel, split_for_decay
from pcomm.integration.train.data_parallel import ReplicaGradients
from pcomm.integration.train.gradient_norm import clip_by_global_norm, sum_partial_gradients
from pcomm.integration.train.memory import memory_mib
from pcomm.integration.train.precision import autocast
from pcomm.integration.train.schedule import learning_rate
from pcomm.integration.train.tensors import BatchTensors

__all__ = ["StepResult", "Trainer"]

_log = logging.getLogger("pcomm.train")


class StepResult(NamedTuple):
    """What a step tells; the same on all ranks."""

    row: dict[str, float]
    """`step` (from 1), `loss` (nats per token over the global batch), `tokens_per_s`, ..."""

    wants_to_stop: bool
    """Whether any rank was asked to stop."""


class Trainer:
    """A model, its optimizer and its batches; a step of it is one step of the whole job.

    Args:
        parallel: This rank's part of the model.
        config: Validated.
        batches: Of the train split.
    """

    def __init__(self, parallel: Parallel, config: Config, batches: TrainBatches) -> None:
        self.parallel, self.config, self.batches = parallel, config, batches
        train = config.train
        decaying, others = split_for_decay(parallel.model)
        self.optimizer = AdamW(
            [
                {"params": decaying, "weight_decay": train.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=train.learning_rate,
            betas=train.betas,
            fused=True,
        )
        self.gradients = ReplicaGradients(
            list(parallel.model.parameters()), parallel.groups["dp_cp", "gradients"].collectives
        )
        self._tp = parallel.groups["tp"].collectives
        self._has_compared = parallel.groups["cp"].is_identity

    def step(self, index: int, *, is_asked_to_stop: bool = False) -> StepResult:
        """Optimizer step `index`, from 0. Collective over all ranks.

        The loss of every token is divided by the number of targets in the *global* batch before
        backward, so the sum over micro-batches, replicas and context-parallel ranks is the mean
        over tokens, whatever their share.
        """
        start = time.perf_counter()
        nats = self._accumulate(index)
        model = self.parallel.model
        sum_partial_gradients(model, self._tp)
        norm = clip_by_global_norm(model, self._tp, self.config.train.clip_norm)
        rate = learning_rate(self.config.train, index)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        loss, wants_to_stop = self._agree(nats, is_asked_to_stop)
        elapsed = time.perf_counter() - start
        row = {
            "step": index + 1,
            "loss": loss / self.batches.num_targets(index),
            "tokens_per_s": self.config.train.global_batch_tokens / elapsed,
            "step_ms": elapsed * 1e3,
            "lr": rate,
            "grad_norm": float(norm),
            "memory_mib": memory_mib(self.parallel.device),
        }
        return StepResult(row, wants_to_stop)

    def regions(self) -> dict[str, Region]:
        """Everything that a checkpoint holds of this rank. Local."""
        model, rank = self.parallel.model, self.parallel.tp_rank
        return {
            **model_regions(model, rank=rank),
            **optimizer_regions(self.optimizer, model, rank=rank),
        }

    def resume_at(self, step: int) -> None:
        """Tell the optimizer how far the run is, after `regions` were read. Local."""
        set_optimizer_step(self.optimizer, step)

    def _accumulate(self, index: int) -> torch.Tensor:
        """Gradients of all micro-batches; returns the nats of this rank's tokens, in fp64."""
        parallel = self.parallel
        num_targets = self.batches.num_targets(index)
        num_micro = self.batches.num_micro_batches(parallel.dp_size)
        nats = torch.zeros((), dtype=torch.float64, device=parallel.device)
        self.gradients.begin_step()
        for micro in range(num_micro):
            batch = self.batches.batch(
                index, dp_rank=parallel.dp_rank, dp_size=parallel.dp_size, micro=micro
            )
            self.gradients.is_last = micro == num_micro - 1
            with autocast(self.config.train.dtype, parallel.device):
                inputs = BatchTensors.of(batch, self._plan(batch), parallel.device)
                losses = parallel.model.token_losses(inputs.tokens, inputs.targets, inputs.plan)
            (losses.sum() / num_targets).backward()
            nats += losses.detach().double().sum()
        self.gradients.finish_step()
        return nats

    def _plan(self, batch: Batch) -> Plan:
        """Of the first batch the ranks compare what they have read; later ones follow from it."""
        if self._has_compared:
            return self.parallel.plan(batch.cu_seqlens)
        plan = self.parallel.plan(batch.cu_seqlens, verify=True)
        self._has_compared = True
        _log.info("%s", plan.describe())
        return plan

    def _agree(self, nats: torch.Tensor, is_asked_to_stop: bool) -> tuple[float, bool]:
        """Nats of the global batch, and whether any rank was asked to stop: one small sum."""
        counts = self.parallel.tp_rank == 0
        mine = torch.stack([nats * counts, nats.new_tensor(float(is_asked_to_stop))])
        everyone = self.parallel.groups[EVERYONE].collectives
        total, asked = everyone.all_reduce(mine, out=mine).tolist()
        return total, asked > 0
