"""Settings of `fully_shard` that are not what they should be, and slips that are likely."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pcomm.core import Topology, open_groups
from pcomm.core.errors import ConfigError
from pcomm.fsdp import Precision, ReshardPolicy, Roles, fully_shard


@pytest.mark.parametrize(("name", "value"), [("keep", "foo"), ("reduce", "steps")])
def test_another_word_of_a_policy_is_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"ReshardPolicy\\({name}='{value}'\\)"):
        ReshardPolicy(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "setting",
    [
        {"reshard": "zero3"},
        {"reshard": ReshardPolicy.zero3},
        {"precision": torch.bfloat16},
        {"comm": Precision()},
    ],
    ids=["a word", "without parentheses", "a dtype", "other settings"],
)
def test_a_setting_of_another_type_is_refused(setting: dict[str, object]) -> None:
    keys = [("dp", "gather"), ("dp", "reduce")]
    refused = pytest.raises(ConfigError, match=f"fully_shard: {next(iter(setting))}=")
    with open_groups(Topology({"dp": 1}), keys) as groups, refused:
        roles = Roles(*(groups[key] for key in keys))
        fully_shard(nn.Linear(2, 2), roles, units=[], **setting)  # type: ignore[arg-type]
