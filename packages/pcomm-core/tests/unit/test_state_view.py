"""State that is looked up when it is saved and loaded: tensors, plain values, and their absence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from pcomm.core.checkpoint.dcp import ShardLoadPlanner, ShardSavePlanner
from pcomm.core.checkpoint.views import ShardView, StateView
from pcomm.core.errors import ConfigError, DivergenceError
from pcomm.core.tensor_parallel.split import ParamLayout

STATE = {"count": 3, "names": ["a", ("b", 1.5)], "by": {2: None}, "mean": torch.arange(3.0)}

# One process saves and loads without torch.distributed, which torch warns about each time.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


def views(holder: dict[str, Any], **options: Any) -> dict[str, ShardView]:
    like = torch.empty((), device="meta")
    return {
        key: StateView(like, ParamLayout(), 0, holder=lambda: holder, key=key, **options)
        for key in [*STATE, "gone"]
    }


@pytest.mark.parametrize("there", [{}, {"count": 1, "gone": 9, "mean": torch.zeros(3)}])
def test_every_value_comes_back(tmp_path: Path, there: dict[str, Any]) -> None:
    """Into a holder that has none of them, and into one that has others and one too many."""
    dcp.save(views(dict(STATE)), checkpoint_id=tmp_path, planner=ShardSavePlanner(), no_dist=True)
    found, mean = dict(there), there.get("mean")
    planner = ShardLoadPlanner()
    dcp.load(views(found), checkpoint_id=tmp_path, planner=planner, no_dist=True)
    planner.put()
    assert torch.equal(found.pop("mean"), STATE["mean"])
    assert mean is None or torch.equal(mean, STATE["mean"]), "a tensor that is there is filled"
    assert found == {key: value for key, value in STATE.items() if key != "mean"}


def test_an_object_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException) as caught:
        dcp.save(
            views({"count": object()}),
            checkpoint_id=tmp_path,
            planner=ShardSavePlanner(),
            no_dist=True,
        )
    error = caught.value.failures[0][0]
    assert isinstance(error, ConfigError)
    assert "count" in str(error)


def planned(holder: dict[str, Any], **options: Any) -> tuple[ShardSavePlanner, Any]:
    planner = ShardSavePlanner(is_first_rank_saved=True)
    planner.set_up_planner(views(holder, **options), None, True)
    return planner, planner.create_local_plan()


def test_values_that_must_agree_are_compared() -> None:
    planner, first = planned({"count": 3}, must_agree=True)
    planner.create_global_plan([first, planned({"count": 3}, must_agree=True)[1]])
    with pytest.raises(DivergenceError, match=r"\[3\] on rank 0, \[4\] on rank 1"):
        planner.create_global_plan([first, planned({"count": 4}, must_agree=True)[1]])


def test_values_that_may_differ_are_those_of_the_first_rank() -> None:
    planner, first = planned({"count": 3, "mean": torch.zeros(3)})
    plans, _ = planner.create_global_plan([first, planned({"count": 4, "mean": torch.ones(3)})[1]])
    assert [len(plan.items) for plan in plans] == [len(STATE) + 1, 0]
