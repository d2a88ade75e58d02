"""One training step, and everything that it changes."""

from __future__ import annotations

import logging
import math
import time
from typing import NamedTuple

import torch
from torch.optim import AdamW

from pcomm.core.checkpoint import ShardView
from pcomm.core.trace import Recorder
from pcomm.gdn_cp import Plan
from pcomm.integration.checkpoint.state import set_optimizer_step
from pcomm.integration.config import Config
from pcomm.integration.config_rules import expert_blocks
from pcomm.integration.data.batches import TrainBatches
from pcomm.integration.data.packing import Batch
from pcomm.integration.models.moe.balance import Balance
from pcomm.integration.parallelize import EVERYONE, Parallel, names_that_decay
from pcomm.integration.train.gradient_norm import clip_by_global_norm, sum_partial_gradients
from pcomm.integration.train.memory import memory_mib
from pcomm.integration.train.not_finite import first_not_finite
from pcomm.integration.train.precision import autocast
from pcomm.integration.train.replicas import Replicas
from pcomm.integration.train.schedule import Rewarm, learning_rate
from pcomm.integration.train.shards import Shards
from pcomm.integration.train.tensors import BatchTensors

__all__ = ["StepResult", "Trainer"]

_log = logging.getLogger("pcomm.train")


class StepResult(NamedTuple):
    """What a step tells; the same on all ranks."""

    row: dict[str, float]
    """`step` (from 1), `loss` (nats per token over the global batch), `tokens_per_s`, ..."""

    wants_to_stop: bool
    """Whether any rank was asked to stop."""

    is_finite: bool = True
    """Whether loss and gradient were finite numbers; otherwise no parameter has changed."""


