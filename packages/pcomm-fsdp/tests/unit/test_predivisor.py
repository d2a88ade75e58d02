"""By how much fp16 gradients are divided before they are summed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fsdp_support.schedules import plan_of
from pcomm.core.groups.group import Group
from pcomm.fsdp.settings import Roles


@pytest.mark.parametrize(
    ("size", "factor"), [(1, 1), (2, 2), (3, 2), (4, 2), (5, 4), (8, 4), (16, 4), (17, 8), (64, 8)]
)
def test_about_the_root_of_the_number_of_ranks(size: int, factor: int) -> None:
    group = Group("dp", tuple(range(size)), None)
    plan = plan_of("unit", Roles(group, group), reduce_dtype=torch.float16)
    assert plan.predivisor == factor
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert replace(plan, reduce_dtype=dtype).predivisor == 1
