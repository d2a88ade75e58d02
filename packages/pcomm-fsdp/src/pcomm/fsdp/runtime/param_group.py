"""One parameter group while the model runs: gathered, used, released, its gradients reduced."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pcomm.core.collectives.protocol import Pending
from pcomm.core.errors import ClosedError, ConfigError, UnsupportedError
from pcomm.fsdp.plan.group_plan import GroupPlan
from pcomm.fsdp.plan.units import Owner
from pcomm.fsdp.runtime.parameter_guard import ParameterGuard
from pcomm.fsdp.runtime.peers import FailureAwareWait
from pcomm.fsdp.runtime.shards import ParamShard, install

__all__ = ["BufferPool", "Fill", "ParamGroup", "gone"]


Fill = Callable[[torch.UntypedStorage, int], object]
"""Gives memory to a storage that has none: called with the storage and its number of bytes."""


class ParamGroup:
    """Parameters that are gathered and reduced together.

    Args:
        plan: The plan of the group.
        owners: The modules that hold each parameter.
        originals: The parameters before sharding.
        device: Device of the buffers.
        pool: Gives and takes back gradient buffers.
        wait: Completes collectives.
        fill: Gives memory to the unsharded parameters; None for ordinary memory.

    Attributes:
        shard: This rank's shard, its parameters and their gradients.
        unsharded: The gathered parameters.
        gradients: The unsharded gradients and their reduction.
    """

    def __init__(
        self,
        plan: GroupPlan,
        owners: Sequence[Sequence[Owner]],
        originals: Sequence[nn.Parameter],
        device: torch.device,
        *,
        pool: BufferPool,
        wait: FailureAwareWait,
        fill: Fill | None = None,
    ) -> None:
        self.plan = plan
        self.shard = ParamShard(plan, owners, originals, device)
        self.unsharded = UnshardedParams(self.shard, wait, fill)
        self.gradients = GradientReduction(self.shard, self.unsharded.parameters, pool, wait)

    def check(self, *, trains: bool) -> None:
        """A forward can begin: nothing that it needs was lost or changed from outside.

        Args:
            trains: True if a backward may follow.
        """
        self.unsharded.guard.check_values()
        if trains:
            self.unsharded.guard.follow_frozen()
            self.gradients.check_not_lost()

    def begin(self) -> None:
        """Be ready for a micro-batch."""
        self.gradients.begin()
        self.shard.begin()

    def end(self) -> None:
        """The micro-batch is over."""
        self.gradients.end()
        self.unsharded.uninstall_checked()

    def drain(self) -> None:
        """Wait for every collective in flight, and drop what it returns."""
        self.unsharded.wait_gather()
        self.gradients.drain()

    def reset(self) -> None:
        """Go back to the state between steps, after an error; gradients of the step are lost.

        No collective may be in flight: it would write into memory that is given back.
        """
        self.gradients.reset()
        self.unsharded.release()
        self.unsharded.uninstall()

    def close(self) -> None:
        """Let go of everything but the shard: modules hold it, autograd holds nothing."""
        self.unsharded.close()
        self.gradients.close()
        self.shard.close()


class UnshardedParams:
    """One flat buffer that all ranks' shards are gathered into.

    The buffer keeps its identity while its memory comes and goes, so tensors that autograd has
    saved in forward are valid again in backward.

    Args:
        shard: This rank's shard.
        wait: Completes gathers.
        fill: Gives memory to the buffer; None for ordinary memory.

    Attributes:
        parameters: Views of the buffer as parameters, which modules hold while they compute.
        has_memory: True while the buffer has memory.
        guard: Checks that parameters of both kinds are what they were made as.
    """

    def __init__(self, shard: ParamShard, wait: FailureAwareWait, fill: Fill | None = None) -> None:
        plan = self._plan = shard.plan
        self._shard, self._wait = shard, wait
        self._fill = fill or torch.UntypedStorage.resize_
        self.flat = shard.flat
        if not plan.is_one_buffer:
            device = shard.flat.device
            self.flat = torch.empty(plan.layout.length, dtype=plan.param_dtype, device=device)
        # `.data` has a version counter of its own: filling the buffer again is no change of what
        # autograd has saved, but the return of the same values.
        data = self.flat.data
        views = [plan.full_view(data, index) for index in range(len(plan.names))]
        self.parameters = [nn.Parameter(view, requires_grad=plan.is_trainable) for view in views]
        self.guard = ParameterGuard(
            plan, shard.owners, shard.parameters, shard.views, self.parameters, views
        )
        self._gather: Pending | None = None
        # The version of the shard that was gathered.
        self._version = shard.version
        # What autograd has saved has the version of these, while they can be read.
        self._versioned = views[0]
        self._unreadable: torch.autograd._unsafe_preserve_version_counter | None = None
        self.has_memory = self._is_installed = True
        self.release()
        self.uninstall()

    def gather(self) -> None:
        """Start to gather the shards of all ranks. Collective over the gather group."""
        if self._plan.is_one_buffer:
            return
        self._version = self._shard.version
        if not self.has_memory:
            self._fill(self.flat.untyped_storage(), self.flat.nbytes)
            self.has_memory = True
        own = self._shard.flat.to(self._plan.param_dtype)
        if self._plan.gather.size == 1:
            self.flat.copy_(own)
            self._set_readable(True)
        else:
            self._set_readable(False)
            gathers = self._plan.gather.collectives
            self._gather = gathers.all_gather_async(own, out=self.flat)

    def wait_gather(self) -> None:
        """Wait until the parameters are gathered; returns at once if no gather is in flight."""
        if self._gather is not None:
            pending, self._gather = self._gather, None
            self._wait(pending, f"gather of {self._plan.name}")
            self._set_readable(True)

    def release(self) -> None:
        """Free the memory; what autograd has saved of it is valid after the next gather."""
        assert self._gather is None
        if self.has_memory and not self._plan.is_one_buffer:
            self._set_readable(False)
            self.flat.untyped_storage().resize_(0)
        self.has_memory = self._plan.is_one_buffer

    def _set_readable(self, is_readable: bool) -> None:
        """Let autograd read what it has saved of the memory, or have it refuse. Local.

        A backward that reaches parameters by a tensor that no hook has seen would read memory that
        was freed. Autograd compares versions before it reads, so they differ until the next gather.
        """
        if self._versioned.is_inference():
            return
        if not is_readable and self._unreadable is None:
            self._unreadable = torch.autograd._unsafe_preserve_version_counter(self._versioned)
            torch.autograd.graph.increment_version(self._versioned)
        elif is_readable and self._unreadable is not None:
            before, self._unreadable = self._unreadable, None
            before.__exit__()

    def install(self) -> None:
        """Put the unsharded parameters into their modules."""
        if not self._is_installed:
            self.guard.check_owners()
            if self._version != self._shard.version and not self._plan.is_one_buffer:
                raise ConfigError(
                    f"fsdp: the gathered parameters of {self._plan.name!r}",
                    found="this rank's shard was written after they had been gathered",
                    why="They stay gathered for the next micro-batch, which would compute with "
                    "old weights.",
                    fix="Call sharded.parameters_changed() on all ranks after writing into "
                    "shards; let the optimizer step after a backward with "
                    "accumulate(is_last=True).",
                )
            self._is_installed = True
            install(self._shard.owners, self.parameters)

    def uninstall(self) -> bool:
        """Put the shards into the modules; True if the unsharded parameters were there."""
        was_installed, self._is_installed = self._is_installed, False
        if was_installed:
            install(self._shard.owners, self._shard.parameters)
        return was_installed

    def uninstall_checked(self) -> None:
        """Put the shards into the modules; the unit must not have changed its parameters."""
        if self.uninstall():
            self.guard.check_unsharded()

    def memory(self) -> dict[str, int]:
        """Bytes held now."""
        return {"gathered": 0 if self._plan.is_one_buffer else self.flat.untyped_storage().nbytes()}

    def close(self) -> None:
        """Put the shards into the modules. A gather in flight keeps its own memory."""
        self.uninstall()
        self._gather = None


class _InFlight(NamedTuple):
    """A reduce-scatter that has been started.

    Attributes:
        pending: This rank's shard of the sum, once the reduce is done.
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
                parameter.register_post_accumulate_grad_hook(_gradient_hook(self, index))

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
            raise ConfigError(
                "forward after a micro-batch that was given up",
                found=f"the gradients that earlier ones had added up for {self._plan.name!r} went "
                "with it",
                why="The step would go on without them.",
                fix="Call zero_grad() of what fully_shard returned, and begin the step again.",
            )

    def take(self, index: int) -> None:
        """Move the gradient that autograd has left on a parameter into the buffer."""
        parameter = self._unsharded[index]
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            # Of what went into a unit that does not use it, autograd has no gradient.
            return
        if self._is_reduced:
            raise ConfigError(
                f"backward: a gradient of {self._plan.names[index]}",
                found=f"the gradients of unit {self._plan.unit!r} are being reduced already",
                why="A unit's gradients are reduced once the gradient of its inputs is known.",
                fix="Run all of a unit's computation inside its forward, and call backward once "
                "for it.",
            )
        if not self._is_expected:
            raise ConfigError(
                f"backward: a gradient of {self._plan.names[index]}",
                found=f"backward has not come to unit {self._plan.unit!r} by a tensor that its "
                "forward returned",
                why="A unit's backward begins at the tensors that it returns, and gathers for it "
                "there.",
                fix="Return every tensor that the loss needs, in tuples, lists, dicts or "
                "dataclasses.",
            )
        if gradient.layout is not torch.strided:
            raise UnsupportedError(
                f"backward: a gradient of {self._plan.names[index]}",
                found="a sparse tensor",
                why="Gradients are collected in a dense buffer, which all ranks reduce together.",
                fix="Build the module with sparse=False, as nn.Embedding is by default.",
            )
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


