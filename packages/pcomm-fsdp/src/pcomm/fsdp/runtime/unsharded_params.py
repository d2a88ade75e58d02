"""The unsharded parameters of a group: gathered before a unit computes, released after it."""

from __future__ import annotations

import torch
from torch import nn

from pcomm.core.collectives.protocol import Pending
from pcomm.fsdp.guards import running_model_errors
from pcomm.fsdp.guards.parameter_guard import ParameterGuard
from pcomm.fsdp.memory.registered import Fill
from pcomm.fsdp.plan.units import install
from pcomm.fsdp.runtime.param_shard import ParamShard
from pcomm.fsdp.runtime.wait import FailureAwareWait

__all__ = ["UnshardedParams"]


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
        else:
            gathers = self._plan.gather.collectives
            self._gather = gathers.all_gather_async(own, out=self.flat)

    def wait_gather(self) -> None:
        """Wait until the parameters are gathered; returns at once if no gather is in flight."""
        if self._gather is not None:
            pending, self._gather = self._gather, None
            self._wait(pending, f"gather of {self._plan.name}")

    def release(self) -> None:
        """Free the memory; what autograd has saved of it is valid after the next gather."""
        assert self._gather is None
        if self.has_memory and not self._plan.is_one_buffer:
            self.flat.untyped_storage().resize_(0)
        self.has_memory = self._plan.is_one_buffer

    def install(self) -> None:
        """Put the unsharded parameters into their modules."""
        if not self._is_installed:
            self.guard.check_owners()
            if self._version != self._shard.version and not self._plan.is_one_buffer:
                raise running_model_errors.stale_gather(self._plan)
            self._is_installed = True
            install(self._shard.owners, self.parameters)

    def uninstall(self) -> bool:
        """Put the shards into the modules; True if the unsharded parameters were there."""
        was_installed, self._is_installed = self._is_installed, False
        if was_installed:
            install(self._shard.owners, self._shard.parameters)
        return was_installed

    def leave(self) -> None:
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
