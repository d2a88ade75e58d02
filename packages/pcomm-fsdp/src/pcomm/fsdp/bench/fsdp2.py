"""Torch's fully_shard with as much of what pcomm does as its interfaces let in."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from pcomm.core.collectives.protocol import Collectives, Pending
from pcomm.fsdp.bench.models import Problem
from pcomm.fsdp.bench.trainings import gradients_of

__all__ = ["Fsdp2"]


class Fsdp2:
    """A model sharded by torch, see `Training`; the defaults are FSDP2 as shipped.

    Args:
        problem: The model.
        group: Its communicator.
        gather: Collectives with the all-gather to use in place of torch's; None for torch's.
        reduce: Collectives with the reduce-scatter to use in place of torch's; None for torch's.
        prefetch: Units gathered ahead, by explicit lists; 0 leaves that to torch, which waits for
            each gather on a CPU.
        waits_for_reduce: True to wait for `reduce` before the next unit computes, False after the
            next one was issued. Torch's own is always waited for on a CPU.
        num_kept: Last units that stay gathered from forward to backward.
    """

    def __init__(
        self,
        problem: Problem,
        group: dist.ProcessGroup,
        *,
        gather: Collectives | None = None,
        reduce: Collectives | None = None,
        prefetch: int = 0,
        waits_for_reduce: bool = True,
        num_kept: int = 0,
    ) -> None:
        model = problem.build()
        mesh = DeviceMesh.from_group(group, "cpu")
        for unit in model:
            torch_fully_shard(unit, mesh=mesh)
        torch_fully_shard(model, mesh=mesh)
        self.model: nn.Module = model
        # As shipped it gathers the unit again that it has just released.
        self.num_backward_gathers = problem.depth - num_kept
        self._reduces = None if reduce is None else _ReduceScatter(reduce, waits_for_reduce)
        assert isinstance(model, FSDPModule)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # Torch exports no base class for them; it asks for no more than these methods.
                if gather is not None:
                    module.set_custom_all_gather(_AllGather(gather))  # type: ignore[arg-type]
                if self._reduces is not None:
                    module.set_custom_reduce_scatter(self._reduces)  # type: ignore[arg-type]
        units: list[Any] = list(model)
        for unit in units[problem.depth - num_kept :]:
            unit.set_reshard_after_forward(False)
        if prefetch:
            _prefetch(model, units, prefetch, num_kept)

    def finish_backward(self) -> None:
        """See `Training`."""
        if self._reduces is not None:
            self._reduces.finish()

    def shard_gradients(self) -> list[Tensor]:
        """See `Training`."""
        return [_local(gradient) for gradient in gradients_of(self.model.parameters())]

    def whole_gradients(self) -> dict[str, Tensor]:
        """See `Training`."""
        found = {}
        for name, parameter in self.model.named_parameters():
            assert isinstance(parameter.grad, DTensor)
            found[name] = parameter.grad.full_tensor()
        return found

    def forget_gradients(self) -> None:
        """See `Training`."""
        self.model.zero_grad()


class _Gathering(dist.Work):
    """A gather under way, as torch waits for it."""

    def __init__(self, pending: Pending) -> None:
        super().__init__()
        self._pending = pending

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._pending.wait()
        return True


class _Allocates:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Allocates):
    """Our all-gather behind torch's interface; whichever group torch names, ours is used."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        if async_op:
            pending = self._collectives.all_gather_async(input_tensor, out=output_tensor)
            return _Gathering(pending)
        self._collectives.all_gather(input_tensor, out=output_tensor)
        return None


class _ReduceScatter(_Allocates):
    """Our reduce-scatter behind torch's interface; whichever group torch names, ours is used.

    Torch looks at the result only to make views of it, as long as it has neither to convert nor to
    add it to an earlier one. So the last one may be under way until `finish`.
    """

    def __init__(self, collectives: Collectives, waits: bool) -> None:
        self._collectives, self._waits = collectives, waits
        self._last: tuple[Pending, Tensor, bool] | None = None

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        assert not async_op
        pending = self._collectives.reduce_scatter_async(input_tensor, out=output_tensor)
        # The new one is in the queue before the older one is waited for, as in pcomm.
        self.finish()
        self._last = pending, output_tensor, op == dist.ReduceOp.AVG
        if self._waits:
            self.finish()

    def finish(self) -> None:
        """Wait for the last one."""
        if self._last is not None:
            (pending, output, is_mean), self._last = self._last, None
            pending.wait()
            if is_mean:
                output.div_(self._collectives.size)


def _prefetch(root: FSDPModule, units: Sequence[Any], depth: int, num_kept: int) -> None:
    """Everything FSDP2 offers so that gathers go on during computation on the CPU."""
    root._set_unshard_async_op(True)
    for place, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[place + 1 : place + 1 + depth])
        # Units that stay from forward to backward need no gather: those before them come next.
        again = units[: min(place, len(units) - num_kept)]
        unit.set_modules_to_backward_prefetch(list(reversed(again))[:depth])


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x
