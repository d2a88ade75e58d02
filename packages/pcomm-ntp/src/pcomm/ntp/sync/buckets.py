"""Which gradients are summed together, when their sums start, and with which weights.

Buckets go in reverse order of the parameters, as backward reaches them, and are started in one
order on all ranks, whatever arrives first.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from pcomm.core.errors import ConfigError
from pcomm.ntp.sync.grad_groups import Strategy
from pcomm.ntp.sync.params import ModelGuard, SyncedParam
from pcomm.ntp.sync.sums import BucketSum, GatherCoreSum, IntervalSum, SumPlan

__all__ = ["BatchWeights", "BucketQueue", "deal_out"]


def deal_out(
    params: Sequence[SyncedParam], bucket_bytes: int, full_degree: int
) -> list[list[SyncedParam]]:
    """Parameters of each bucket, in the order in which buckets are started. Local.

    They are equal on all ranks of a stage: sizes are those of a shard at the full degree. A bucket
    is closed as soon as it has `bucket_bytes`. Gradients and sums of a bucket have one type.

    Args:
        params: Parameters in the order of the model.
        bucket_bytes: Size of a bucket, in bytes of the sum.
        full_degree: Number of ranks over which split parameters lie in a whole replica.
    """
    kinds: dict[tuple[torch.dtype, torch.dtype, torch.device], list[tuple[int, SyncedParam]]] = {}
    filled: list[list[tuple[int, SyncedParam]]] = []
    sizes: dict[object, int] = {}
    for turn, param in enumerate(reversed(params)):
        key = param.grad_dtype, param.reduce_dtype, param.parameter.device
        own = kinds.setdefault(key, [])
        own.append((turn, param))
        num_bytes = param.logical_shape.numel() * param.reduce_dtype.itemsize
        sizes[key] = sizes.get(key, 0) + num_bytes // (full_degree if param.units else 1)
        if sizes[key] >= bucket_bytes:
            filled.append(kinds.pop(key))
            sizes[key] = 0
    filled += kinds.values()
    # One is complete when its last gradient arrives.
    filled.sort(key=lambda own: own[-1][0])
    return [[param for _, param in own] for own in filled]


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
            raise ConfigError(
                f"backward: gradient of {self._params[index].name!r}",
                found="a second gradient after its sum was started",
                why="A step is: accumulate() around each backward, is_last=True for the last, "
                "finish().",
                fix="Run one backward in the last accumulate(), and each earlier one in its own; "
                "checkpoint "
                "activations with use_reentrant=False.",
            )
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
                    raise ConfigError(
                        "GradSync.finish",
                        found=f"a gradient of {one.name!r} that was changed, replaced or dropped "
                        "after its sum began",
                        why="The sum has what it was before, and would be written over it.",
                        fix="Change gradients after finish(), or before the last accumulate().",
                    )


def _gradient(param: SyncedParam) -> Tensor:
    """The gradient, zeros where none has arrived."""
    parameter = param.parameter
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, dtype=param.grad_dtype)
    return parameter.grad


class BatchWeights:
    """The first weight of a step is that of its sums; others are taken relative to it in backward.

    So a step whose micro-batches have one weight, as most have, multiplies nothing in backward.

    Args:
        params: Parameters whose gradients are weighted.
        guard: Guard of their model.

    Attributes:
        of_sums: Factor of what `.grad` has after the last micro-batch.
    """

    def __init__(self, params: Sequence[SyncedParam], guard: ModelGuard) -> None:
        self._params, self._guard = params, guard
        self.of_sums, self._factor = 1.0, 1.0
        self._hooks: list[tuple[Node, RemovableHandle]] = []

    def take(self, weight: float, *, is_first: bool) -> None:
        """Take the weight of the micro-batch that follows.

        Raises:
            ConfigError: The model has changed.
        """
        if is_first:
            self.of_sums = weight or 1.0
        self._factor = weight / self.of_sums
        if self._factor != 1.0 and not self._hooks:
            self._guard.check_model()
            self._scale_gradients()

    def close(self) -> None:
        """Remove all hooks. Local."""
        for _, hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _scale_gradients(self) -> None:
        """From now on multiply gradients before they are added to those of other weights."""
        this = weakref.ref(self)

        def scale(arrived: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
            found = this()
            if found is None or found._factor == 1.0:
                return None
            return tuple(one if one is None else one * found._factor for one in arrived)

        # At the node that adds to `.grad`: a hook of the parameter would see `autograd.grad`, too.
        nodes = [get_gradient_edge(one.parameter).node for one in self._params]
        # A node, and its hooks, live as long as something refers to it.
        self._hooks = [(node, node.register_prehook(scale)) for node in nodes]
