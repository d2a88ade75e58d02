"""Plans, models, groups and arguments that `GradSync` refuses, on every rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ntp_support.refusals import refused
from ntp_support.sync_alone import sync_alone
from ntp_support.tagged_sums import TaggedModel, tagged_units
from ntp_support.virtual_groups import run_on_virtual_groups
from pcomm.core.errors import (
    ConfigError,
    DivergenceError,
    LayoutError,
    PcommError,
    PeerError,
    TopologyError,
)
from pcomm.core.groups.open_groups import Groups
from pcomm.core.layout import Layout
from pcomm.core.tensor_parallel import ParamLayout
from pcomm.core.topology import Topology
from pcomm.ntp import Coord, Failures, GradSync, Units, grad_groups, plan

PAIR = Topology({"dp": 2, "tp": 2})
GONE = Failures.at(Coord(dp=1, tp=1))


def errors_of(task: Callable[[int, Groups], object]) -> dict[int, PcommError]:
    """The error of each rank of a damaged pair of groups."""
    damaged = PAIR.with_failed({3})
    specs = grad_groups(plan(PAIR, GONE, tagged_units()))

    def run(rank: int, groups: Groups) -> PcommError:
        with pytest.raises(PcommError) as caught:
            task(rank, groups)
        return caught.value

    return run_on_virtual_groups(damaged, specs, run)


def test_plans_that_differ_are_an_error_that_names_the_first_field() -> None:
    def task(rank: int, groups: Groups) -> None:
        units = tagged_units()
        if rank == 1:
            units["*.fc2.weight"] = Units.columns(22)
        made = plan(PAIR, GONE, units)
        GradSync(made, TaggedModel(made, rank), groups, rank=rank)

    for error in errors_of(task).values():
        assert isinstance(error, DivergenceError)
        assert "units of *.fc2.weight" in error.found


@pytest.mark.parametrize(
    ("options", "told"),
    [({"bucket_bytes": 7}, "bucket_bytes: 7"), ({"reduce_dtype": torch.float32}, "summed in")],
)
def test_arguments_that_differ_are_an_error_on_every_rank(options, told):
    def task(rank: int, groups: Groups) -> None:
        made = plan(PAIR, GONE, tagged_units())
        own = options if rank == 2 else {}
        GradSync(made, TaggedModel(made, rank), groups, rank=rank, **own)  # type: ignore[arg-type]

    for error in errors_of(task).values():
        assert isinstance(error, DivergenceError)
        assert told in error.found


@pytest.mark.parametrize("what", ["name", "shape", "frozen", "dtype"])
def test_models_that_differ_are_an_error_on_every_rank(what: str) -> None:
    def task(rank: int, groups: Groups) -> None:
        made = plan(PAIR, GONE, tagged_units())
        model = TaggedModel(made, rank)
        if rank == 2:
            match what:
                case "name":
                    model.other = nn.Parameter(torch.zeros(2))
                case "shape":
                    model.router = nn.Parameter(torch.zeros(2, 5, dtype=torch.float64))
                case "frozen":
                    model.router.requires_grad_(False)
                case "dtype":
                    model.router = nn.Parameter(model.router.float())
        GradSync(made, model, groups, rank=rank, param_layouts=model.param_layouts)

    for error in errors_of(task).values():
        assert isinstance(error, DivergenceError)
        assert "other" in error.found if what == "name" else "router" in error.found


def test_a_parameter_that_the_plan_does_not_know_is_named_on_every_rank() -> None:
    def without(rank: int, groups: Groups) -> None:
        units = tagged_units()
        del units["*.fc1.weight"]
        made = plan(PAIR, GONE, tagged_units())
        model = TaggedModel(made, rank)
        made = plan(PAIR, GONE, units)
        GradSync(made, model, groups, rank=rank)

    found = errors_of(without)
    # Both ranks of the whole group hold a part; at degree 1 the layout is that of a whole one.
    assert [type(found[rank]) for rank in (0, 1, 2)] == [LayoutError, LayoutError, PeerError]
    assert all("0.fc1.weight" in str(error) for error in found.values())

    def other(rank: int, groups: Groups) -> None:
        made = plan(PAIR, GONE, tagged_units())
        model = TaggedModel(made, rank)
        layouts = dict(model.param_layouts)
        layouts["0.fc1.weight"] = ParamLayout(Layout.even(44, made.place(rank).degree))
        GradSync(made, model, groups, rank=rank, param_layouts=layouts)

    found = errors_of(other)
    assert isinstance(found[0], LayoutError)
    assert "0.fc1.weight" in str(found[2])


def test_groups_of_another_strategy_are_refused() -> None:
    topology = Topology({"dp": 2, "tp": 3})
    made = plan(topology, Failures.at(Coord(dp=1, tp=0)), tagged_units())

    def task(rank: int, groups: Groups) -> None:
        with pytest.raises((TopologyError, PeerError), match="grad_groups"):
            GradSync(made, TaggedModel(made, rank), groups, rank=rank, strategy="gather-core")

    run_on_virtual_groups(made.topology, grad_groups(made), task)
    refused(ConfigError, "Did you mean 'gather-core'", grad_groups, made, "gather_core")


def test_an_idle_rank_is_told_so() -> None:
    topology = Topology({"dp": 2, "pp": 1, "cp": 2, "tp": 2})
    made = plan(topology, Failures.at(Coord(dp=1, pp=0, cp=0, tp=1)), tagged_units())
    (idle,) = made.idle_ranks
    for strategy in ("interval", "gather-core"):
        assert all(idle not in (spec.ranks or ()) for spec in grad_groups(made, strategy))  # type: ignore[arg-type]
    refused(ConfigError, "does not use", GradSync, made, nn.Linear(2, 2), Groups([]), rank=idle)


@pytest.mark.parametrize(
    "options",
    [{"bucket_bytes": 0}, {"reduce_dtype": torch.int32}, {"param_layouts": {"x": ParamLayout()}}],
)
def test_arguments_that_cannot_be_used(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        sync_alone(nn.Linear(2, 2), **options)


def test_a_sum_of_complex_gradients_in_a_real_type_is_refused() -> None:
    """It would drop the imaginary parts."""
    model = nn.Module()
    model.register_parameter("x", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))
    with pytest.raises(ConfigError, match="parameter 'x', which is complex"):
        sync_alone(model, param_layouts={}, reduce_dtype=torch.float32)
