"""Core's `Collectives` by the operations of this package, for layers that know nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pcomm.core.collectives.checks import check_out, deliver, gather_sizes, is_dense, scatter_sizes
from pcomm.core.collectives.instrumented import InstrumentedCollectives
from pcomm.core.collectives.protocol import Call, Collectives, OperationName, Pending
from pcomm.core.errors import LayoutError
from pcomm.core.groups.group import Group
from pcomm.nvls.collectives.gathers import all_gather_into_tensor, all_gather_question
from pcomm.nvls.collectives.ragged import all_gather_v, reduce_scatter_v
from pcomm.nvls.collectives.reductions import (
    all_reduce,
    all_reduce_question,
    reduce_scatter_question,
    reduce_scatter_tensor,
)
from pcomm.nvls.workspace.workspace import Workspace

__all__ = ["DEFAULT_MAX_BYTES", "NvlsCollectives", "nvls_collectives"]

DEFAULT_MAX_BYTES = 8 << 20
"""Size of the largest tensor where none is given: 512 tokens of a hidden size of 8192 in bf16."""


# That of NCCL: between two operations of a model a rank may compile, or read a file.
_TIMEOUT_S = 600.0


class NvlsCollectives(InstrumentedCollectives):
    """The `Collectives` of one communicator, of which some are kernels; results have no gradient.

    All-gathers, reduce-scatters and sums over all ranks go where the table of the workspace sends
    them; if that is deterministic, all sums are. All else goes to `inner`, as does what the table
    sends to torch.distributed. On another stream than before, operations wait for those before. An
    operation that is started is in the order of the current stream, and so ready at once, unless
    it is one of `inner`'s.

    Args:
        inner: Collectives of the same communicator; those of `workspace.group`.
        workspace: Memory in which the kernels run; closed by `close`.

    Attributes:
        workspace: Memory in which the kernels run. Its `num_launches` counts the operations that
            were kernels.
    """

    def __init__(self, inner: Collectives, workspace: Workspace) -> None:
        super().__init__(inner)
        self.workspace = workspace

    def run(self, call: Call) -> Tensor:
        """The result of an operation, in the order of the current stream."""
        if call.x.device.type != self.workspace.device.type:
            return self.inner.run(call)
        # An engine warms up what it records on a stream of its own.
        self.workspace.streams.follow()
        match call.operation:
            case "all_gather":
                return self._all_gather(call)
            case "reduce_scatter":
                return self._reduce_scatter(call)
            case "all_reduce" if call.op == "sum":
                self._check_out(call)
                x, out = _plain(call)
                return _delivered(all_reduce(x, out=out, workspace=self.workspace), call)
            case _:
                return self.inner.run(call)

    def start(self, call: Call) -> Pending:
        """Issue an operation; a kernel is ready at once, in the order of the current stream."""
        try:
            is_ours = self._is_ours(call)
        except LayoutError:
            self.skip(call.operation)
            raise
        return Pending.ready(self.run(call)) if is_ours else self.inner.start(call)

    def recording(self) -> AbstractContextManager[None]:
        """See `Collectives.recording`."""
        return self.workspace.turns.recording()

    def sequence(self) -> AbstractContextManager[None]:
        """See `Collectives.sequence`."""
        return self.workspace.sequence()

    def empty_input(
        self, operation: OperationName, shape: Sequence[int], like: Tensor
    ) -> Tensor | None:
        """See `Collectives.empty_input`; None for what fits in one write without a barrier, too."""
        workspace = self.workspace
        if like.device.type != workspace.device.type:
            return None
        x = torch.empty(tuple(shape), dtype=like.dtype, device="meta")
        match operation:
            case "all_reduce":
                question = all_reduce_question(x, workspace)
            case "reduce_scatter" if x.dim() and not x.shape[0] % self.size:
                question = reduce_scatter_question(x, 0, workspace)
            case _:
                return None
        workspace.streams.follow()
        return workspace.empty_if_read_there(question, shape, like.dtype)

    def close(self) -> None:
        """Give the memory of the workspace back. Collective."""
        self.workspace.close()

    def _is_ours(self, call: Call) -> bool:
        """Whether a call that is started has a kernel, or a sum that has to be in rank order."""
        x, workspace = call.x, self.workspace
        is_reduction = call.operation in ("all_reduce", "reduce_scatter") and call.op == "sum"
        if x.device.type != workspace.device.type:
            return False
        if is_reduction and workspace.deterministic:
            return True
        match call.operation:
            case "all_gather" if gather_sizes(call, self.rank, self.size)[1] is None:
                question = all_gather_question(x, call.dim, workspace)
            case "reduce_scatter" if scatter_sizes(call, self.rank, self.size)[1] is None:
                question = reduce_scatter_question(x, call.dim, workspace)
            case "all_reduce" if is_reduction:
                question = all_reduce_question(x, workspace)
            case _:
                return False
        return workspace.choose(question).algorithm != "dist"

    def _all_gather(self, call: Call) -> Tensor:
        uneven = self._check_out(call, gather_sizes)
        if uneven is not None:
            return self._by_rows(all_gather_v, call, uneven)
        x, out = _plain(call)
        result = all_gather_into_tensor(x, out=out, workspace=self.workspace, dim=call.dim)
        return _delivered(result, call)

    def _reduce_scatter(self, call: Call) -> Tensor:
        uneven = self._check_out(call, scatter_sizes)
        if uneven is not None:
            return self._by_rows(reduce_scatter_v, call, uneven)
        x, out = _plain(call)
        result = reduce_scatter_tensor(x, out=out, workspace=self.workspace, dim=call.dim)
        return _delivered(result, call)

    def _check_out(
        self,
        call: Call,
        sizes_of: Callable[[Call, int, int], tuple[int, Sequence[int] | None]] | None = None,
    ) -> Sequence[int] | None:
        """Sizes of uneven shards, or None; `inner` counts a call that is refused."""
        length, uneven = None, None
        try:
            if sizes_of is not None:
                length, uneven = sizes_of(call, self.rank, self.size)
            check_out(call, length)
        except LayoutError:
            self.skip(call.operation)
            raise
        return uneven

    def _by_rows(self, run: Callable[..., Tensor], call: Call, sizes: Sequence[int]) -> Tensor:
        """An operation on uneven shards, which has a kernel for rows."""
        x = call.x
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            # Its numbers go to the device, which a graph would do once.
            return self.inner.run(call)
        front = x.detach().movedim(call.dim, 0)
        rows = front.flatten(1) if front.dim() > 1 else front.unsqueeze(1)
        found = run(rows, sizes, workspace=self.workspace)
        result = found.view(len(found), *front.shape[1:]).movedim(0, call.dim)
        return deliver(result, call.out)


def nvls_collectives(
    max_bytes: int = DEFAULT_MAX_BYTES, **options: Any
) -> Callable[[Group], Collectives]:
    """A function for `open_groups(..., collectives=...)`; it opens a workspace a communicator.

    Where the ranks of a group can only use torch.distributed, the group keeps the collectives that
    it has, at no cost. `capability` says why.

    Args:
        max_bytes: Size of the largest tensor of a kernel, in bytes; larger ones go through
            torch.distributed.
        options: Further arguments of `Workspace`. An operation waits for another rank for as long
            as one of NCCL does, unless `timeout_s` is among them.

    Returns:
        A function of a group; collective over its ranks. What it returns closes the workspace when
        it is closed, as the group does. Errors are those of `Workspace`.
    """

    def make(group: Group) -> Collectives:
        inner = group.collectives
        if group.size == 1:
            return inner
        arguments = {"device": _device_of(group), "timeout_s": _TIMEOUT_S, **options}
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


def _plain(call: Call) -> tuple[Tensor, Tensor | None]:
    """Input without its gradient, and the result's tensor where it can be written to as it is."""
    x, out = call.x, call.out
    return x.detach() if x.requires_grad else x, out if out is not None and is_dense(out) else None


def _delivered(result: Tensor, call: Call) -> Tensor:
    out = call.out
    return result if out is None or result is out else deliver(result, out)
