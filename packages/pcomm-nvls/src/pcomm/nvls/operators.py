"""The operations as operators of torch, so that `torch.compile` keeps them in its graphs.

An operator takes numbers and tensors, so it names a workspace by a number. Its size is an argument
too: with it a graph, also one from torch's cache, has the right shapes without a workspace.
"""

from __future__ import annotations

import itertools
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from pcomm.core.collectives.protocol import Handle
from pcomm.core.errors import ClosedError, LayoutError, UnsupportedError
from pcomm.nvls.collectives.fused_rmsnorm import (
    all_reduce_add_rmsnorm,
    reduce_scatter_add_rmsnorm_all_gather,
)
from pcomm.nvls.collectives.gathers import all_gather_into_tensor
from pcomm.nvls.collectives.reductions import all_reduce, reduce_scatter_tensor
from pcomm.nvls.workspace.workspace import Workspace

__all__ = ["WorkspaceOperators"]

# Torch calls an operator with what stands in a graph: numbers. The number of a workspace is
# resolved here, which keeps none alive. It is never given again, so no graph meets another one.
_workspaces: WeakValueDictionary[int, Workspace] = WeakValueDictionary()
_numbers = itertools.count(1)


class WorkspaceOperators(Handle):
    """The operators of a workspace, as methods; they may be called in a compiled module.

    They go where the table of the workspace sends them, as `NvlsCollectives` does, and return new
    tensors. On another stream than before they wait for the operations before. Collective over its
    group; not differentiable. A module that holds them can be copied,
    but not pickled: their number means another workspace, or none, in another process.

    Args:
        workspace: Workspace of the group, which the caller keeps and closes.

    Attributes:
        number: Number by which the operators name the workspace.
        rank: Place of this rank in the group.
        size: Number of ranks.
    """

    def __init__(self, workspace: Workspace) -> None:
        self.rank, self.size = workspace.group.rank, workspace.group.size
        self.number = next(_numbers)
        _workspaces[self.number] = workspace

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """The shards of all ranks, in rank order along `dim`.

        Args:
            x: This rank's shard; the same shape on all ranks.
            dim: Dimension along which they lie.
        """
        result: Tensor = torch.ops.pcomm_nvls.all_gather(x, self.number, self.size, dim)
        return result

    def reduce_scatter(self, x: Tensor, dim: int = 0) -> Tensor:
        """This rank's segment along `dim` of the sum over all ranks.

        Args:
            x: This rank's tensor; the same shape on all ranks.
            dim: Dimension that is divided.
        """
        result: Tensor = torch.ops.pcomm_nvls.reduce_scatter(x, self.number, self.size, dim)
        return result

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks.

        Args:
            x: This rank's tensor; the same shape on all ranks.
        """
        result: Tensor = torch.ops.pcomm_nvls.all_reduce(x, self.number, self.size)
        return result

    def all_reduce_add_rmsnorm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """The normed rows and the new residual; see the operation of that name.

        Args:
            x: This rank's addends `[tokens, hidden]`.
            residual: Residual `[tokens, hidden]`, the same on all ranks.
            weight: Weight of the norm, `[hidden]`.
            eps: Number that is added to the mean square.
        """
        arguments = (x, residual, weight, eps, self.number, self.size)
        rows, new = torch.ops.pcomm_nvls.all_reduce_add_rmsnorm(*arguments)
        return rows, new

    def reduce_scatter_add_rmsnorm_all_gather(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """The normed rows of all ranks, and this rank's new residual.

        Args:
            x: This rank's addends `[tokens, hidden]`.
            residual: This rank's share of the residual, `[tokens / size, hidden]`.
            weight: Weight of the norm, `[hidden]`.
            eps: Number that is added to the mean square.
        """
        arguments = (x, residual, weight, eps, self.number, self.size)
        rows, new = torch.ops.pcomm_nvls.reduce_scatter_add_rmsnorm_all_gather(*arguments)
        return rows, new


@torch.library.custom_op("pcomm_nvls::all_gather", mutates_args=())
def _all_gather(x: Tensor, workspace: int, size: int, dim: int) -> Tensor:
    found = _workspace(workspace, size)
    return all_gather_into_tensor(x, workspace=found, dim=dim).contiguous()


@torch.library.custom_op("pcomm_nvls::reduce_scatter", mutates_args=())
def _reduce_scatter(x: Tensor, workspace: int, size: int, dim: int) -> Tensor:
    found = _workspace(workspace, size)
    return reduce_scatter_tensor(x, workspace=found, dim=dim).contiguous()


@torch.library.custom_op("pcomm_nvls::all_reduce", mutates_args=())
def _all_reduce(x: Tensor, workspace: int, size: int) -> Tensor:
    return all_reduce(x, workspace=_workspace(workspace, size)).contiguous()


@torch.library.custom_op("pcomm_nvls::all_reduce_add_rmsnorm", mutates_args=())
def _all_reduce_add_rmsnorm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, workspace: int, size: int
) -> tuple[Tensor, Tensor]:
    found = _workspace(workspace, size)
    rows, new, _ = all_reduce_add_rmsnorm(x, residual, weight, eps, workspace=found)
    return rows.contiguous(), new.contiguous()


@torch.library.custom_op("pcomm_nvls::reduce_scatter_add_rmsnorm_all_gather", mutates_args=())
def _reduce_scatter_add_rmsnorm_all_gather(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, workspace: int, size: int
) -> tuple[Tensor, Tensor]:
    found = _workspace(workspace, size)
    arguments = (x, residual, weight, eps)
    rows, new, _ = reduce_scatter_add_rmsnorm_all_gather(*arguments, workspace=found)
    return rows.contiguous(), new.contiguous()


@_all_gather.register_fake
def _(x: Tensor, workspace: int, size: int, dim: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] *= size
    return x.new_empty(shape)


@_reduce_scatter.register_fake
def _(x: Tensor, workspace: int, size: int, dim: int) -> Tensor:
    shape = list(x.shape)
    torch._check(shape[dim] % size == 0, lambda: f"{shape[dim]} positions over {size} ranks")
    shape[dim] //= size
    return x.new_empty(shape)


@_all_reduce.register_fake
def _(x: Tensor, workspace: int, size: int) -> Tensor:
    return x.new_empty(x.shape)


@_all_reduce_add_rmsnorm.register_fake
@_reduce_scatter_add_rmsnorm_all_gather.register_fake
def _(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, workspace: int, size: int
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), residual.new_empty(residual.shape)


def _workspace(number: int, size: int) -> Workspace:
    found = _workspaces.get(number)
    if found is None:
        raise ClosedError(
            f"an operator of pcomm_nvls on workspace {number}",
            found="no workspace of that number in this process",
            why="A graph names a workspace by a number of the process that made it.",
            fix="Keep the workspace as long as the module, and compile the module anew with one.",
        )
    if found.group.size != size:
        raise LayoutError(
            f"an operator of pcomm_nvls with size={size}",
            found=f"workspace {number} of {found.group.size} ranks",
            why="The shapes of a graph depend on the number of ranks.",
            fix="Use WorkspaceOperators, which passes the size of its workspace.",
        )
    # With mode="reduce-overhead" torch warms up what it records on a stream of its own.
    found.streams.follow()
    return found


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise UnsupportedError(
        "an operator of pcomm_nvls",
        found="an input whose gradient is recorded",
        why="These collectives are for inference and have no backward.",
        fix="Call it under torch.no_grad(), or use Group.differentiable for training.",
    )


for _operator in (
    _all_gather,
    _reduce_scatter,
    _all_reduce,
    _all_reduce_add_rmsnorm,
    _reduce_scatter_add_rmsnorm_all_gather,
):
    _operator.register_autograd(_refuse, setup_context=_refuse)
