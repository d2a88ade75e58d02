"""Where the tensors of a call may lie, and how a result gets to the one that the caller names."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from pcomm.core.collectives.out import has_own_places, is_dense
from pcomm.core.errors import ConfigError, LayoutError
from pcomm.nvls.collectives.inputs import VECTOR_BYTES
from pcomm.nvls.workspace.workspace import Workspace

__all__ = ["apart", "check_inputs_outside", "check_result", "deliver", "outside", "result_in"]


def check_result(
    operation: str,
    out: Tensor | None,
    shape: tuple[int, ...],
    like: Tensor,
    workspace: Workspace,
) -> None:
    """Refuse an `out` that a result cannot be written to as it is. Local, whatever the algorithm.

    Args:
        operation: Name of the operation.
        out: Tensor that the caller names; None passes.
        shape: Shape of the result.
        like: Tensor of the result's dtype and device.
        workspace: Workspace of the group.

    Raises:
        LayoutError: Shape, dtype or device differ, or elements of `out` share memory.
        ConfigError: It lies in the memory of the workspace, which other ranks still read.
    """
    if out is None:
        return
    if tuple(out.shape) != shape or out.dtype != like.dtype or out.device != like.device:
        raise LayoutError(
            f"{operation}: out of shape {tuple(out.shape)}, {out.dtype}, on {out.device}",
            found=f"a result of shape {shape}, {like.dtype}, on {like.device}",
            why="The result is written into it as it is.",
            fix="Allocate it with that shape, dtype and device, or pass None.",
        )
    if not (out.is_contiguous() or has_own_places(out)):
        raise LayoutError(
            f"{operation}: out of shape {tuple(out.shape)}",
            found=f"strides {out.stride()}, so that several elements are one place in memory",
            why="The result has a number for each element.",
            fix="Pass an out whose elements have places of their own, or None.",
        )
    offset = _offset_in(workspace, out)
    if offset is not None:
        raise ConfigError(
            f"{operation}: out at byte {offset} of the workspace",
            found="memory that other ranks read during the operation",
            why="A rank may be done before another one has read what it passed.",
            fix="Pass an out of other memory, or none.",
        )


def check_inputs_outside(operation: str, *inputs: Tensor, workspace: Workspace) -> None:
    """Refuse tensors in the memory of the workspace that an operation does not read there. Local.

    Only what a reduction adds is. Other ranks store into that memory while this one still reads:
    what they gather lies where `Workspace.empty` hands out memory.

    Raises:
        ConfigError: One of the tensors lies there.
    """
    for x in inputs:
        offset = _offset_in(workspace, x)
        if offset is not None:
            raise ConfigError(
                f"{operation}: an input at byte {offset} of the workspace",
                found="memory that other ranks store to during the operation",
                why="Only the addends of a reduction may lie in memory of Workspace.empty.",
                fix="Pass a tensor of other memory, such as a copy of the view.",
            )


def outside(x: Tensor, workspace: Workspace) -> Tensor:
    """`x`, or a copy of it where it lies in the memory of the workspace. Local.

    A reduce-scatter of torch.distributed takes no turn: a rank that has its segment may go on to
    the next kernel, and store into the slot from which this rank still sends to a third one.
    """
    workspace.release(x)
    return x if _offset_in(workspace, x) is None else x.clone()


def result_in(out: Tensor | None, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """The tensor that a kernel writes the result to: `out` where it may, or a new one. Local."""
    if out is None:
        return like.new_empty(shape)
    # Kernels write bytes: of a conjugated view these are not its numbers.
    if is_dense(out) and out.data_ptr() % VECTOR_BYTES == 0:
        return out
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def deliver(result: Tensor, out: Tensor | None) -> Tensor:
    """What a kernel or the reference has written, in `out` where that is given. Local.

    Autograd sees that `out` has changed, so a backward that needs what was there raises.

    Args:
        result: Result; `out` itself where a kernel has written there.
        out: Tensor of the caller for the result, or None.
    """
    if out is None:
        return result
    if result is out:
        increment_version(out)
    else:
        out.detach().copy_(result.detach())
    return out


def apart(result: Tensor, x: Tensor, out: Tensor | None) -> Tensor:
    """What the reference has returned, in memory of its own. Local.

    Core's collectives of one rank return the input itself. A program that then writes to the
    result would change its input with one rank, and not with two.
    """
    is_input = out is None and result.data_ptr() == x.data_ptr()
    return result.clone() if is_input else result


def _offset_in(workspace: Workspace, x: Tensor) -> int | None:
    """Byte of the workspace at which a tensor begins; None where it lies elsewhere."""
    if workspace.memory is None or not x.numel():
        return None
    offset = x.data_ptr() - workspace.memory.buffer_ptrs[workspace.group.rank]
    return offset if 0 <= offset < workspace.regions.num_bytes else None
