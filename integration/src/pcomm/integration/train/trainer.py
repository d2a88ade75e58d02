"""One training step and all that it changes, and whether a micro-batch fits into memory."""

from __future__ import annotations

import ctypes
import logging
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.optim import Optimizer
from torch.profiler import record_function

from pcomm.core import Groups
from pcomm.core.checkpoint import ShardView
from pcomm.core.errors import ConfigError
from pcomm.core.trace import Recorder
from pcomm.gdn_cp import Plan
from pcomm.integration.checkpoint.state import set_optimizer_step
from pcomm.integration.config.model_rules import expert_blocks
from pcomm.integration.config.sections import Resolved
from pcomm.integration.data.batches import Batch, TrainBatches, padded
from pcomm.integration.data.inputs import DeviceBatch, ReadAhead
from pcomm.integration.metrics.rows import bits_per_byte
from pcomm.integration.models.language_model import LanguageModel
from pcomm.integration.models.moe import Balance, rows_of_tokens
from pcomm.integration.parallelize import (
    ALL_RANKS,
    SAME_ROWS,
    place_of,
    plan_sequences,
    share_gradients,
)
from pcomm.integration.precision import autocast
from pcomm.integration.replicas import DataParallel
from pcomm.integration.train.optimizers import ParameterKinds, make_optimizer, set_rates
from pcomm.integration.train.run_state import Rewarm, first_not_finite, learning_rates
from pcomm.integration.train.speed import Speed, peak_memory_mib
from pcomm.ntp import NtpPlan

__all__ = [
    "StepResult",
    "Trainer",
    "check_batch_memory",
    "largest_memory",
    "memory_mib",
]

_log = logging.getLogger("pcomm.train")


