"""Split layers that are copied and pickled: a copy has its own parameters, and shares the rest."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor

from core_support.split_model import SplitModel
from pcomm.core.collectives.autograd import DifferentiableCollectives
from pcomm.core.collectives.instrumented import SpyCollectives
from pcomm.core.collectives.protocol import Collectives
from pcomm.core.errors import UnsupportedError
from pcomm.core.layout import Layout
from pcomm.core.tensor_parallel.linear import ColumnParallelLinear
from pcomm.core.testing.assertions import assert_equal
from pcomm.core.testing.on_ranks import default_collectives, ranks
from pcomm.core.testing.virtual import VirtualCollectives, run_virtual


def train(model: SplitModel, *, num_steps: int) -> list[Tensor]:
    ids = torch.arange(8) * (model.words.length // 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(num_steps):
        loss = model(ids, ids.roll(-1))
        loss.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def check_copy(collectives: Collectives, *, width: int, sequence: bool) -> None:
    torch.manual_seed(3)
    model = SplitModel(collectives, width=width, bias=True, sequence_parallel=sequence)
    train(model, num_steps=1)
    copied = copy.deepcopy(model)
    assert copied.head.collectives is copied.collectives is collectives
    before = [p.detach().clone() for p in model.parameters()]
    losses = train(copied, num_steps=2)
    # The copy has trained, and the original has not.
    for kept, old, new in zip(before, model.parameters(), copied.parameters(), strict=True):
        assert_equal(old.detach(), kept)
        assert not torch.equal(new, old)
    assert losses[0].mean() > losses[-1].mean()
    for one, other in zip(train(model, num_steps=2), losses, strict=True):
        assert_equal(one, other)
    for old, new in zip(model.parameters(), copied.parameters(), strict=True):
        assert_equal(old.detach(), new.detach())


@pytest.mark.parametrize("sequence", [False, True])
@ranks(2)
def test_a_copied_model_trains_like_the_original(rank: int, sequence: bool) -> None:
    ours = default_collectives()
    with_gradients = DifferentiableCollectives(ours)
    assert copy.deepcopy([with_gradients])[0] is with_gradients
    for collectives in (ours, SpyCollectives(ours)):
        assert copy.copy(collectives) is collectives
        check_copy(collectives, width=32, sequence=sequence)
    # Weights of 2 MiB, which gloo reduces in pieces.
    check_copy(ours, width=512, sequence=sequence)


def test_a_copy_on_virtual_ranks() -> None:
    def on_rank(collectives: VirtualCollectives) -> None:
        layer = ColumnParallelLinear(4, Layout.even(4, 2), collectives, gather_output=True)
        x = torch.ones(3, 4)
        assert_equal(copy.deepcopy(layer)(x), layer(x))

    run_virtual(on_rank, 2)


@ranks(2)
def test_a_split_layer_is_not_pickled_and_says_what_to_save(rank: int) -> None:
    ours = default_collectives()
    for collectives in (ours, SpyCollectives(ours), DifferentiableCollectives(ours)):
        layer = ColumnParallelLinear(4, Layout.even(4, 2), collectives)
        with pytest.raises(UnsupportedError, match=f"rank {rank} of 2") as caught:
            pickle.dumps(layer)
        assert "state_dict" in caught.value.fix
        with pytest.raises(UnsupportedError, match=f"rank {rank} of 2"):
            torch.save(layer, io.BytesIO())
        other = ColumnParallelLinear(4, Layout.even(4, 2), collectives)
        file = io.BytesIO()
        torch.save(layer.state_dict(), file)
        file.seek(0)
        other.load_state_dict(torch.load(file))
        assert_equal(other.weight.detach(), layer.weight.detach())
