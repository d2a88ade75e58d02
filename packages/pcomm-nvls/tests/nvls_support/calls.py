"""One call of every operation, of a size that decoding has: for each way to carry it out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from pcomm.nvls.collectives.fused_rmsnorm import (
    all_reduce_add_rmsnorm,
    reduce_scatter_add_rmsnorm_all_gather,
)
from pcomm.nvls.collectives.gathers import (
    all_gather_coalesced,
    all_gather_into_tensor,
    gather_to_rank,
)
from pcomm.nvls.collectives.ragged import all_gather_v, reduce_scatter_v
from pcomm.nvls.collectives.reductions import all_reduce, reduce_scatter_tensor
from pcomm.nvls.policy.table import Algorithm, operation_named
from pcomm.nvls.workspace.workspace import Workspace

__all__ = ["calls"]

_EPS = 1e-6


def calls(
    workspace: Workspace, *, rows: int = 64, hidden: int = 512
) -> dict[tuple[str, Algorithm], Callable[[], Any]]:
    """A function for each operation and each algorithm that has a kernel for it. Local to make.

    Args:
        workspace: Workspace of the group; the functions are collective over it.
        rows: Number of rows of the whole tensor, a multiple of the number of ranks.
        hidden: Length of a row in numbers of bf16, a multiple of 8 for each rank.

    Returns:
        Functions of no arguments by name of the operation and algorithm.
    """
    size, device = workspace.group.size, workspace.device
    whole = torch.ones(rows, hidden, dtype=torch.bfloat16, device=device)
    shard = whole[: rows // size].clone()
    weight = torch.ones(hidden, dtype=torch.bfloat16, device=device)
    counts = torch.full((size,), rows // size, dtype=torch.int32, device=workspace.device)
    made: dict[str, Callable[[Algorithm], Any]] = {
        "all_gather_into_tensor": lambda algo: all_gather_into_tensor(
            shard, workspace=workspace, algo=algo
        ),
        "all_gather_coalesced": lambda algo: all_gather_coalesced(
            [shard, shard, shard], workspace=workspace, algo=algo
        ),
        "reduce_scatter_tensor": lambda algo: reduce_scatter_tensor(
            whole, workspace=workspace, algo=algo
        ),
        "all_reduce": lambda algo: all_reduce(whole, workspace=workspace, algo=algo),
        "all_gather_v": lambda algo: all_gather_v(shard, counts, workspace=workspace, algo=algo),
        "reduce_scatter_v": lambda algo: reduce_scatter_v(
            whole, counts, out=torch.empty_like(shard), workspace=workspace, algo=algo
        ),
        "gather_to_rank": lambda algo: gather_to_rank(shard, workspace=workspace, algo=algo),
        "reduce_scatter_add_rmsnorm_all_gather": lambda algo: reduce_scatter_add_rmsnorm_all_gather(
            whole, shard, weight, _EPS, workspace=workspace, algo=algo
        ),
        "all_reduce_add_rmsnorm": lambda algo: all_reduce_add_rmsnorm(
            whole, whole, weight, _EPS, workspace=workspace, algo=algo
        ),
    }
    found: dict[tuple[str, Algorithm], Callable[[], Any]] = {}
    for name, run in made.items():
        for algorithm in operation_named(name).algorithms:
            found[name, algorithm] = partial(run, algorithm)
    return found
