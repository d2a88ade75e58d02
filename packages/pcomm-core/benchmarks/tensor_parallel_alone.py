"""What a tensor-parallel layer costs on one rank over the bare torch function.

The tensors are small, so that the time is the host's: 16 tokens of width 64. `nn.Linear` is there
to say what a module costs otherwise. Aim: at most 1 microsecond more than the function.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from core_bench.rows import Row
from core_bench.runner import compare, run_benchmark, time_cases
from pcomm.core import IdentityCollectives, Layout
from pcomm.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabularyParallelEmbedding,
)
from pcomm.core.testing import assert_equal

NAME = "tensor_parallel_alone"
TOKENS, WIDTH, VOCABULARY = 16, 64, 256


def measure() -> list[Row]:
    torch.set_num_threads(1)
    alone, layout = IdentityCollectives(), Layout.even(WIDTH, 1)
    column = ColumnParallelLinear(WIDTH, layout, alone)
    row = RowParallelLinear(layout, WIDTH, alone)
    plain = nn.Linear(WIDTH, WIDTH, bias=False)
    embedding = VocabularyParallelEmbedding(Layout.even(VOCABULARY, 1), WIDTH, alone)
    x, ids = torch.randn(TOKENS, WIDTH), torch.randint(VOCABULARY, (TOKENS,))
    weight, table = column.weight, embedding.weight
    with torch.no_grad():
        row.weight.copy_(weight)
        plain.weight.copy_(weight)

    cases: dict[str, Callable[[], Tensor]] = {
        "F.linear": lambda: F.linear(x, weight),
        "ColumnParallelLinear": lambda: column(x),
        "RowParallelLinear": lambda: row(x),
        "nn.Linear": lambda: plain(x),
        "F.embedding": lambda: F.embedding(ids, table),
        "VocabularyParallelEmbedding": lambda: embedding(ids),
    }
    for name in ("ColumnParallelLinear", "RowParallelLinear", "nn.Linear"):
        assert_equal(cases[name](), cases["F.linear"]())
    assert_equal(cases["VocabularyParallelEmbedding"](), cases["F.embedding"]())

    timings = time_cases(cases, clock=time.thread_time)
    linear = timings["F.linear"]
    first = compare(NAME, timings["ColumnParallelLinear"], linear)
    others = [
        compare(NAME, timings[name], linear)[1:] for name in ("RowParallelLinear", "nn.Linear")
    ]
    last = compare(NAME, timings["VocabularyParallelEmbedding"], timings["F.embedding"])
    return [*first, *others[0], *others[1], *last]


if __name__ == "__main__":
    run_benchmark(__doc__, measure)
