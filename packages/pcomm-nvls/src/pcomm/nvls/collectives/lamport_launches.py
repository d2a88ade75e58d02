"""The launches of the operations without barriers, for choices whose algorithm is "lamport".

Each takes a turn of the workspace, although it uses no slot of it: the next operation but one may
write where its input lies. To the turns before and after it the operation is a barrier, since no
rank ends it before all have begun it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pcomm.nvls.collectives.inputs import VECTOR_BYTES, kind_of
from pcomm.nvls.policy.choose import Choice
from pcomm.nvls.primitives.lamport_numbers import is_spread
from pcomm.nvls.workspace.launch import Launch
from pcomm.nvls.workspace.workspace import Workspace

__all__ = [
    "lamport_all_gather_launch",
    "lamport_all_reduce_launch",
    "lamport_reduce_scatter_launch",
]

# Left alone, the compiler moves one or two words to local memory to reach the next occupancy.
_MAX_REGISTERS = 128
_REGISTERS_OF_A_BLOCK = 65536
_MOST_PEERS_AT_A_TIME = 8


def lamport_all_gather_launch(
    workspace: Workspace, choice: Choice, out: Tensor, x: Tensor, dim: int
) -> Launch:
    """The all-gather of `x` into `out`, along dimension 0 or -1. Takes a turn of the workspace."""
    from pcomm.nvls.kernels.lamport_all_gather import lamport_all_gather_kernel

    workspace.turn()
    arguments = {
        **_arguments(workspace, choice, out, x, x.nbytes),
        **_rows(x, dim),
        "SPREAD": is_spread(x.dtype),
        "PEERS": _peers_at_a_time(workspace.group.size),
    }
    return _launch(lamport_all_gather_kernel, workspace, choice, arguments, x, out)


def lamport_all_reduce_launch(
    workspace: Workspace, choice: Choice, out: Tensor, x: Tensor
) -> Launch:
    """The sum of `x` in `out`, which may be `x`. Takes a turn of the workspace."""
    from pcomm.nvls.kernels.lamport_all_reduce import lamport_all_reduce_kernel

    workspace.turn()
    arguments = {**_arguments(workspace, choice, out, x, x.nbytes), "KIND": kind_of(x.dtype)}
    return _launch(lamport_all_reduce_kernel, workspace, choice, arguments, x, out)


def lamport_reduce_scatter_launch(
    workspace: Workspace, choice: Choice, out: Tensor, x: Tensor, dim: int
) -> Launch:
    """This rank's segment, along dimension 0 or -1, of the sum of `x`. Takes a turn.

    `out` may be that segment of `x`, where `dim` is 0.
    """
    from pcomm.nvls.kernels.lamport_reduce_scatter import lamport_reduce_scatter_kernel

    # In the slot of another turn, a rank that has its segment could store with the next operation
    # before this one has read what it sends to a third rank.
    workspace.is_in_slot(x, workspace.turn())
    arguments = {
        **_arguments(workspace, choice, out, x, out.nbytes),
        **_rows(out, dim),
        "KIND": kind_of(x.dtype),
        "PEERS": _peers_at_a_time(workspace.group.size),
    }
    # A segment has one receiver: there is nothing for a multicast to do.
    del arguments["multicast"], arguments["WAY"]
    return _launch(lamport_reduce_scatter_kernel, workspace, choice, arguments, x, out)


def _arguments(
    workspace: Workspace, choice: Choice, out: Tensor, x: Tensor, num_bytes: int
) -> dict[str, Any]:
    return {
        **workspace.lamport_arguments(),
        "x": x.data_ptr(),
        "out": out.data_ptr(),
        "num_vectors": num_bytes // VECTOR_BYTES,
        "BLOCK": 32 * choice.num_warps,
    }


def _rows(shard: Tensor, dim: int) -> dict[str, int]:
    row_bytes = shard.shape[-1] * shard.itemsize if dim == -1 else shard.nbytes
    return {"row_vectors": row_bytes // VECTOR_BYTES}


def _peers_at_a_time(world_size: int) -> int:
    """The next power of two, up to as many as a thread has registers for."""
    return min(1 << (world_size - 1).bit_length(), _MOST_PEERS_AT_A_TIME)


def _launch(
    kernel: Any,
    workspace: Workspace,
    choice: Choice,
    arguments: dict[str, Any],
    x: Tensor,
    out: Tensor,
) -> Launch:
    # Blocks without data would only be counted.
    blocks = min(choice.num_blocks, -(-arguments["num_vectors"] // arguments["BLOCK"]))
    registers = min(_MAX_REGISTERS, _REGISTERS_OF_A_BLOCK // arguments["BLOCK"])
    return Launch(
        kernel, blocks, choice.num_warps, arguments, workspace.device, (x, out), registers
    )
