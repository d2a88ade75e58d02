"""The global norm of gradients, of as many elements as real layers have."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pcomm.core import IdentityCollectives, Topology, open_groups
from pcomm.core.tensor_parallel import param_layouts_of
from pcomm.fsdp import Roles, fully_shard
from pcomm.integration.replicas import global_norm


def test_it_is_clipped_by_the_norm_that_fp64_gives():
    """torch's own norm on a CPU is 1e-4 too small here, and less so on more ranks."""
    model = nn.Linear(2048, 2048, bias=False)
    gradient = 1e-3 * torch.randn(2048, 2048, generator=torch.Generator().manual_seed(0))
    model.weight.grad = gradient.clone()
    exact = float(gradient.double().norm())
    with open_groups(Topology({"dp": 1}), ["dp"]) as groups:
        sharded = fully_shard(model, Roles(groups["dp"], groups["dp"]), units=[nn.Linear])
        found = global_norm(sharded, param_layouts_of(model), IdentityCollectives())
        sharded.clip_grad_norm(0.5 * exact, norm=found)
    # Pieces in fp32, which round by 1e-7.
    assert float(found) == pytest.approx(exact, rel=1e-6)
    assert float(model.weight.grad.double().norm()) == pytest.approx(0.5 * exact, rel=1e-6)
