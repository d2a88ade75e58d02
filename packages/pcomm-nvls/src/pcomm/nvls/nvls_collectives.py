"""Core's `Collectives` by the operations of this package, for layers that know nothing of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pcomm.core.collectives.call import Call
from pcomm.core.collectives.checks import gather_sizes, scatter_sizes
from pcomm.core.collectives.instrumented import InstrumentedCollectives
from pcomm.core.collectives.out import check_out, deliver, is_dense
from pcomm.core.collectives.protocol import Collectives, Pending
from pcomm.core.groups.group import Group
from pcomm.nvls.collectives.all_gather_into_tensor import all_gather_into_tensor
from pcomm.nvls.collectives.all_reduce import all_reduce
from pcomm.nvls.collectives.reduce_scatter_tensor import reduce_scatter_tensor
from pcomm.nvls.workspace.workspace import Workspace

__all__ = ["DEFAULT_MAX_BYTES", "NvlsCollectives", "nvls_collectives"]

DEFAULT_MAX_BYTES = 8 << 20
"""Size of the largest tensor where none is given: 512 tokens of a hidden size of 8192 in bf16."""


class NvlsCollectives(InstrumentedCollectives):
    """The `Collectives` of one communicator, of which some are kernels; results have no gradient.

    All-gathers and reduce-scatters of equal shards along the first or the last dimension, and sums
    over all ranks, go where the table of the workspace sends them. All else, and what the table
    sends to torch.distributed, goes to `inner`. An operation that is started is in stream order,
    and so ready at once, unless it is one of `inner`'s.

    Args:
        inner: Collectives of the same communicator; those of `workspace.group`.
        workspace: Memory in which the kernels run; closed by `close`.

    Attributes:
        workspace: That memory. Its `num_launches` counts the operations that were kernels.
    """

    def __init__(self, inner: Collectives, workspace: Workspace) -> None:
        super().__init__(inner)
        self.workspace = workspace

    def run(self, call: Call) -> Tensor:
        """The result of an operation, in the order of the current stream."""
        if call.x.device.type != self.workspace.device.type:
            return self.inner.run(call)
        match call.operation:
            case "all_gather":
                return self._all_gather(call)
            case "reduce_scatter":
                return self._reduce_scatter(call)
            case "all_reduce":
                return self._all_reduce(call)
            case _:
                return self.inner.run(call)

    def start(self, call: Call) -> Pending:
        """Issue an operation; a kernel is ready at once, in the order of the current stream."""
        is_kernel = self._has_kernel(call) and call.x.device.type == self.workspace.device.type
        return Pending.ready(self.run(call)) if is_kernel else self.inner.start(call)

    def close(self) -> None:
        """Give the memory of the workspace back. Collective."""
        self.workspace.close()

    def _has_kernel(self, call: Call) -> bool:
        match call.operation:
            case "all_gather" | "reduce_scatter":
                return _is_at_an_end(call) and call.sizes is None
            case "all_reduce":
                return call.op == "sum"
            case _:
                return False

    def _all_gather(self, call: Call) -> Tensor:
        length, uneven = gather_sizes(call, self.rank, self.size)
        if uneven is not None or not _is_at_an_end(call):
            return self.inner.run(call)
        check_out(call, length)
        x, out = _plain(call)
        result = all_gather_into_tensor(out, x, workspace=self.workspace, dim=call.dim)
        return _delivered(result, call)

    def _reduce_scatter(self, call: Call) -> Tensor:
        length, uneven = scatter_sizes(call, self.rank, self.size)
        if uneven is not None or not _is_at_an_end(call):
            return self.inner.run(call)
        check_out(call, length)
        x, out = _plain(call)
        result = reduce_scatter_tensor(out, x, workspace=self.workspace, dim=call.dim)
        return _delivered(result, call)

    def _all_reduce(self, call: Call) -> Tensor:
        if call.op != "sum":
            return self.inner.run(call)
        check_out(call)
        x, out = _plain(call)
        return _delivered(all_reduce(out, x, workspace=self.workspace), call)


def nvls_collectives(
    max_bytes: int = DEFAULT_MAX_BYTES, **options: Any
) -> Callable[[Group], Collectives]:
    """A function for `open_groups(..., collectives=...)`; it opens a workspace a communicator.

    Where the ranks of a group can only use torch.distributed, the group keeps the collectives that
    it has, at no cost. `capability` says why.

    Args:
        max_bytes: Size of the largest tensor of a kernel, in bytes; larger ones go through
            torch.distributed.
        options: Further arguments of `Workspace`.

    Returns:
        A function of a group; collective over its ranks. What it returns closes the workspace when
        it is closed, as the group does. Errors are those of `Workspace`.
    """

    def make(group: Group) -> Collectives:
        inner = group.collectives
        if group.size == 1:
            return inner
        arguments = {"device": _device_of(group), **options}
        # The fallback of its operations: also after the group has got the new collectives.
        workspace = Workspace(group.with_collectives(inner), max_bytes, **arguments)
        if workspace.capability.is_usable:
            return NvlsCollectives(inner, workspace)
        workspace.close()
        return inner

    return make


def _device_of(group: Group) -> torch.device:
    """The device of the tensors that the communicator of a group moves fastest."""
    assert group.process_group is not None
    if "nccl" in dist.get_backend(group.process_group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _is_at_an_end(call: Call) -> bool:
    """Whether shards lie along the first or the last dimension."""
    return call.dim in (0, -1, -call.x.dim(), call.x.dim() - 1)


def _plain(call: Call) -> tuple[Tensor, Tensor | None]:
    """Input without its gradient, and the result's tensor where it can be written to as it is."""
    x, out = call.x, call.out
    return x.detach() if x.requires_grad else x, out if out is not None and is_dense(out) else None


def _delivered(result: Tensor, call: Call) -> Tensor:
    out = call.out
    return result if out is None or result is out else deliver(result, out)
