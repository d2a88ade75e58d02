"""What split layers ask of torch.distributed where no gradient is asked for."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pcomm.core.groups.communicators import communicator_of
from pcomm.core.layout import Layout
from pcomm.core.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from pcomm.core.tensor_parallel.vocabulary import VocabularyParallelEmbedding
from pcomm.core.testing.assertions import assert_equal
from pcomm.core.testing.on_ranks import ranks


@ranks(2)
def test_a_block_is_two_all_reduces_of_torch_and_an_embedding_one(rank: int) -> None:
    assert dist.group.WORLD is not None
    collectives = communicator_of(dist.group.WORLD).collectives
    words, hidden = Layout.balanced(11, 2), Layout.even(8, 2)
    embedding = VocabularyParallelEmbedding(words, 4, collectives, check_ids=False)
    blocks = [
        layer
        for _ in range(2)
        for layer in (
            ColumnParallelLinear(4, hidden, collectives),
            RowParallelLinear(hidden, 4, collectives),
        )
    ]
    head = ColumnParallelLinear(4, words, collectives, gather_output=True)

    def logits(ids: Tensor) -> Tensor:
        x = embedding(ids)
        for layer in blocks:
            x = layer(x)
        out: Tensor = head(x)
        return out

    ids = torch.tensor([10, 3, 0])
    expected, calls = logits(ids).detach(), Counter[str]()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "all_gather_into_tensor", "all_gather_single"):
            run = getattr(dist, name, None)
            if run is not None:
                patch.setattr(
                    dist,
                    name,
                    lambda *a, _run=run, _name=name, **b: (calls.update([_name]), _run(*a, **b))[1],
                )
        with torch.inference_mode():
            found = logits(ids)
    assert_equal(found.clone(), expected)
    # One for the embedding, one for each row-parallel layer.
    assert calls["all_reduce"] == 3
    assert calls.total() <= 4
