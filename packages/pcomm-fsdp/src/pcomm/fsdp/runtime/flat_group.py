"""One parameter group while the model runs: three objects, and what is done to all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from pcomm.fsdp.memory.buffer_pool import BufferPool
from pcomm.fsdp.memory.registered import Fill
from pcomm.fsdp.plan.group_plan import GroupPlan
from pcomm.fsdp.plan.units import Owner
from pcomm.fsdp.runtime.gradient_reduction import GradientReduction
from pcomm.fsdp.runtime.param_shard import ParamShard
from pcomm.fsdp.runtime.unsharded_params import UnshardedParams
from pcomm.fsdp.runtime.wait import FailureAwareWait

__all__ = ["FlatGroup"]


class FlatGroup:
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
            self.unsharded.guard.check_training()
            self.gradients.check_not_lost()

    def begin(self) -> None:
        """Be ready for a micro-batch."""
        self.gradients.begin()
        self.shard.begin()

    def end(self) -> None:
        """The micro-batch is over."""
        self.gradients.end()
        self.unsharded.leave()

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

    def memory(self) -> dict[str, int]:
        """Bytes held now, by kind of buffer."""
        return self.shard.memory() | self.unsharded.memory() | self.gradients.memory()