def _gradient_hook(owner: GradientReduction, index: int) -> Callable[[Tensor], None]:
    """A hook for the unsharded parameter `index` of `owner`, which it does not keep alive. Local.

    Autograd's own C++ holds the hook, where the garbage collector sees nothing: with a strong
    reference the owner would never go, nor its groups and their threads.
    """
    find = weakref.ref(owner)

    def take(whole: Tensor) -> None:
        found = find()
        if found is None:
            whole.grad = None
            raise gone()
        found.take(index)

    return take


def gone() -> ClosedError:
    """Backward has come to a model that was closed or deleted."""
    return ClosedError(
        "backward of a sharded model",
        found="a model that was closed or deleted after its forward",
        why="Its parameters cannot be gathered, and there is nothing to reduce gradients into.",
        fix="Keep the model, and its groups open, until backward has ended.",
    )


class BufferPool:
    """Hands out flat buffers, and takes them back for the next one of the same size.

    Units of equal size then share a few gradient buffers, whose memory is mapped once. Nothing is
    kept between steps.

    Args:
        device: Device of the buffers.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def take(self, length: int, dtype: torch.dtype) -> Tensor:
        """A buffer with any contents."""
        free = self._free.get((length, dtype))
        return free.pop() if free else torch.empty(length, dtype=dtype, device=self._device)

    def give(self, buffer: Tensor) -> None:
        """Take back a buffer that is not read any more."""
        self._free.setdefault((buffer.numel(), buffer.dtype), []).append(buffer)

    def clear(self) -> None:
        """Give all memory back."""
        self._free.clear()
