"""What is imported, and which version it is."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pcomm.fsdp

# -- modules that a training run does not need are not loaded by it -----------------------------

PROGRAM = """
import sys

import torch
from torch import nn

from pcomm.core import Group
from pcomm.fsdp import Precision, Roles, fully_shard


def loaded():
    lazy = ("report", "compute_costs", "separation")
    return sorted(name for name in lazy if f"pcomm.fsdp.{name}" in sys.modules)


group = Group("alone", (0,), None)
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
sharded = fully_shard(
    model, Roles(group, group), units=[nn.Linear], precision=Precision(torch.bfloat16)
)
optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
model(torch.ones(2, 4)).square().mean().backward()
sharded.clip_grad_norm(1.0)
optimizer.step()
sharded.full_state_dict()
assert not loaded(), loaded()
print(sharded.report().memory)
assert loaded() == ["compute_costs", "report"]
"""


def test_analysis_is_imported_only_when_it_is_asked_for() -> None:
    """A step with everything around it, and then a report."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "PeakMemory" in done.stdout


# -- the version --------------------------------------------------------------------------------


def test_version_is_that_of_the_installed_distribution():
    assert pcomm.fsdp.__version__ == version("pcomm-fsdp")
