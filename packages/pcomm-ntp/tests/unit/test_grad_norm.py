"""The norm of summed gradients, clipping, and steps that are skipped."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ntp_support.tagged_sums import (
    TaggedModel,
    assert_same_bits,
    gradients_of,
    on_tagged_ranks,
    plan_of_degrees,
    shards_of,
    summed_gradients,
    tags,
)
from pcomm.core.groups.open_groups import Groups
from pcomm.ntp import GradSync
from pcomm.ntp.sync.grad_groups import Strategy

STRATEGIES: tuple[Strategy, ...] = ("interval", "gather-core")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("degrees", [(4, 3), (2, 3, 1)], ids=str)
def test_the_norm_counts_every_element_once_and_has_the_same_bits(degrees, strategy):
    weights = dict.fromkeys(range(len(degrees)), 0.3)
    expected = summed_gradients(weights, seed=3)
    whole = [one.clone().requires_grad_() for one in expected.values()]
    for one in whole:
        one.grad = one.detach().clone()
    exact = torch.nn.utils.clip_grad_norm_(whole, 0.7)
    clipped = dict(zip(expected, (one.grad for one in whole), strict=True))

    def task(sync: GradSync, model: TaggedModel, _: Groups) -> Tensor:
        replica = model.place.replica
        with sync.accumulate(weight=0.3):
            model.loss(tags(replica, seed=3)).backward()
        sync.finish()
        norm = sync.grad_norm()
        assert torch.equal(norm, sync.clip_grad_norm_(0.7))
        for name, one in gradients_of(model).items():
            wanted = model.own(name, clipped[name])  # type: ignore[arg-type]
            torch.testing.assert_close(one, wanted, rtol=0, atol=1e-14)
        return norm

    norms = on_tagged_ranks(plan_of_degrees(degrees), task, strategy)
    first, *others = [one for one in norms.values() if isinstance(one, Tensor)]
    assert first.dtype == torch.float64
    torch.testing.assert_close(first, exact, rtol=1e-14, atol=0)
    assert all(torch.equal(first, other) for other in others)


def test_a_gradient_that_is_not_finite_is_so_for_all() -> None:
    def task(sync: GradSync, model: TaggedModel, _: Groups) -> None:
        replica = model.place.replica
        upstream = tags(replica)
        if replica == 1:
            upstream["0.fc2.weight"][0, -1] = float("inf")
        with sync.accumulate():
            model.loss(upstream).backward()
        sync.finish()
        assert sync.grad_norm().isinf()

    on_tagged_ranks(plan_of_degrees((3, 2)), task)


def test_all_ranks_skip_a_step_that_overflows_on_one() -> None:
    made, expected = plan_of_degrees((3, 2)), summed_gradients({0: 1.0, 1: 1.0})

    def task(sync: GradSync, model: TaggedModel, _: Groups) -> float:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for overflows in (True, False):
            before = [one.detach().clone() for one in model.parameters()]
            upstream = tags(model.place.replica)
            if overflows and model.place.replica == 1:
                upstream["0.fc2.weight"][0, -1] = float("inf")
            with sync.accumulate():
                scaler.scale(model.loss(upstream)).backward()
            sync.finish()
            sync.unscale_(scaler, optimizer)
            if not overflows:
                assert_same_bits(gradients_of(model), shards_of(model, expected))
            scaler.step(optimizer)
            scaler.update()
            same = all(map(torch.equal, before, model.parameters()))
            assert same == overflows
            sync.zero_grad()
        return scaler.get_scale()

    assert set(on_tagged_ranks(made, task).values()) == {4.0}