class Trainer:
    """A model, its optimizer and its batches; a step of it is one step of the whole job.

    Making one may shard the model's parameters, see `share_gradients`; collective over all ranks.

    Args:
        model: This rank's part of the model, from `build_model`.
        groups: The groups of `open_run_groups`.
        config: The validated configuration.
        batches: The batches of the train split.
        plan: Plan of the ranks in use, where it is not the one of the configuration.
        replicas: Sums of gradients; None for those of `share_gradients`.
        optimizer: Optimizer of the parameters of `replicas`; None for that of
            `make_optimizer`.
        compares: False if context-parallel ranks need not compare their first batch.
        recorder: Recorder of the spans of forward, backward and the optimizer; None for no record.
        peak_flops: Operations a second that all ranks together can do, of which the rows then tell
            the share; None for no share.

    Attributes:
        replicas: The parameters that the optimizer changes, and the sum of their gradients.
        rewarm: Place where the learning rate leaves its schedule for some steps; None if none.
    """

    def __init__(
        self,
        model: LanguageModel,
        groups: Groups,
        config: Resolved,
        batches: TrainBatches,
        *,
        plan: NtpPlan | None = None,
        replicas: DataParallel | None = None,
        optimizer: Optimizer | None = None,
        compares: bool = True,
        recorder: Recorder | None = None,
        peak_flops: float | None = None,
    ) -> None:
        self._recorder = recorder or Recorder(is_on=False)
        self.model, self.groups, self.config, self.batches = model, groups, config, batches
        # Asked before a shard that is cut inside rows has lost its dimensions.
        kinds = ParameterKinds.of(model)
        flops = model.training_flops(config.train.sequence_length)
        self._speed = Speed(config.train.global_batch_tokens, flops, peak_flops)
        self.replicas = replicas or share_gradients(model, config, groups, plan)
        self.optimizer = optimizer or make_optimizer(
            self.replicas.named_parameters(), kinds, config.train
        )
        self.rewarm: Rewarm | None = None
        self._ahead = ReadAhead(batches) if model.device.type == "cuda" else None
        self._place = place_of(config, groups, plan)
        self._tp = groups["tp"].collectives
        self._has_compared = groups["cp"].is_identity or not compares
        layers = sum(expert_blocks(config.model))
        self._balanced_layers = layers if config.model.balance_loss else 0

    def step(self, index: int, *, is_asked_to_stop: bool = False) -> StepResult:
        """Optimizer step `index`, from 0. Collective over all ranks.

        The loss of every token is divided by the number of targets in the *global* batch before
        backward, so the sum over micro-batches, replicas and context-parallel ranks is the mean
        over tokens, whatever their share. Where the loss or the norm of the gradient is not a
        finite number on any rank, no rank changes its parameters, and gradients stay as they are.
        """
        start = time.perf_counter()
        found = self.accumulate(index)
        norm = self.replicas.finish()
        # Before the update, so that all ranks make it or none does.
        agreed = self.agree(found, norm, is_asked_to_stop=is_asked_to_stop)
        rate = self.set_learning_rate(index)
        if agreed.is_finite:
            self._update(norm)
        row = self.row(index, agreed, norm, rate, time.perf_counter() - start)
        return StepResult(row, agreed.wants_to_stop, agreed.is_finite)

    def change(self, index: int) -> None:
        """`step`, of which nothing is read: for tensors without values. Collective."""
        self.accumulate(index)
        norm = self.replicas.finish()
        self.set_learning_rate(index)
        self._update(norm)

    def set_learning_rate(self, index: int) -> float:
        """Give the optimizer the learning rates of step `index`; returns AdamW's. Local."""
        rate, muon_rate = learning_rates(self.config.train, index, self.rewarm)
        set_rates(self.optimizer, rate, muon_rate)
        return rate

    def row(
        self, index: int, agreed: GlobalMetrics, norm: torch.Tensor, rate: float, elapsed_s: float
    ) -> dict[str, float]:
        """What there is to tell of step `index`, from 0; the same on all ranks. Local."""
        row = {
            "step": index + 1,
            "loss": agreed.nats / self.batches.num_targets(index),
            "train_bits_per_byte": bits_per_byte(agreed.nats, agreed.num_bytes),
            **self._speed.row(index, elapsed_s),
            "lr": rate,
            "grad_norm": float(norm),
            "memory_mib": memory_mib(self.model.device),
            "peak_memory_mib": peak_memory_mib(self.model.device),
        }
        if num_layers := self._balanced_layers:
            # 1 where the experts of a layer get as many tokens each, more where tokens crowd.
            row["balance_loss"] = agreed.balance / num_layers
        return row

    def first_not_finite(self) -> str | None:
        """Which tensor is to blame after a step; see `first_not_finite`. Collective."""
        return first_not_finite(self.model, self.groups[ALL_RANKS].collectives)

    def shard_views(self) -> dict[str, ShardView]:
        """This rank's part of every tensor that a checkpoint holds, by name. Local."""
        return self.replicas.shard_views(self.optimizer)

    def resume_at(self, step: int, *, skipped: int = 0, rewarm: Rewarm | None = None) -> None:
        """Tell the optimizer how far the run is, after `shard_views` were read. Local.

        Args:
            step: Number of steps that are done.
            skipped: Number of them that made no update.
            rewarm: Place where the learning rate leaves its schedule for some steps; None if none.
        """
        set_optimizer_step(self.optimizer, step - skipped)
        self.rewarm = rewarm
        self.replicas.parameters_changed()

    def accumulate(self, index: int) -> LocalLoss:
        """Compute the gradients of a step, whose sums over replicas begin meanwhile. Collective.

        The loss of every token is divided by the targets of the *global* batch; see `step`.
        """
        num_targets = self.batches.num_targets(index)
        place = self._place
        replica, num_replicas, shares = place.replica, place.num_replicas, place.shares
        num_micro = self.batches.num_micro_batches(num_replicas, dp_rank=replica, shares=shares)
        nats, num_bytes = torch.zeros((), dtype=torch.float64, device=self.model.device), 0
        balance_loss = torch.zeros_like(nats)
        self.replicas.zero_grad()
        self._speed.data_s = 0.0
        for micro in range(num_micro):
            start = time.perf_counter()
            with record_function("data"):
                batch = (self._ahead or self.batches).batch(
                    index, micro=micro, dp_rank=replica, dp_size=num_replicas, shares=shares
                )
            self._speed.data_s += time.perf_counter() - start
            with self.replicas.accumulate(is_last=micro == num_micro - 1):
                losses, balance = self._forward(batch)
                if balance is not None:
                    # Before backward, in which layers may be computed, and counted, again.
                    balance_loss += balance.total()
                with self._span("backward"):
                    (losses.sum() / num_targets).backward()
            nats += losses.detach().double().sum()
            num_bytes += batch.num_bytes
        return LocalLoss(nats, balance_loss, num_bytes)

    def _forward(self, batch: Batch) -> tuple[torch.Tensor, Balance | None]:
        """Losses of this rank's tokens, and what their layers add to balance their experts."""
        device = self.model.device
        with self._span("forward"), autocast(self.config.train.dtype, device):
            whole = padded(batch, self._place.token_multiple)
            inputs = DeviceBatch.of(whole, self._plan(whole), device)
            balance = self._balance(batch, inputs.plan) if self._balanced_layers else None
            return self.model.token_losses(*inputs, balance), balance

    def _balance(self, batch: Batch, plan: Plan) -> Balance:
        """What the layers of a micro-batch need for their balance losses."""
        row_tokens = self.config.train.sequence_length
        num_rows = len(batch.tokens) // row_tokens
        rows = rows_of_tokens(plan, row_tokens, self._tp, self.model.device)
        return Balance(
            rows.clamp(max=num_rows),
            num_rows=num_rows,
            row_tokens=row_tokens,
            rows_in_batch=self.batches.rows_per_batch,
            coefficient=self.config.model.balance_loss,
            collectives=self.groups[SAME_ROWS].collectives,
            has_filling=plan.tokens.num_tokens > len(batch.tokens),
        )

    def _plan(self, batch: Batch) -> Plan:
        """The plan of a batch; of the first one the ranks compare what they have read."""
        is_first, self._has_compared = not self._has_compared, True
        group, strategy = self.groups["cp"], self.config.parallel.cp_strategy
        plan = plan_sequences(
            self.model, batch.cu_seqlens, group, strategy=strategy, verify=is_first
        )
        if is_first:
            _log.info("%s", plan.describe())
        return plan

    def agree(
        self, found: LocalLoss, norm: torch.Tensor | None = None, *, is_asked_to_stop: bool = False
    ) -> GlobalMetrics:
        """What all ranks found together: one small sum. Collective.

        The norm is that of the whole model on every rank, but for a rank that computes wrongly;
        what each rank finds goes into the sum, so that all decide alike even then.

        Args:
            found: Result of `accumulate` on this rank.
            norm: The norm of the gradient; None where it is not known yet.
            is_asked_to_stop: True if this rank was asked to stop.
        """
        nats, balance, num_bytes = found
        # Ranks of tp have the nats of the same tokens, but each routes tokens of its own.
        counts = self._tp.rank == 0
        is_bad = ~(nats.isfinite() & balance.isfinite())
        if norm is not None:
            is_bad = is_bad | ~norm.isfinite()
        nats = nats if counts else torch.zeros_like(nats)
        asked = nats.new_tensor(float(is_asked_to_stop))
        # Context-parallel ranks all have the whole batch, too.
        of_text = nats.new_tensor(num_bytes if counts and self._place.cp == 0 else 0)
        mine = torch.stack([nats, balance, is_bad.to(nats), asked, of_text])
        everyone = self.groups[ALL_RANKS].collectives
        total, balance_loss, num_bad, num_asked, num_bytes = everyone.all_reduce(
            mine, out=mine
        ).tolist()
        # Finite terms may still have a sum that is not.
        is_finite = num_bad == 0 and math.isfinite(total) and math.isfinite(balance_loss)
        return GlobalMetrics(total, balance_loss, is_finite, num_asked > 0, int(num_bytes))

    def _update(self, norm: torch.Tensor) -> None:
        """Clip the gradients and change the parameters."""
        clip_norm = self.config.train.clip_norm
        if clip_norm != "none":
            self.replicas.clip(clip_norm, norm)
        with self._span("optimizer"):
            self.optimizer.step()

    @contextmanager
    def _span(self, name: str) -> Iterator[None]:
        """A part of a step, as our trace and torch's profiler show it."""
        with self._recorder.span(name), record_function(name):
            yield


