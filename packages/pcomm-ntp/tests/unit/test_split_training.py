"""Training with replicas of different degrees equals that of the whole model on one process."""

from __future__ import annotations

import pytest
import torch

from ntp_support.small_training import (
    StepState,
    assert_training,
    train,
    train_dense,
    training_specs,
    training_units,
)
from ntp_support.virtual_groups import run_on_virtual_groups
from pcomm.core.groups.open_groups import Groups
from pcomm.core.topology import Topology
from pcomm.ntp import Failures, plan
from pcomm.ntp.sync.grad_groups import Strategy


@pytest.mark.parametrize(
    ("degrees", "strategy"),
    [
        ((4, 3), "gather-core"),
        ((3, 2, 4), "interval"),
        ((2, 3, 1), "gather-core"),
        pytest.param((8, 7), "interval", marks=pytest.mark.soak),
        pytest.param((8, 7), "gather-core", marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_five_steps_of_adamw_with_clipping(degrees: tuple[int, ...], strategy: Strategy) -> None:
    """Two micro-batches of unequal size, batches by token shares, a tied vocabulary of 13."""
    full = max(degrees)
    topology = Topology({"dp": len(degrees), "tp": full})
    gone = [dp * full + tp for dp, own in enumerate(degrees) for tp in range(full - own)]
    made = plan(topology, Failures.from_global_ranks(gone), training_units())
    assert made.degrees == tuple((own,) for own in degrees)
    dense = train_dense()

    def task(rank: int, groups: Groups) -> list[StepState]:
        found = train(made, rank, groups, strategy=strategy)
        assert_training(made, rank, found, dense, atol=1e-12)
        return found

    states = run_on_virtual_groups(made.topology, training_specs(made, strategy), task)
    # What every rank holds is the same, bit by bit, at every step.
    first, *others = states.values()
    for other in others:
        for one, two in zip(first, other, strict=True):
            assert torch.equal(one.norm, two.norm)
            for name in ("norm.weight", "norm.bias", "fc2.bias"):
                assert all(map(torch.equal, one.tensors[name], two.tensors[name]))
