"""Gradients summed over the replicas while the backward pass is still computing earlier ones."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pcomm.core import Collectives, Pending

__all__ = ["ReplicaGradients"]

# Large enough that a collective is mostly bandwidth, small enough that several overlap backward.
_BUCKET_BYTES = 4 << 20


@dataclass
class _Bucket:
    """Gradients that lie in one buffer and are reduced by one collective."""

    buffer: Tensor
    size: int
    collectives: Collectives
    missing: int = 0
    pending: Pending | None = field(default=None)


class ReplicaGradients:
    """The `.grad` of every parameter, summed over the ranks that hold the same parameter.

    Alone, a rank only clears gradients. Otherwise they lie in flat buckets, last parameters
    first, and a bucket is reduced as soon as backward has written all of it; so most of the
    communication runs while the rest of the gradients is computed. Experts have other replicas than
    the rest of a model, so they are a scope with buckets of its own.

    Each step: `begin_step`, backward of every micro-batch with `is_last` set for the last,
    `finish_step`.

    The caller owns this object and the parameters; a parameter's hook only looks back at it. So
    model and communicators are free as soon as the caller drops them, or calls `close`.

    Args:
        scopes: Parameters that are trained, each once, with the collectives of the group over
            which their gradients are summed; these carry no gradients.
    """

    def __init__(self, scopes: Sequence[tuple[Collection[nn.Parameter], Collectives]]) -> None:
        self.is_last = False
        self._alone: list[nn.Parameter] = []
        self._buckets: list[_Bucket] = []
        self._hooks: list[RemovableHandle] = []
        for parameters, collectives in scopes:
            if collectives.size == 1:
                self._alone += parameters
            else:
                self._add_buckets(list(parameters), collectives)

    def begin_step(self) -> None:
        """Clear all gradients. Local."""
        self.is_last = False
        for parameter in self._alone:
            parameter.grad = None
        for bucket in self._buckets:
            bucket.buffer.zero_()
            bucket.missing, bucket.pending = bucket.size, None

    def finish_step(self) -> None:
        """Wait until every gradient is summed. Collective over the replicas of every scope.

        A parameter that took no part in the step counts with a gradient of zero.
        """
        for bucket in self._buckets:
            if bucket.pending is None:
                self._reduce(bucket)
        for bucket in self._buckets:
            assert bucket.pending is not None
            bucket.pending.wait()
        self.is_last = False

    def close(self) -> None:
        """Take the hooks off the parameters and let go of groups and buffers. Local.

        The gradients stay as they are. Nothing else can be called afterwards; calling it again
        does nothing.
        """
        for hook in self._hooks:
            hook.remove()
        for kept in (self._hooks, self._buckets, self._alone):
            kept.clear()

    def _add_buckets(self, parameters: list[nn.Parameter], collectives: Collectives) -> None:
        # Backward reaches the last layers first, so their bucket is full first.
        waiting: list[nn.Parameter] = []
        for parameter in reversed(parameters):
            is_full = _bytes([*waiting, parameter]) > _BUCKET_BYTES
            if waiting and (is_full or waiting[0].dtype != parameter.dtype):
                self._add_bucket(waiting, collectives)
                waiting = []
            waiting.append(parameter)
        self._add_bucket(waiting, collectives)

    def _add_bucket(self, parameters: list[nn.Parameter], collectives: Collectives) -> None:
        total = sum(parameter.numel() for parameter in parameters)
        bucket = _Bucket(parameters[0].new_zeros(total), len(parameters), collectives)
        self._buckets.append(bucket)
        start = 0
        for parameter in parameters:
            stop = start + parameter.numel()
            # Autograd adds into an existing gradient in place, so it writes into the bucket.
            parameter.grad = bucket.buffer[start:stop].view_as(parameter)
            hook = _looking_back_at(self, len(self._buckets) - 1)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))
            start = stop

    def _on_gradient(self, index: int) -> None:
        if not self.is_last:
            return
        bucket = self._buckets[index]
        bucket.missing -= 1
        if bucket.missing == 0:
            self._reduce(bucket)

    def _reduce(self, bucket: _Bucket) -> None:
        bucket.pending = bucket.collectives.all_reduce_async(bucket.buffer, out=bucket.buffer)


def _looking_back_at(gradients: ReplicaGradients, index: int) -> Callable[[Tensor], None]:
    """A hook for the parameters of a bucket.

    Autograd holds hooks where Python's collector of cycles does not see them: one that held
    `gradients`, and with them all parameters and communicators, would keep them for ever.
    """
    owner = weakref.ref(gradients)

    def on_gradient(_: Tensor) -> None:
        found = owner()
        if found is not None:
            found._on_gradient(index)

    return on_gradient


def _bytes(parameters: Sequence[nn.Parameter]) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)
