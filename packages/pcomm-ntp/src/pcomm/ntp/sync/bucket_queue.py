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
        self._params = params
        self._buckets = deal_out(params, bucket_bytes, full_degree)
        kind = IntervalSum if strategy == "interval" else GatherCoreSum
        self._sums: list[BucketSum] = [kind(own, sums) for own in self._buckets]
        places = {id(one): number for number, own in enumerate(self._buckets) for one in own}
        self._bucket_of = [places[id(one)] for one in params]
        self.begin()

    @property
    def has_started(self) -> bool:
        """Whether sums of this step are in flight."""
        return self._started > 0

    def begin(self) -> None:
        """Begin another step. Local."""
        self._started = 0
        # Gradients of each bucket that was started, with their versions.
        self._packed: list[list[tuple[Tensor, int]]] = []
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

    def start_others(self, weight: float) -> None:
        """Start all buckets that no gradient has started. Collective like `arrived`."""
        while self._started < len(self._sums):
            self._start_next(weight)

    def finish(self) -> None:
        """Wait for all, and write the sums into the gradients. Collective for gather-core.

        Raises:
            ConfigError: A gradient was changed or replaced after its bucket was packed.
        """
        self._check_unchanged()
        for packed, one in zip(self._packed, self._sums, strict=True):
            one.finish([gradient for gradient, _ in packed])
        # Gradients that the caller drops are not kept alive from here.
        self.begin()

    def forget(self) -> None:
        """Drop the buffers. Local."""
        self._params, self._buckets, self._sums, self._packed = (), [], [], []

    def _start_next(self, weight: float) -> None:
        number = self._started
        # Counted first: what fails half way has sent something.
        self._started += 1
        # A backward that is differentiated again records what its hooks do; and training cannot go
        # on with gradients of inference mode, which may be on around an empty micro-batch.
        with torch.inference_mode(False), torch.no_grad():
            gradients = [_gradient(one) for one in self._buckets[number]]
            self._sums[number].start(gradients, weight)
        self._packed.append([(one, one._version) for one in gradients])

    def _check_unchanged(self) -> None:
        for own, packed in zip(self._buckets, self._packed, strict=True):
            for one, (gradient, version) in zip(own, packed, strict=True):
                if one.parameter.grad is not gradient or gradient._version != version:
                    raise errors.changed_gradient(one.name)


def _gradient(param: SyncedParam) -> Tensor:
    """The gradient, zeros where none has arrived."""
    parameter = param.parameter
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, dtype=param.grad_dtype)
    return parameter.grad
