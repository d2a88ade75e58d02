"""What every call of an operation does: checks, a launch like one before, `out`, and arguments.

What ranks have in common (shapes, types) raises alike on all of them. What one rank can have by
itself (strides, alignment) is no error: it is repaired by a copy on that rank. The workspace
chooses the algorithm; an operation then builds its launch, or takes the reference.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from pcomm.core.collectives.checks import has_own_places, is_dense
from pcomm.core.errors import ConfigError, LayoutError, UnsupportedError
from pcomm.nvls.policy.choose import Choice
from pcomm.nvls.workspace.launch import Launch
from pcomm.nvls.workspace.slots import SlotLease
from pcomm.nvls.workspace.workspace import Workspace

__all__ = [
    "VECTOR_BYTES",
    "again",
    "apart",
    "barrier_launch",
    "check_input",
    "check_inputs_outside",
    "check_result",
    "deliver",
    "dense",
    "kernel_dim",
    "kind_of",
    "lamport_launch",
    "outside",
    "peers_at_a_time",
    "result_in",
    "row_vectors",
    "way_of",
]


VECTOR_BYTES = 16
"""Bytes that a thread moves at a time; addresses are multiples of it."""

_ALIGNMENT = 15
# Left alone, the compiler moves one or two words to local memory to reach the next occupancy.
_MAX_REGISTERS = 128
_REGISTERS_OF_A_BLOCK = 65536
# Vectors that a thread of a kernel with a barrier has on the way at a time.
_IN_FLIGHT = 4
_MOST_PEERS_AT_A_TIME = 8


def again(workspace: Workspace, key: Hashable, x: Tensor, out: Tensor | None) -> Tensor | None:
    """Launch a call that is like one before: all but the addresses and the turn is known. Local.

    What can still differ is looked at: strides, alignment, overlap, and whether a tensor lies in
    the workspace, where an input is one that `Workspace.empty` returned last. A call that differs
    in these goes the long way.

    Args:
        workspace: Workspace of the call.
        key: Key of the `CachedCall` that the workspace remembers.
        x: Input.
        out: Tensor for the result; None for a new one.

    Returns:
        The result; None where the call has to go the long way, which has not begun then.
    """
    repeat = workspace.repeats.get(key)
    if repeat is None or workspace.failure_word.value:
        return None
    is_like = repeat.is_like(x) if out is None else repeat.are_like(x, out)
    if not is_like and not repeat.takes(x, out):
        return None
    address = x.data_ptr()
    begin, end = workspace.own_range
    turns, lease = workspace.turns, None
    if begin <= address < end:
        lease = turns.handed_out
        if lease is None or address - begin != workspace.regions.slot(lease.slot):
            return None
    if address & _ALIGNMENT:
        return None
    result = x.new_empty(repeat.shape) if out is None else out
    target = result.data_ptr()
    if target & _ALIGNMENT or begin <= target < end:
        return None
    ahead = address - target
    if -repeat.input_bytes < ahead < repeat.result_bytes and ahead != repeat.place:
        return None
    stream = turns.plain_stream(lease)
    if stream is None or not workspace.stream.is_current_device():
        return None
    if lease is None:
        variant = repeat.variants.get(turns.rotation.step(is_captured=False))
    else:
        variant = repeat.in_slot.get(lease.slot)
    if variant is None:
        if lease is None:
            turns.rotation.undo()
        return None
    runner, arguments, x_at, out_at = variant
    arguments = arguments.copy()
    arguments[x_at], arguments[out_at] = address, target
    runner.run(arguments, stream)
    if lease is not None:
        turns.take()
    workspace.num_launches += 1
    if out is not None:
        # The launch has only its address: autograd is told that it has changed.
        increment_version(out)
    return result


def check_input(operation: str, x: Tensor, device: torch.device) -> None:
    """Refuse what is no tensor, records gradients, or is on another kind of device. Local.

    Raises:
        ConfigError: It is no tensor.
        UnsupportedError: Gradients are recorded for it, or it is no dense tensor.
        LayoutError: It is on another kind of device than the workspace.
    """
    if not isinstance(x, Tensor):
        raise ConfigError(
            f"{operation}: {x!r:.80}",
            found=f"a {type(x).__name__}",
            why="The input is a tensor of this rank; the tensor for the result is `out`.",
            fix=f"Call {operation}(x, out=out, workspace=workspace), or leave `out` away.",
        )
    if x.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError(
            f"{operation}: shape {tuple(x.shape)}, requires_grad=True",
            found="a tensor whose gradient is recorded",
            why="These collectives are for inference and have no backward.",
            fix="Call it under torch.no_grad(), or use Group.differentiable for training.",
        )
    if x.device.type != device.type:
        raise LayoutError(
            f"{operation}: a tensor on {x.device}",
            found=f"a workspace on {device}",
            why="Kernels read the tensor on the device of the workspace.",
            fix=f"Move it there, or open the workspace with device={x.device.type!r}.",
        )
    if x.layout is not torch.strided:
        raise UnsupportedError(
            f"{operation}: a tensor of layout {x.layout}",
            found="a layout other than torch.strided",
            why="Its bytes do not lie one after another.",
            fix="Pass x.to_dense().",
        )


def check_result(
    operation: str, out: Tensor | None, shape: tuple[int, ...], like: Tensor, workspace: Workspace
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


def _offset_in(workspace: Workspace, x: Tensor) -> int | None:
    """Byte of the workspace at which a tensor begins; None where it lies elsewhere."""
    if workspace.memory is None or not x.numel():
        return None
    offset = x.data_ptr() - workspace.memory.buffer_ptrs[workspace.group.rank]
    return offset if 0 <= offset < workspace.regions.num_bytes else None


def dense(x: Tensor) -> Tensor:
    """The tensor itself where its bytes follow each other from a multiple of 16, or such a copy."""
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    if not x.is_contiguous():
        return x.contiguous()
    return x if x.data_ptr() % VECTOR_BYTES == 0 else x.clone()


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


def kernel_dim(x: Tensor, dim: int) -> int:
    """`dim` as kernels know it: 0, or -1 for the last of several; others as they are."""
    if not -x.dim() <= dim < x.dim():
        return dim
    place = dim % x.dim()
    return -1 if place and place == x.dim() - 1 else place


def way_of(choice: Choice) -> str:
    """How a choice with a barrier moves data, as `is_one_shot` calls it."""
    return "multicast" if choice.algorithm == "multimem" else "peers"


def kind_of(dtype: torch.dtype) -> str:
    """How the kernels that add call a dtype: "bf16", "fp16" or "fp32"; the choice has no other."""
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]


def barrier_launch(
    kernel: Any,
    workspace: Workspace,
    choice: Choice,
    lease: SlotLease,
    arguments: Mapping[str, Any],
    tensors: tuple[Tensor, ...],
    shared_vectors: int = 0,
) -> Launch:
    """The launch of a kernel with a barrier, in the slot of a turn. Local.

    A thread loads `_IN_FLIGHT` vectors before it stores the first where that leaves no thread of
    the grid without data. With one it waits for memory at each: 16 blocks of 512 threads have 128
    KiB on the way, a fourth of what memory gives in the time that a load takes.

    Args:
        kernel: Kernel of the operation.
        workspace: Workspace of the group.
        choice: Algorithm and grid.
        lease: Turn of the operation.
        arguments: Arguments beside those of the group, the slot and the grid.
        tensors: Tensors whose addresses are among the arguments.
        shared_vectors: Length of what all blocks share, in 16 bytes: the same on all ranks, since a
            block waits for the same block of the others. 0 where it is not the same.
    """
    threads = 32 * choice.num_warps
    many = shared_vectors >= _IN_FLIGHT * threads * choice.num_blocks
    shared = {
        **workspace.shared_arguments(),
        "slot": workspace.regions.slot(lease.slot),
        "WAY": workspace.barrier_way(choice.algorithm == "multimem"),
        "ENTRY": lease.needs_entry,
        "BLOCK": threads * _IN_FLIGHT if many else threads,
    }
    blocks, warps = choice.num_blocks, choice.num_warps
    return Launch(kernel, blocks, warps, {**shared, **arguments}, workspace.device, tensors)


def lamport_launch(
    kernel: Any,
    workspace: Workspace,
    choice: Choice,
    out: Tensor,
    x: Tensor,
    num_bytes: int,
    arguments: Mapping[str, Any],
) -> Launch:
    """The launch of a kernel without a barrier, whose turn was taken. Local.

    An operation takes a turn of the workspace, although it uses no slot of it: the next operation
    but one may write where its input lies. To the turns before and after it the operation is a
    barrier, since no rank ends it before all have begun it.

    Args:
        kernel: Kernel of the operation.
        workspace: Workspace of the group.
        choice: Grid.
        out: Result.
        x: Input.
        num_bytes: Bytes that a rank sends to another one.
        arguments: Further arguments.
    """
    num_vectors, block = num_bytes // VECTOR_BYTES, 32 * choice.num_warps
    every = {
        **workspace.lamport_arguments(),
        "x": x.data_ptr(),
        "out": out.data_ptr(),
        "num_vectors": num_vectors,
        "BLOCK": block,
        **arguments,
    }
    # Blocks without data would only be counted.
    blocks = min(choice.num_blocks, -(-num_vectors // block))
    registers = min(_MAX_REGISTERS, _REGISTERS_OF_A_BLOCK // block)
    warps, device = choice.num_warps, workspace.device
    return Launch(kernel, blocks, warps, every, device, (x, out), registers)


def peers_at_a_time(world_size: int) -> int:
    """The next power of two, up to as many as a thread has registers for."""
    return min(1 << (world_size - 1).bit_length(), _MOST_PEERS_AT_A_TIME)


def row_vectors(shard: Tensor, dim: int) -> int:
    """Length of the ranges of a shard that stay contiguous along `dim`, 0 or -1, in 16 bytes."""
    num_bytes = shard.shape[-1] * shard.itemsize if dim == -1 else shard.nbytes
    return num_bytes // VECTOR_BYTES