class LocalLoss(NamedTuple):
    """What a rank finds in its tokens of a step, in fp64."""

    nats: torch.Tensor
    """Nats of its targets."""

    balance: torch.Tensor
    """Its part of the balance losses."""

    num_bytes: int
    """Bytes of text that its targets stand for; with those of other ranks of cp and tp."""


class GlobalMetrics(NamedTuple):
    """What all ranks found in a step; the same on all of them."""

    nats: float
    """Nats of all targets of the global batch."""

    balance: float
    """Balance losses of all layers."""

    is_finite: bool
    """Whether all numbers are."""

    wants_to_stop: bool
    """Whether any rank was asked to stop."""

    num_bytes: int
    """Bytes of text that all targets of the global batch stand for."""


class StepResult(NamedTuple):
    """What a step tells; the same on all ranks."""

    row: dict[str, float]
    """`step` (from 1), `loss` (nats per token over the global batch), `tokens_per_s`, ..."""

    wants_to_stop: bool
    """Whether any rank was asked to stop."""

    is_finite: bool = True
    """Whether loss and gradient were finite numbers; otherwise no parameter has changed."""


# The fields of glibc's `struct mallinfo2`, of which the 5th and the 8th are asked for.
_FIELDS = 10

_MAPPED, _IN_USE = 4, 7


