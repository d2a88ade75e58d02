"""The buckets of a model, started in one order on all ranks, whatever arrives first."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pcomm.ntp.sync import errors
from pcomm.ntp.sync.buckets import deal_out
from pcomm.ntp.sync.grad_groups import Strategy
from pcomm.ntp.sync.strategies import BucketSum, GatherCoreSum, IntervalSum, SumPlan
from pcomm.ntp.sync.synced_params import SyncedParam

__all__ = ["BucketQueue"]


class BucketQueue:
    """Starts a bucket once its gradients have arrived and all buckets before it are started.

    Args:
        params: Parameters in the order of the model.
        sums: Plan of the sums.
        strategy: Strategy of the sums.
        bucket_bytes: Size of a bucket, in bytes.
        full_degree: Number of ranks of a whole tensor-parallel group.
    """

    def __init__(
        self,
        params: Sequence[SyncedParam],
        sums: SumPlan,
        strategy: Strategy,
        bucket_bytes: int,
        full_degree: int,
    ) -> None:
        dealt = deal_out(params, bucket_bytes, full_degree)
        kind = IntervalSum if strategy == "interval" else GatherCoreSum
        self._params = params
        self._buckets = [[one.parameter for one in own] for own in dealt]
        self._sums: list[BucketSum] = [kind(own, sums) for own in dealt]
        places = {id(one): number for number, own in enumerate(dealt) for one in own}
        self._bucket_of = [places[id(one)] for one in params]
        self.begin()

    @property
    def has_started(self) -> bool:
        """Whether sums of this step are in flight."""
        return self._started > 0

    def begin(self) -> None:
        """Begin another step. Local."""
        self._started = 0
        self._missing = [len(own) for own in self._buckets]
        self._is_here = [False] * len(self._params)

    def arrived(self, index: int, weight: float) -> None:
        """The gradient of a parameter is complete: start what can be started.

        Args:
            index: Index of the parameter.
            weight: Factor of all gradients of the step.

        Raises:
            ConfigError: Its bucket has been started.
        """
        bucket = self._bucket_of[index]
        if bucket < self._started:
            raise errors.late_gradient(self._params[index].name)
        if self._is_here[index]:
            return
        self._is_here[index] = True
        self._missing[bucket] -= 1
        while self._started < len(self._sums) and not self._missing[self._started]:
            self._start_next(weight)

    def finish(self, weight: float) -> None:
        """Start all others, wait for all, and write the sums into the gradients. Collective."""
        while self._started < len(self._sums):
            self._start_next(weight)
        for own, one in zip(self._buckets, self._sums, strict=True):
            one.finish(_gradients(own))
        self._started = 0

    def forget(self) -> None:
        """Drop the buffers. Local."""
        self._params, self._buckets, self._sums = (), [], []

    def _start_next(self, weight: float) -> None:
        number = self._started
        # Counted first: what fails half way has sent something.
        self._started += 1
        # A backward that is differentiated again records what its hooks do.
        with torch.no_grad():
            self._sums[number].start(_gradients(self._buckets[number]), weight)


def _gradients(parameters: Sequence[torch.nn.Parameter]) -> list[Tensor]:
    """The gradients, zeros where none has arrived."""
    found = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        found.append(parameter.grad)
    return found
