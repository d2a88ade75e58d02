"""Parameters, gradients and optimizer state as shards: what pcomm-fsdp does for these models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import Optimizer

from pcomm.core import Collectives
from pcomm.core.checkpoint import ShardView
from pcomm.core.tensor_parallel import param_layouts_of
from pcomm.fsdp import (
    Precision,
    ReshardPolicy,
    Scope,
    fully_shard,
    model_shard_views,
    optimizer_shard_views,
)
from pcomm.integration.checkpoint.state import MOMENTS, make_moments
from pcomm.integration.models.block import Block
from pcomm.integration.parallelize import Parallel
from pcomm.integration.train.precision import names_used_in_bf16

__all__ = ["Shards"]

_STAGES = {1: ReshardPolicy.zero1, 2: ReshardPolicy.zero2, 3: ReshardPolicy.zero3}

# A gradient is rounded once, by the product it comes from. Sums over ranks and micro-batches in
# bf16 would round it again for each of them, and lose what is small beside the sum so far.
_BF16 = Precision(torch.bfloat16, torch.float32, casts_inputs=False)
_FULL = Precision()


class Shards:
    """Shards of a model over the ranks that would otherwise hold replicas of it.

    Each block is gathered when it is needed; embedding, last norm and head once a micro-batch.
    Losses are divided by the targets of the global batch, so gradients are sums, with no divisor.

    In bf16, what forward reads rounded is gathered rounded, with 2 bytes a parameter; the rest, a
    few vectors of each block and the embedding, in fp32, once a step. Every result is the one that
    autocast gives with whole parameters, but for the order of sums.

    Args:
        parallel: A model whose parameters are whole, but for the ranks that split layers.
        dtype: In which forward computes, under `autocast`.
    """

    def __init__(self, parallel: Parallel, dtype: str = "fp32") -> None:
        self._placements = param_layouts_of(parallel.model)
        self._ranks = parallel.ranks
        dense, *others = (scope.name for scope in parallel.scopes)
        scopes = {name: self._scope(name, parallel, dtype) for name in others}
        precision = _precision(parallel, dense, dtype)
        if precision is _BF16:
            scopes["fp32"] = _full_scope(parallel, dense)
        self.sharded = fully_shard(
            parallel.model,
            parallel.roles(dense),
            units=[Block],
            scopes=scopes,
            reshard=_STAGES[parallel.sizes.zero](),
            precision=precision,
            divisor=1,
            entry_points=("forward", "token_losses"),
        )
        self.holders: dict[str, Collectives] = {
            scope.name: parallel.roles(scope.name).gather.collectives for scope in parallel.scopes
        }
        """By scope, the ranks that hold the shards of a parameter."""

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """This rank's part of each parameter."""
        return dict(self.sharded.named_parameters())

    def begin_step(self) -> None:
        """Forget the gradients of the last step. Local."""
        self.sharded.zero_grad()

    @contextmanager
    def micro_batch(self, *, is_last: bool) -> Iterator[None]:
        """Around forward and backward of a micro-batch."""
        with self.sharded.accumulate(is_last=is_last):
            yield

    def finish_step(self) -> None:
        """Gradients are summed when the last backward returns."""

    def regions(self, optimizer: Optimizer) -> dict[str, ShardView]:
        """This rank's part of everything that a checkpoint holds. Local."""
        sharded, placements, ranks = self.sharded, self._placements, self._ranks
        make_moments(optimizer, (p for p in sharded.parameters() if p.requires_grad))
        return {
            **model_shard_views(sharded, param_layouts=placements, ranks=ranks),
            **optimizer_shard_views(
                sharded, optimizer, keys=MOMENTS, param_layouts=placements, ranks=ranks
            ),
        }

    def parameters_changed(self) -> None:
        """Say that a checkpoint was read into the shards. Local; every rank says it."""
        self.sharded.parameters_changed()

    def _scope(self, name: str, parallel: Parallel, dtype: str) -> Scope:
        """The groups of the parameters whose placement says that they are of this scope."""

        def selects(parameter: str, _: nn.Parameter) -> bool:
            return self._placements[parameter].scope == name

        precision = _precision(parallel, name, dtype)
        return Scope(selects, parallel.roles(name), divisor=1, precision=precision)


def _precision(parallel: Parallel, scope: str, dtype: str) -> Precision:
    """Of the parameters of a scope; where nothing is gathered, autocast alone rounds them."""
    is_gathered = parallel.roles(scope).gather.size > 1
    return _BF16 if dtype == "bf16" and is_gathered else _FULL


def _full_scope(parallel: Parallel, dense: str) -> Scope:
    """The parameters that forward reads in fp32: dense ones, and few, so they stay for a step."""
    rounded = names_used_in_bf16(parallel.model)

    def selects(parameter: str, _: nn.Parameter) -> bool:
        return parameter not in rounded

    stage = _STAGES[min(parallel.sizes.zero, 2)]
    return Scope(selects, parallel.roles(dense), divisor=1, reshard=stage(), precision=_FULL)