class _MallInfo(ctypes.Structure):
    _fields_ = [("numbers", ctypes.c_size_t * _FIELDS)]


def memory_mib(device: torch.device) -> float:
    """MiB allocated on a CUDA device, else by this process, which may keep more of them. Local.

    What an allocator keeps for later is not counted: it grows with what fragments it, and would
    look like a leak.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / 2**20
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        # No glibc of 2.33 or later: the most that it ever had is known everywhere.
        return peak_memory_mib(device)
    mallinfo.restype = _MallInfo
    numbers = mallinfo().numbers
    return float(numbers[_MAPPED] + numbers[_IN_USE]) / 2**20


# The id of each token and of the one after it.
_HOST_BYTES = 2 * 8

# A block has what comes in and what goes out.
_HIDDEN_STATES = 2

_GIB = 2**30


def largest_memory(device: torch.device) -> int:
    """Bytes that no rank can have more of, used or not: those of its host or GPU. Local."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_batch_memory(config: Resolved, memory_bytes: int) -> None:
    """Refuse a micro-batch of which a part is larger than all memory. Local.

    What is counted is the least: token ids, and the hidden states at both ends of one block. What
    passes may still be too large, once weights and what backward needs come to it.

    Args:
        config: The configuration.
        memory_bytes: Bytes of `largest_memory`.

    Raises:
        ConfigError: The micro-batch is larger; names the most tokens that are not.
    """
    train, parallel = config.train, config.parallel
    sharers = parallel.cp * (parallel.tp if parallel.sequence else 1)
    number = 2 if train.dtype == "bf16" else 4
    per_token = _HOST_BYTES + _HIDDEN_STATES * config.model.width * number / sharers
    tokens = train.micro_batch_tokens
    if (needed := tokens * per_token) <= memory_bytes:
        return
    most = int(memory_bytes / per_token)
    is_row = train.sequence_length > most
    raise ConfigError(
        "train.sequence_length" if is_row else "train.micro_batch_tokens",
        found=f"{train.sequence_length if is_row else tokens} tokens; {tokens} at once take at "
        f"least {needed / _GIB:.1f} GiB on each rank, and it has {memory_bytes / _GIB:.1f} GiB",
        why="A rank computes a micro-batch of whole rows at once: their token ids, and the hidden "
        f"states at both ends of a block of width {config.model.width}.",
        fix=f"Set train.sequence_length far below {most}, and train.global_batch_tokens to a "
        "multiple of it."
        if is_row
        else f"Set train.micro_batch_tokens far below {most}, to a multiple of "
        f"train.sequence_length = {train.sequence_length}.",
    )
