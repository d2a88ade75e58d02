"""The gradients of a parameter group: collected from autograd, reduced, added to the shard's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pcomm.core.collectives.protocol import Pending
from pcomm.fsdp.guards import running_model_errors
from pcomm.fsdp.memory.buffer_pool import BufferPool
from pcomm.fsdp.runtime.gradient_hook import gradient_hook
from pcomm.fsdp.runtime.param_shard import ParamShard
from pcomm.fsdp.runtime.wait import FailureAwareWait

__all__ = ["GradientReduction"]


class _InFlight(NamedTuple):
    """A reduce-scatter that has been started.

    Attributes:
        pending: Its result, this rank's shard of the sum.
        buffer: The send buffer.
        is_autograds: True if the send buffer is a tensor of autograd's, and not one of the pool.
    """

    pending: Pending
    buffer: Tensor
    is_autograds: bool


class GradientReduction:
    """One flat buffer that unsharded gradients are collected in, and the collectives that sum it.

    Args:
        shard: This rank's shard, which gets the sum.
        unsharded: The parameters that autograd leaves gradients on.
        pool: Gives and takes back gradient buffers.
        wait: Completes reductions.
    """

    def __init__(
        self,
        shard: ParamShard,
        unsharded: Sequence[nn.Parameter],
        pool: BufferPool,
        wait: FailureAwareWait,
    ) -> None:
        self._plan, self._shard, self._unsharded = shard.plan, shard, unsharded
        self._pool, self._wait = pool, wait
        self._buffer: Tensor | None = None
        self._is_filled = [False] * len(unsharded)
        # False for what was frozen in all forwards since the shard got its last sum.
        self._has_gradient = [False] * len(unsharded)
        self._is_autograds = False
        self._reduce: _InFlight | None = None
        # The sum over the reduce group, where it is still to be summed over replicas.
        self._sum: Tensor | None = None
        self._all_reduce: Pending | None = None
        self._is_expected = self._is_reduced = False
        self._has_earlier = self._has_lost = False
        if self._plan.is_trainable:
            for index, parameter in enumerate(unsharded):
                parameter.register_post_accumulate_grad_hook(gradient_hook(self, index))

    # -- collecting ------------------------------------------------------------------------

    def begin(self) -> None:
        """Be ready for a micro-batch."""
        self._is_reduced = self._is_expected = False
        self._has_earlier = self._buffer is not None or self._sum is not None

    def expect(self) -> None:
        """The unit is in backward, perhaps once more."""
        self._is_expected, self._is_reduced = True, False

    def end(self) -> None:
        """The micro-batch is over."""
        self._is_expected = False

    def check_not_lost(self) -> None:
        """A backward may follow: no gradient of an earlier micro-batch of the step was lost.

        Raises:
            ConfigError: One was, with a micro-batch that was given up.
        """
        if self._has_lost:
            raise running_model_errors.lost_gradients(self._plan)

    def take(self, index: int) -> None:
        """Move the gradient that autograd has left on a parameter into the buffer."""
        parameter = self._unsharded[index]
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if self._is_reduced:
            raise running_model_errors.late_gradient(self._plan, index)
        if not self._is_expected:
            raise running_model_errors.unexpected_gradient(self._plan, index)
        if gradient.layout is not torch.strided:
            raise running_model_errors.sparse_gradient(self._plan, index)
        if self._buffer is None and self._is_all_and_alone(gradient):
            self._buffer, self._is_filled[index] = gradient.view(-1), True
            self._is_autograds = True
            return
        target = self._plan.full_view(self._filled_buffer(), index)
        # Autograd hands its own tensor over. One copy, which also converts, is less traffic
        # than zeroing a buffer before and adding into it.
        if self._is_filled[index]:
            target.add_(gradient)
        else:
            target.copy_(gradient)
            self._is_filled[index] = True

    def _is_all_and_alone(self, gradient: Tensor) -> bool:
        """True if a gradient can be reduced as it is: then nothing is copied."""
        if not self._plan.takes_gradient_over or not gradient.is_contiguous():
            return False
        storage = gradient.untyped_storage()
        # Another gradient may lie in the same memory, and backward may still read it: this one is
        # reduced in place, and added to. Alone are the tensor itself and `storage` here. Torch has
        # no public way to ask.
        num_holders = torch._C._storage_Use_Count(storage._cdata)
        return storage.nbytes() == gradient.nbytes and num_holders <= 2

    def _filled_buffer(self) -> Tensor:
        if self._buffer is None:
            plan = self._plan
            self._buffer = self._pool.take(plan.layout.length, plan.reduce_dtype)
            self._is_autograds = False
            for start, end in plan.layout.gaps:
                # Padding is sent and summed: it must be numbers.
                self._buffer[start:end].zero_()
        return self._buffer

    # -- reducing --------------------------------------------------------------------------

    def reduce(self) -> None:
        """Start to sum the gradients over the reduce group. Collective over it."""
        plan, buffer = self._plan, self._filled_buffer()
        for index, is_filled in enumerate(self._is_filled):
            self._has_gradient[index] |= is_filled or self._unsharded[index].requires_grad
            if not is_filled:
                plan.full_view(buffer, index).zero_()
        self._buffer, self._is_reduced = None, True
        self._is_filled = [False] * len(self._is_filled)
        if plan.predivisor != 1:
            buffer.mul_(1 / plan.predivisor)
        # In place, so that nothing is allocated while it is in flight.
        own = buffer.chunk(plan.reduce.size)[plan.reduce.rank] if plan.reduce.size > 1 else None
        pending = plan.reduce.collectives.reduce_scatter_async(buffer, out=own)
        self._reduce = _InFlight(pending, buffer, self._is_autograds)

    def wait_reduce(self) -> None:
        """Wait for the sum and add it to the gradient of the shard, or to the sum for replicas."""
        assert self._reduce is not None
        (pending, buffer, is_autograds), self._reduce = self._reduce, None
        total = self._wait(pending, f"reduce of {self._plan.name}")
        mine = total.to(self._plan.main_dtype)
        if self._plan.reduce.size > 1 and mine is total:
            mine = total.clone()
        if mine is not buffer and not is_autograds:
            self._pool.give(buffer)
        if self._plan.divisor != self._plan.predivisor:
            mine.mul_(self._plan.predivisor / self._plan.divisor)
        if self._plan.num_replicas == 1:
            self._give(mine)
        elif self._sum is None:
            self._sum = mine
        else:
            self._sum.add_(mine)

    def all_reduce(self) -> None:
        """Start to sum the gradient of the shard over the replicas. Collective over them."""
        assert self._plan.replicate is not None
        assert self._sum is not None
        replicas = self._plan.replicate.collectives
        self._all_reduce = replicas.all_reduce_async(self._sum, out=self._sum)

    def wait_all_reduce(self) -> None:
        """Wait for the sum over the replicas and add it to the gradient of the shard."""
        assert self._all_reduce is not None
        pending, self._all_reduce = self._all_reduce, None
        self._give(self._wait(pending, f"replicas' sum of {self._plan.name}"))
        self._sum = None

    def _give(self, total: Tensor) -> None:
        """Add the sum over all ranks to the gradients of the shard."""
        self._shard.add_gradient(total, self._has_gradient)
        self._has_gradient = [False] * len(self._has_gradient)

    def drain(self) -> None:
        """Wait for every reduction in flight, and drop its result."""
        if self._reduce is not None:
            (pending, *_), self._reduce = self._reduce, None
            self._wait(pending, f"reduce of {self._plan.name}")
        if self._all_reduce is not None:
            pending, self._all_reduce = self._all_reduce, None
            self._wait(pending, f"replicas' sum of {self._plan.name}")

    # -- dropping --------------------------------------------------------------------------

    def forget(self) -> None:
        """Drop what earlier micro-batches have added up and not yet given to the shard."""
        self._buffer = self._sum = None
        self._is_filled = [False] * len(self._is_filled)
        self._has_gradient = [False] * len(self._is_filled)
        self._has_lost = False

    def reset(self) -> None:
        """Go back to the state between steps, after an error; gradients of the step are lost."""
        has_lost = self._has_lost or self._has_earlier
        self.forget()
        self._has_lost = has_lost
        for parameter in self._unsharded:
            parameter.grad = None

    def close(self) -> None:
        """Take the hooks off. A reduction in flight keeps its memory until it has ended."""
        for parameter in self._unsharded:
            parameter.grad = None
            (parameter._post_accumulate_grad_hooks or {}).clear()
        self.forget()
        self._reduce = self._all_reduce = None
        self._pool.clear()

    def memory(self) -> dict[str, int]:
        """Bytes of unsharded gradients, being collected or in flight."""
        return {"gradients": sum(buffer.nbytes for buffer in self.buffers)}

    @property
    def buffers(self) -> list[Tensor]:
        """Buffers of unsharded gradients, being collected or in flight."""
        held = [self._buffer, self._reduce.buffer if self._reduce else None]
        return [buffer for buffer in held if buffer is not None]
