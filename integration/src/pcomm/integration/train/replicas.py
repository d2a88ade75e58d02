"""Whole parameters on every replica, and gradients summed over them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn
from torch.optim import Optimizer

from pcomm.core import Collectives
from pcomm.core.checkpoint import ShardView
from pcomm.integration.checkpoint.state import model_shard_views, optimizer_shard_views
from pcomm.integration.parallelize import Parallel
from pcomm.integration.train.data_parallel import ReplicaGradients

__all__ = ["Replicas"]


class Replicas:
    """The same as `Shards`, for a model of which every replica holds all.

    Closing the groups of `parallel` ends it: no hook stays on the parameters.

    Args:
        parallel: This rank's part of the model.
    """

    def __init__(self, parallel: Parallel) -> None:
        self._model, self._ranks = parallel.model, parallel.ranks
        self._gradients = ReplicaGradients(
            [(s.parameters.values(), s.replicas.collectives) for s in parallel.scopes]
        )
        # Weakly: groups that outlive this model must not keep it.
        gradients = weakref.ref(self._gradients)

        def close() -> None:
            found = gradients()
            if found is not None:
                found.close()

        parallel.groups.before_close(close)
        self.holders: dict[str, Collectives] = {}
        """By scope, the ranks that hold the shards of a parameter: none are sharded."""

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The parameters by name."""
        return dict(self._model.named_parameters())

    def begin_step(self) -> None:
        """Clear all gradients. Local."""
        self._gradients.begin_step()

    @contextmanager
    def micro_batch(self, *, is_last: bool) -> Iterator[None]:
        """Around forward and backward of a micro-batch."""
        self._gradients.is_last = is_last
        yield

    def finish_step(self) -> None:
        """Wait until every gradient is summed. Collective over the replicas."""
        self._gradients.finish_step()

    def regions(self, optimizer: Optimizer) -> dict[str, ShardView]:
        """This rank's part of everything that a checkpoint holds. Local."""
        model, ranks = self._model, self._ranks
        return {**model_shard_views(model, ranks), **optimizer_shard_views(optimizer, model, ranks)}

    def parameters_changed(self) -> None:
        """Nothing to do: the parameters are what forward reads."""
