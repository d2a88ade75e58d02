"""The buffers of one parameter group: its shard, its gathered parameters and its gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from pcomm.core.collectives.protocol import Pending
from pcomm.fsdp.guards import refusals
from pcomm.fsdp.guards.parameter_guard import ParameterGuard
from pcomm.fsdp.guards.shard_gradient import GradientOrigin
from pcomm.fsdp.memory.buffer_pool import BufferPool
from pcomm.fsdp.memory.registered import Fill
from pcomm.fsdp.plan.group_plan import GroupPlan
from pcomm.fsdp.plan.units import Owner, install
from pcomm.fsdp.runtime.gradient_hook import gradient_hook
from pcomm.fsdp.runtime.wait import FailureAwareWait

__all__ = ["FlatGroup"]


class FlatGroup:
    """Parameters that are gathered and reduced together.

    Holds this rank's shard in `shard`; `parts` are parameters that are views of it, for the
    optimizer, and `wholes` are parameters that are views of the gathered buffer, for the modules.
    The gathered buffer keeps its identity while its memory comes and goes, so what autograd has
    saved in forward is there again in backward.

    Args:
        plan: What was decided.
        owners: For each parameter, the modules that hold it.
        originals: The parameters as they are before sharding; their values are taken over, unless
            they are on the meta device.
        device: Where the buffers are.
        reuse: Where gradient buffers come from and go to.
        waiter: What ends collectives.
        fill: What gives memory to the gathered buffer; None for ordinary memory.
    """

    def __init__(
        self,
        plan: GroupPlan,
        owners: Sequence[Sequence[Owner]],
        originals: Sequence[nn.Parameter],
        device: torch.device,
        *,
        reuse: BufferPool,
        waiter: FailureAwareWait,
        fill: Fill | None = None,
    ) -> None:
        self.plan, self.owners = plan, [tuple(own) for own in owners]
        self._reuse, self._wait = reuse, waiter.wait
        self._fill = fill or torch.UntypedStorage.resize_
        layout = plan.layout
        self.is_on_meta = [original.is_meta for original in originals]
        self.shard = torch.zeros(layout.share, dtype=plan.main_dtype, device=device)
        local = [self.local(self.shard, i) for i in range(len(plan.names))]
        self.parts = [nn.Parameter(part, requires_grad=plan.is_trainable) for part in local]
        for part in self.parts:
            # For whoever shards the same model again.
            part.is_pcomm_shard = True  # type: ignore[attr-defined]
        with torch.no_grad():
            for index, original in enumerate(originals):
                if not original.is_meta:
                    self.load(index, original)
        if plan.is_one_buffer:
            self._full = self.shard
        else:
            self._full = torch.empty(layout.length, dtype=plan.param_dtype, device=device)
        # `.data` has a version counter of its own: filling the buffer again is no change of what
        # autograd has saved, but the return of the same values.
        views = self._full.data
        places = [self.place(views, i) for i in range(len(plan.names))]
        self.wholes = [nn.Parameter(whole, requires_grad=plan.is_trainable) for whole in places]
        if plan.is_trainable:
            for index, whole in enumerate(self.wholes):
                whole.register_post_accumulate_grad_hook(gradient_hook(self, index))
        self.origin: GradientOrigin | None = None
        self._gathering: Pending | None = None
        self.has_memory = True
        self._gradient: Tensor | None = None
        self._has_gradient = [False] * len(self.parts)
        self._took_over = False
        self._is_reduced = False
        self._expects_gradients = self._carries_gradients = self._has_lost_gradients = False
        # Also whether the gradient is autograd's own tensor.
        self._reducing: tuple[Pending, Tensor, bool] | None = None
        self._partial: Tensor | None = None
        self._replicating: Pending | None = None
        self._deposit: Tensor | None = None
        self._intact = ParameterGuard(plan, self.owners, self.parts, local, self.wholes, places)
        # That of the shard when it was gathered.
        self._gathered_version = self.version
        self._is_attached = True
        self.release()
        self.detach()

    # -- parameters ----------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Changes whenever this rank's part of the parameters is written."""
        return 0 if self.shard.is_inference() else self.shard._version

    def gather(self) -> None:
        """Start to collect the parameters of all ranks. Collective over the gather group."""
        if self.plan.is_one_buffer:
            return
        self._gathered_version = self.version
        if not self.has_memory:
            self._fill(self._full.untyped_storage(), self._full.numel() * self._full.itemsize)
            self.has_memory = True
        own = self.shard.to(self.plan.param_dtype)
        if self.plan.gather.size == 1:
            self._full.copy_(own)
        else:
            self._gathering = self.plan.gather.collectives.all_gather_async(own, out=self._full)

    def wait(self) -> None:
        """Wait until the parameters are there."""
        if self._gathering is not None:
            pending, self._gathering = self._gathering, None
            self._wait(pending, f"gather of {self.plan.name}")

    def release(self) -> None:
        """Give the memory of the gathered parameters back; what was saved of them stays valid."""
        assert self._gathering is None
        if self.has_memory and not self.plan.is_one_buffer:
            self._full.untyped_storage().resize_(0)
        self.has_memory = self.plan.is_one_buffer

    def attach(self) -> None:
        """Put the gathered parameters into their modules."""
        if not self._is_attached:
            self._intact.check_owners()
            if self._gathered_version != self.version and not self.plan.is_one_buffer:
                raise refusals.stale(self.plan)
            self._is_attached = True
            install(self.owners, self.wholes)

    def detach(self) -> None:
        """Put the shards into the modules."""
        if self._is_attached:
            self._is_attached = False
            install(self.owners, self.parts)

    def leave(self) -> None:
        """Put the shards into the modules; the gathered parameters are as they were gathered."""
        was_attached = self._is_attached
        self.detach()
        if was_attached:
            self._intact.check_wholes()

    def local(self, flat: Tensor, index: int) -> Tensor:
        """This rank's part of parameter `index` in a flat share: a view."""
        piece = self.plan.layout.piece(index, self.plan.rank)
        shape = self.plan.layout.local_shape(index, self.plan.rank)
        return flat[piece.offset : piece.offset + piece.length].view(shape)

    def load(self, index: int, value: Tensor) -> None:
        """Take this rank's part of a whole parameter. Local."""
        piece = self.plan.layout.piece(index, self.plan.rank)
        if piece.length:
            flat = value.detach().reshape(-1)[piece.start : piece.start + piece.length]
            self.shard[piece.offset : piece.offset + piece.length].copy_(flat)

    def whole_values(self) -> Iterator[tuple[str, Tensor]]:
        """Each whole parameter by its name, in the dtype of the main weights. Collective."""
        flat = self.plan.gather.collectives.all_gather(self.shard)
        for index, name in enumerate(self.plan.names):
            yield name, self.place(flat, index)

    def whole_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Each whole gradient by the name of its parameter, if there are any. Collective."""
        if any(part.grad is None for part in self.parts):
            return
        mine = torch.zeros_like(self.shard)
        for index, part in enumerate(self.parts):
            assert part.grad is not None
            self.local(mine, index).copy_(part.grad)
        flat = self.plan.gather.collectives.all_gather(mine)
        for index, name in enumerate(self.plan.names):
            yield name, self.place(flat, index)

    def memory(self) -> dict[str, int]:
        """Bytes held now, by kind of buffer."""
        whole = [self._gradient, self._reducing[1] if self._reducing else None]
        gradients = [part.grad for part in self.parts if part.grad is not None]
        return {
            "shards": self.shard.numel() * self.shard.itemsize,
            "gathered": 0 if self.plan.is_one_buffer else self._full.untyped_storage().nbytes(),
            "gradients": sum(one.numel() * one.itemsize for one in whole if one is not None),
            "shard gradients": sum(one.numel() * one.itemsize for one in gradients),
        }

    # -- gradients -----------------------------------------------------------------------

    def reduce(self) -> None:
        """Start to sum the gradients over the reduce group. Collective over it."""
        gradient = self._gradient_buffer()
        for index, has in enumerate(self._has_gradient):
            if not has:
                self.place(gradient, index).zero_()
        self._gradient, self._is_reduced = None, True
        self._has_gradient = [False] * len(self.parts)
        reduce = self.plan.reduce
        if self.plan.predivisor != 1:
            gradient.mul_(1 / self.plan.predivisor)
        # In place, so that nothing is allocated as long as it is on its way.
        own = gradient.chunk(reduce.size)[reduce.rank] if reduce.size > 1 else None
        pending = reduce.collectives.reduce_scatter_async(gradient, out=own)
        self._reducing = pending, gradient, self._took_over

    def finish(self) -> None:
        """Wait for the sum and add it to the gradient of the shard."""
        assert self._reducing is not None
        (pending, gradient, took_over), self._reducing = self._reducing, None
        total = self._wait(pending, f"reduce of {self.plan.name}")
        mine = total.to(self.plan.main_dtype)
        if self.plan.reduce.size > 1 and mine is total:
            mine = total.clone()
        if mine is not gradient and not took_over:
            self._reuse.give(gradient)
        if self.plan.divisor != self.plan.predivisor:
            mine.mul_(self.plan.predivisor / self.plan.divisor)
        if self.plan.num_replicas == 1:
            self._add_to_parts(mine)
        elif self._partial is None:
            self._partial = mine
        else:
            self._partial.add_(mine)

    def replicate(self) -> None:
        """Start to sum the gradient of the shard over the replicas. Collective over them."""
        assert self.plan.replicate is not None
        assert self._partial is not None
        replicas = self.plan.replicate.collectives
        self._replicating = replicas.all_reduce_async(self._partial, out=self._partial)

    def settle(self) -> None:
        """Wait for the sum over the replicas."""
        assert self._replicating is not None
        pending, self._replicating = self._replicating, None
        self._add_to_parts(self._wait(pending, f"replicas' sum of {self.plan.name}"))
        self._partial = None

    def begin(self) -> None:
        """Be ready for a micro-batch."""
        self._is_reduced = self._expects_gradients = False
        self._carries_gradients = self._gradient is not None or self._partial is not None
        if self._deposit is not None and not self._holds(self._deposit):
            # The optimizer's `zero_grad` has let go of it.
            self._deposit = None

    def check(self, *, trains: bool) -> None:
        """A forward can begin: nothing that it needs was lost or changed from outside.

        Args:
            trains: Whether a backward may follow.
        """
        self._intact.check_values()
        if trains:
            self._intact.check_training()
            if self._has_lost_gradients:
                raise refusals.lost(self.plan)

    def expect_gradients(self) -> None:
        """The unit is in backward, perhaps once more."""
        self._expects_gradients, self._is_reduced = True, False

    def end(self) -> None:
        """The micro-batch is over."""
        self._expects_gradients = False
        self.leave()

    def forget_gradients(self) -> None:
        """Drop what earlier micro-batches have added up and not yet given to the shard."""
        self._gradient = self._partial = None
        self._has_gradient = [False] * len(self.parts)
        self._has_lost_gradients = False

    def drain(self) -> None:
        """Wait for everything that is on its way, and forget it."""
        self.wait()
        if self._reducing is not None:
            (pending, *_), self._reducing = self._reducing, None
            self._wait(pending, f"reduce of {self.plan.name}")
        if self._replicating is not None:
            pending, self._replicating = self._replicating, None
            self._wait(pending, f"replicas' sum of {self.plan.name}")

    def close(self) -> None:
        """Let go of everything but the shard: modules hold the parts, autograd nothing of ours.

        What is on its way keeps its own memory until it has ended.
        """
        self.detach()
        for whole in self.wholes:
            whole.grad = None
            (whole._post_accumulate_grad_hooks or {}).clear()
        self.forget_gradients()
        self._gathering = self._reducing = self._replicating = self._deposit = None
        self._reuse.clear()
        self.owners = []

    def reset(self) -> None:
        """Go back to the state between steps, after an error; gradients of the step are lost.

        Nothing may be on its way any more, since it would write into memory that is given back.
        """
        has_lost = self._has_lost_gradients or self._carries_gradients
        self.forget_gradients()
        self._has_lost_gradients = has_lost
        self.release()
        self.detach()
        for whole in self.wholes:
            whole.grad = None

    def take(self, index: int) -> None:
        """Move the gradient that autograd has left on a gathered parameter into the flat buffer."""
        whole = self.wholes[index]
        gradient, whole.grad = whole.grad, None
        assert gradient is not None
        if self._is_reduced:
            raise refusals.late(self.plan, index)
        if not self._expects_gradients:
            raise refusals.unexpected(self.plan, index)
        if self._gradient is None and self._can_take_over(gradient):
            self._gradient, self._has_gradient[index] = gradient.view(-1), True
            self._took_over = True
            return
        target = self.place(self._gradient_buffer(), index)
        # Autograd hands its own tensor over. One copy, which also converts, is less traffic
        # than zeroing a buffer before and adding into it.
        if self._has_gradient[index]:
            target.add_(gradient)
        else:
            target.copy_(gradient)
            self._has_gradient[index] = True

    def _can_take_over(self, gradient: Tensor) -> bool:
        """Whether a gradient is, as it is, all that has to be reduced: then nothing is copied."""
        if not self.plan.takes_gradient_over or not gradient.is_contiguous():
            return False
        storage = gradient.untyped_storage()
        # Another gradient may lie in the same memory, and backward may still read it: this one is
        # reduced in place, and added to. Alone are the tensor itself and `storage` here. Torch has
        # no public way to ask.
        num_holders = torch._C._storage_Use_Count(storage._cdata)
        return storage.nbytes() == gradient.nbytes and num_holders <= 2

    def _gradient_buffer(self) -> Tensor:
        if self._gradient is None:
            plan = self.plan
            self._gradient = self._reuse.take(plan.layout.length, plan.reduce_dtype)
            self._took_over = False
            for start, end in plan.layout.gaps:
                # Padding is sent and summed: it must be numbers.
                self._gradient[start:end].zero_()
        return self._gradient

    def _add_to_parts(self, mine: Tensor) -> None:
        views = [self.local(mine, index) for index in range(len(self.parts))]
        if self.origin is not None:
            views = [self.origin.mark(view, index) for index, view in enumerate(views)]
        if all(part.grad is None for part in self.parts):
            for part, view in zip(self.parts, views, strict=True):
                part.grad = view
            self._deposit = mine
            return
        if self._deposit is not None and self._holds(self._deposit):
            self._deposit.add_(mine)
            return
        for part, view in zip(self.parts, views, strict=True):
            if part.grad is None:
                part.grad = view
            else:
                part.grad.add_(view)

    def _holds(self, flat: Tensor) -> bool:
        """Whether every gradient is still a view of `flat`."""
        storage = flat.untyped_storage().data_ptr()
        return all(
            part.grad is not None and part.grad.untyped_storage().data_ptr() == storage
            for part in self.parts
        )

    def place(self, flat: Tensor, index: int) -> Tensor:
        """Parameter `index` in a buffer of all shares: a view."""
        start, shape = self.plan.layout.offsets[index], self.plan.layout.shapes[index]
        return flat[start : start + math.prod(shape)].view(shape)
