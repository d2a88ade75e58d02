"""What operations cost that do nothing on one rank, beside the layers that leave them out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from pcomm.core.collectives.identity import IdentityCollectives
from pcomm.core.errors import ConfigError
from pcomm.core.layout import Layout
from pcomm.core.tensor_parallel.embedding import VocabularyParallelEmbedding
from pcomm.core.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from pcomm.core.testing.timing import Timing, time_cases

__all__ = ["BARE", "time_no_ops"]

# One token of a model of that width, as in a step of decoding.
_WIDTH, _VOCABULARY = 4096, 256

# What each case is compared with.
BARE = {
    "autograd.Function.apply, gradients on": "a call",
    "autograd.Function.apply, no_grad": "a call",
    "autograd.Function.apply, inference_mode": "a call",
    "comparing an int of the constructor": "a call",
    "group.size()": "a call",
    "dist.get_world_size(group)": "a call",
    "torch.tensor([])": "a call",
    "a copy before a reduction": "a call",
    "gloo all_reduce, one rank": "a call",
    "gloo all_gather, one rank": "a call",
    "nn.Linear": "F.linear",
    "ColumnParallelLinear": "F.linear",
    "RowParallelLinear": "F.linear",
    "VocabularyParallelEmbedding": "F.embedding",
}


class _NoOp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def time_no_ops(*, rounds: int) -> dict[str, Timing]:
    """Microseconds of each case of `BARE`, of what they are compared with, on one thread.

    Raises:
        ConfigError: torch.distributed is in use in this process.
    """
    if dist.is_initialized():
        raise ConfigError(
            "pcomm bench inference",
            found="a default process group in this process",
            why="The costs of a world of one rank are measured, which needs a group of its own.",
            fix="Run it as one process, without torchrun.",
        )
    x, narrow = torch.zeros(1, 1, _WIDTH), torch.zeros(1, 64)
    like = torch.empty_like(x)
    alone, layout = IdentityCollectives(), Layout.even(64, 1)
    column = ColumnParallelLinear(64, layout, alone)
    row = RowParallelLinear(layout, 64, alone)
    embedding = VocabularyParallelEmbedding(Layout.even(_VOCABULARY, 1), 64, alone)
    plain, ids = nn.Linear(64, 64, bias=False), torch.zeros(1, dtype=torch.int64)
    weight, table, size = plain.weight, embedding.weight, alone.size
    apply: Callable[[Tensor], Tensor] = _NoOp.apply
    recorded = x.clone().requires_grad_()
    with _world_of_one() as group:
        found = time_cases(
            {"autograd.Function.apply, gradients on": lambda: apply(recorded)}, rounds=rounds
        )
        with torch.no_grad():
            found |= time_cases(
                {"autograd.Function.apply, no_grad": lambda: apply(x)}, rounds=rounds
            )
        with torch.inference_mode():
            found |= time_cases(
                {
                    "a call": lambda: None,
                    "autograd.Function.apply, inference_mode": lambda: apply(x),
                    "comparing an int of the constructor": lambda: size > 1,
                    "group.size()": group.size,
                    "dist.get_world_size(group)": lambda: dist.get_world_size(group),
                    "torch.tensor([])": lambda: torch.tensor([]),
                    "a copy before a reduction": x.clone,
                    "F.linear": lambda: F.linear(narrow, weight),
                    "nn.Linear": lambda: plain(narrow),
                    "ColumnParallelLinear": lambda: column(narrow),
                    "RowParallelLinear": lambda: row(narrow),
                    "F.embedding": lambda: F.embedding(ids, table),
                    "VocabularyParallelEmbedding": lambda: embedding(ids),
                },
                rounds=rounds,
                clock=time.thread_time,
            )
            # Other threads do these, so their time counts too.
            found |= time_cases(
                {
                    "gloo all_reduce, one rank": lambda: dist.all_reduce(x, group=group),
                    "gloo all_gather, one rank": lambda: dist.all_gather([like], x, group=group),
                },
                rounds=rounds,
            )
    return found


@contextmanager
def _world_of_one() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
