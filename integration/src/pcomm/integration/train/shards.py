"""Parameters, gradients and optimizer state as shards: what pcomm-fsdp does for these models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn
from torch.optim import Optimizer

from pcomm.core.checkpoint.region import Region
from pcomm.core.collectives.protocol import Collectives
from pcomm.core.placement import placements_of
from pcomm.fsdp.checkpoint import model_regions, optimizer_regions
from pcomm.fsdp.fully_shard import fully_shard
from pcomm.fsdp.roles import Scope
from pcomm.fsdp.strategy import Shard
from pcomm.integration.checkpoint.state import MOMENTS
from pcomm.integration.models.block import Block
from pcomm.integration.parallelize import Parallel

__all__ = ["Shards"]


class Shards:
    """Shards of a model over the ranks that would otherwise hold replicas of it.

    Each block is gathered when it is needed; embedding, last norm and head once a micro-batch.
    Losses are divided by the targets of the global batch, so gradients are sums, with no divisor.

    Args:
        parallel: A model whose parameters are whole, but for the ranks that split layers.
    """

    def __init__(self, parallel: Parallel) -> None:
        self._placements = placements_of(parallel.model)
        self._ranks = parallel.ranks
        dense, *others = (scope.name for scope in parallel.scopes)
        stages = {1: Shard.zero1, 2: Shard.zero2, 3: Shard.zero3}
        self.sharded = fully_shard(
            parallel.model,
            parallel.roles(dense),
            units=[Block],
            scopes={name: self._scope(name, parallel) for name in others},
            shard=stages[parallel.sizes.zero](),
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

    def regions(self, optimizer: Optimizer) -> dict[str, Region]:
        """This rank's part of everything that a checkpoint holds. Local."""
        sharded, placements, ranks = self.sharded, self._placements, self._ranks
        return {
            **model_regions(sharded, placements=placements, ranks=ranks),
            **optimizer_regions(
                sharded, optimizer, keys=MOMENTS, placements=placements, ranks=ranks
            ),
        }

    def parameters_changed(self) -> None:
        """Say that a checkpoint was read into the shards. Local; every rank says it."""
        self.sharded.parameters_changed()

    def _scope(self, name: str, parallel: Parallel) -> Scope:
        """The groups of the parameters whose placement says that they are of this scope."""

        def selects(parameter: str, _: nn.Parameter) -> bool:
            return self._placements[parameter].scope == name

        return Scope(selects, parallel.roles(name), divisor=1)
