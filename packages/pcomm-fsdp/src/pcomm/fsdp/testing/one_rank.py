"""One rank whose groups have communicators all the same, as a single GPU can have them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pcomm.core.groups.group import Group
from pcomm.core.groups.groups import Groups

__all__ = ["on_gloo_and_nccl", "one_rank_groups"]

on_gloo_and_nccl = pytest.mark.parametrize(
    "kind",
    [
        "gloo",
        pytest.param(
            "nccl",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="NCCL needs a GPU"),
            ],
        ),
    ],
)
"""Runs a test on the CPU, and on a GPU where there is one."""


@contextmanager
def one_rank_groups(backend: str, folder: Path) -> Iterator[Groups]:
    """`dp[gather]` and `dp[reduce]`, each with a communicator of its own; `open_groups` makes none.

    Args:
        backend: `"gloo"` or `"nccl"`.
        folder: An empty one, in which the rank meets itself.
    """
    store = dist.FileStore(str(folder / "store"), 1)
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        members = {role: dist.new_group([0], backend=backend) for role in ("gather", "reduce")}
        groups = [Group("dp", (0,), pg, role=role) for role, pg in members.items()]
        yield Groups(groups, owned=list(members.values()))
    finally:
        dist.destroy_process_group()