class Trainer:
    """A model, its optimizer and its batches; a step of it is one step of the whole job.

    Args:
        parallel: This rank's part of the model.
        config: Validated.
        batches: Of the train split.
        recorder: Gets spans of forward, backward and the optimizer; by default nobody does.
    """

    def __init__(
        self,
        parallel: Parallel,
        config: Config,
        batches: TrainBatches,
        *,
        recorder: Recorder | None = None,
    ) -> None:
        self._recorder = recorder or Recorder(is_on=False)
        self.parallel, self.config, self.batches = parallel, config, batches
        train = config.train
        decaying = names_that_decay(parallel.model)
        is_whole = config.parallel.data == "replicate"
        self.data = Replicas(parallel) if is_whole else Shards(parallel, train.dtype)
        parameters = self.data.parameters
        self.optimizer = AdamW(
            [
                {
                    "params": [p for name, p in parameters.items() if name in decaying],
                    "weight_decay": train.weight_decay,
                },
                {
                    "params": [p for name, p in parameters.items() if name not in decaying],
                    "weight_decay": 0.0,
                },
            ],
            lr=train.learning_rate,
            betas=train.betas,
            fused=True,
        )
        self.rewarm: Rewarm | None = None
        """Where the learning rate leaves its schedule for some steps."""
        self._tp = parallel.groups["tp"].collectives
        self._splitting = {s.name: s.split.collectives for s in parallel.scopes}
        self._has_compared = parallel.groups["cp"].is_identity
        model = parallel.model.config
        self._balanced_layers = sum(expert_blocks(model)) if model.balance_loss else 0

    def step(self, index: int, *, is_asked_to_stop: bool = False) -> StepResult:
        """Optimizer step `index`, from 0. Collective over all ranks.

        The loss of every token is divided by the number of targets in the *global* batch before
        backward, so the sum over micro-batches, replicas and context-parallel ranks is the mean
        over tokens, whatever their share. Where the loss or the norm of the gradient is not a
        finite number on any rank, no rank changes its parameters.
        """
        start = time.perf_counter()
        nats, balance = self._accumulate(index)
        model = self.parallel.model
        sum_partial_gradients(model, self._tp)
        norm = clip_by_global_norm(
            model, self._splitting, self.config.train.clip_norm, holders=self.data.holders
        )
        # Before the update, so that all ranks make it or none does.
        loss, balance_loss, is_finite, wants_to_stop = self._agree(
            nats, balance, norm, is_asked_to_stop
        )
        rate = learning_rate(self.config.train, index, self.rewarm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if is_finite:
            with self._recorder.span("optimizer"):
                self.optimizer.step()
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
        if num_layers := self._balanced_layers:
            # 1 where the experts of a layer get as many tokens each, more where tokens crowd.
            row["balance_loss"] = balance_loss / num_layers
        return StepResult(row, wants_to_stop, is_finite)

    def first_not_finite(self) -> str | None:
        """Which tensor is to blame after a step; see `not_finite.first_not_finite`. Collective."""
        return first_not_finite(self.parallel.model, self.parallel.groups[EVERYONE].collectives)

    def regions(self) -> dict[str, ShardView]:
        """Everything that a checkpoint holds of this rank. Local."""
        return self.data.regions(self.optimizer)

    def resume_at(self, step: int, *, skipped: int = 0, rewarm: Rewarm | None = None) -> None:
        """Tell the optimizer how far the run is, after `regions` were read. Local.

        Args:
            step: Steps that are done.
            skipped: How many of them made no update.
            rewarm: Where the learning rate leaves its schedule for some steps.
        """
        set_optimizer_step(self.optimizer, step - skipped)
        self.rewarm = rewarm
        self.data.parameters_changed()

    def _accumulate(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of all micro-batches.

        Returns:
            In fp64, the nats of this rank's tokens, and its part of the balance losses.
        """
        parallel = self.parallel
        num_targets = self.batches.num_targets(index)
        num_micro = self.batches.num_micro_batches(parallel.dp_size)
        nats = torch.zeros((), dtype=torch.float64, device=parallel.device)
        balance_loss = torch.zeros_like(nats)
        self.data.begin_step()
        for micro in range(num_micro):
            batch = self.batches.batch(
                index, dp_rank=parallel.dp_rank, dp_size=parallel.dp_size, micro=micro
            )
            with self.data.micro_batch(is_last=micro == num_micro - 1):
                losses, balance = self._forward(batch)
                if balance is not None:
                    # Before backward, in which layers may be computed, and counted, again.
                    balance_loss += balance.total()
                with self._recorder.span("backward"):
                    (losses.sum() / num_targets).backward()
            nats += losses.detach().double().sum()
        self.data.finish_step()
        return nats, balance_loss

    def _forward(self, batch: Batch) -> tuple[torch.Tensor, Balance | None]:
        """Losses of this rank's tokens, and what their layers add to balance their experts."""
        parallel, train = self.parallel, self.config.train
        with self._recorder.span("forward"), autocast(train.dtype, parallel.device):
            inputs = BatchTensors.of(batch, self._plan(batch), parallel.device)
            balance = parallel.balance(
                inputs.plan,
                row_tokens=train.sequence_length,
                rows_in_batch=self.batches.rows_per_batch,
            )
            losses = parallel.model.token_losses(
                inputs.tokens, inputs.targets, inputs.plan, balance
            )
        return losses, balance

    def _plan(self, batch: Batch) -> Plan:
        """Of the first batch the ranks compare what they have read; later ones follow from it."""
        if self._has_compared:
            return self.parallel.plan(batch.cu_seqlens)
        plan = self.parallel.plan(batch.cu_seqlens, verify=True)
        self._has_compared = True
        _log.info("%s", plan.describe())
        return plan

    def _agree(
        self, nats: torch.Tensor, balance: torch.Tensor, norm: torch.Tensor, is_asked_to_stop: bool
    ) -> tuple[float, float, bool, bool]:
        """Losses of the global batch, whether all is finite, whether to stop: one small sum.

        The norm is that of the whole model on every rank, but for a rank that computes wrongly;
        what each rank finds goes into the sum, so that all decide alike even then.
        """
        # Ranks of tp have the nats of the same tokens, but each routes tokens of its own.
        counts = self.parallel.tp_rank == 0
        is_bad = ~(norm.isfinite() & nats.isfinite() & balance.isfinite())
        nats = nats if counts else torch.zeros_like(nats)
        asked = nats.new_tensor(float(is_asked_to_stop))
        mine = torch.stack([nats, balance, is_bad.to(nats), asked])
        everyone = self.parallel.groups[EVERYONE].collectives
        total, balance_loss, num_bad, num_asked = everyone.all_reduce(mine, out=mine).tolist()
        # Finite terms may still have a sum that is not.
        is_finite = num_bad == 0 and math.isfinite(total) and math.isfinite(balance_loss)
        return total, balance_loss, is_finite, num_asked > 0
