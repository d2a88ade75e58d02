"""Plans, models and calls that `GradSync` refuses, and that others hear of it."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pcomm.core.collectives import Call, InstrumentedCollectives, Pending
from pcomm.core.control.control import Control
from pcomm.core.errors import (
    ClosedError,
    ConfigError,
    DivergenceError,
    LayoutError,
    PcommError,
    PeerError,
    TopologyError,
    UnsupportedError,
)
from pcomm.core.groups.closing import Closing
from pcomm.core.groups.group import Group
from pcomm.core.groups.groups import Groups
from pcomm.core.layout import Layout
from pcomm.core.tensor_parallel import ParamLayout
from pcomm.core.topology import Topology
from pcomm.ntp import Coord, Failures, GradSync, Plan, Units, grad_groups, plan
from pcomm.ntp.testing.tagged_model import TaggedModel, tagged_units, tags
from pcomm.ntp.testing.virtual_groups import run_on_virtual_groups

PAIR = Topology({"dp": 2, "tp": 2})
GONE = Failures.at(Coord(dp=1, tp=1))


def alone() -> tuple[Plan, Groups]:
    """A plan of one rank, whose groups are the identity."""
    made = plan(Topology({"dp": 1, "tp": 1}), Failures.at(), {"w": Units.columns(2)})
    control, closing = Control(None, (0,), 0), Closing()
    groups = [
        Group(spec.axes, (0,), None, closing=closing, control=control) for spec in grad_groups(made)
    ]
    return made, Groups(groups, closing=closing, control=control)


def sync_alone(model: nn.Module, **options: object) -> GradSync:
    made, groups = alone()
    return GradSync(made, model, groups, rank=0, **options)  # type: ignore[arg-type]


def errors_of(task: Callable[[int, Groups], object]) -> dict[int, PcommError]:
    """The error of each rank of a damaged pair of groups."""
    damaged = PAIR.with_failed({3})
    specs = grad_groups(plan(PAIR, GONE, tagged_units()))

    def run(rank: int, groups: Groups) -> PcommError:
        with pytest.raises(PcommError) as caught:
            task(rank, groups)
        return caught.value

    return run_on_virtual_groups(damaged, specs, run)


# -- making one ------------------------------------------------------------------------------------


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
def test_arguments_that_differ_are_an_error_on_every_rank(
    options: dict[str, object], told: str
) -> None:
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
    with pytest.raises(ConfigError, match="Did you mean 'gather-core'"):
        grad_groups(made, "gather_core")  # type: ignore[arg-type]


def test_an_idle_rank_is_told_so() -> None:
    topology = Topology({"dp": 2, "pp": 1, "cp": 2, "tp": 2})
    made = plan(topology, Failures.at(Coord(dp=1, pp=0, cp=0, tp=1)), tagged_units())
    (idle,) = made.idle_ranks
    for strategy in ("interval", "gather-core"):
        assert all(idle not in (spec.ranks or ()) for spec in grad_groups(made, strategy))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="does not use"):
        GradSync(made, nn.Linear(2, 2), Groups([]), rank=idle)


@pytest.mark.parametrize(
    "options",
    [{"bucket_bytes": 0}, {"reduce_dtype": torch.int32}, {"param_layouts": {"x": ParamLayout()}}],
)
def test_arguments_that_cannot_be_used(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        sync_alone(nn.Linear(2, 2), **options)


# -- using it --------------------------------------------------------------------------------------


def test_calls_in_another_order_are_refused() -> None:
    model = nn.Linear(2, 1)
    sync, x = sync_alone(model), torch.ones(1, 2)
    with pytest.raises(ConfigError, match="no last micro-batch"):
        sync.finish()
    with pytest.raises(ConfigError, match="outside of accumulate"):
        model(x).sum().backward()
    sync.zero_grad()
    with sync.accumulate(is_last=False):
        model(x).sum().backward()
        with pytest.raises(ConfigError, match="around it"), sync.accumulate():
            pass
    for call in (sync.grad_norm, lambda: sync.clip_grad_norm_(1.0)):
        with pytest.raises(ConfigError, match="not summed"):
            call()
    with sync.accumulate():
        model(x).sum().backward()
    with pytest.raises(ConfigError, match="last micro-batch has been"), sync.accumulate():
        pass
    with pytest.raises(ConfigError, match="about to be summed"):
        sync.zero_grad()
    sync.finish()
    assert torch.equal(model.weight.grad, torch.full((1, 2), 2.0))
    with pytest.raises(ConfigError, match="summed already"):
        sync.finish()
    with pytest.raises(ConfigError, match="of the last step"), sync.accumulate():
        pass
    sync.clip_grad_norm_(1.0)
    with pytest.raises(ConfigError, match="of the last step"), sync.accumulate():
        pass
    # As optimizers do it, either way.
    model.zero_grad(set_to_none=False)
    with sync.accumulate():
        model(x).sum().backward()
    sync.finish()
    assert torch.equal(model.weight.grad, torch.ones(1, 2))
    for weight in (-1.0, float("nan"), float("inf"), "1"):
        with pytest.raises(ConfigError, match="weight"), sync.accumulate(weight=weight):  # type: ignore[arg-type]
            pass


def test_a_second_gradient_after_its_sum_began_is_refused() -> None:
    model = nn.Linear(2, 1)
    sync, x = sync_alone(model, bucket_bytes=1), torch.ones(1, 2)

    def step() -> None:
        with sync.accumulate():
            model(x).sum().backward()
            model(x).sum().backward()

    with pytest.raises(ConfigError, match="second gradient"):
        step()
    for call in (sync.finish, sync.zero_grad):
        with pytest.raises(ClosedError, match="in flight"):
            call()


def test_an_error_before_anything_was_sent_ends_the_step_alone() -> None:
    model = nn.Linear(2, 1)
    sync, x = sync_alone(model), torch.ones(1, 2)
    with pytest.raises(ZeroDivisionError), sync.accumulate():
        1 / 0  # noqa: B018
    with pytest.raises(ConfigError, match="zero_grad"), sync.accumulate():
        pass
    sync.zero_grad()
    with sync.accumulate():
        model(x).sum().backward()
    sync.finish()
    assert torch.equal(model.weight.grad, torch.ones(1, 2))


def test_a_peer_that_fails_while_sums_are_in_flight_ends_the_object() -> None:
    """Waits go through the groups' collectives, which may be left when a rank fails."""
    topology = Topology({"dp": 2, "tp": 1})
    made = plan(topology, Failures.at(), {"w": Units.columns(2)})

    class Failing(InstrumentedCollectives):
        def start(self, call: Call) -> Pending:
            result = self.inner.run(call)

            def leave() -> Tensor:
                raise PeerError("wait", found="rank 1", why="gone", fix="again")

            return Pending(leave) if call.x.numel() > 2 else Pending.ready(result)

    def task(rank: int, groups: Groups) -> None:
        model = nn.Linear(2, 1)
        failing = groups.with_collectives(lambda group: Failing(group.collectives))
        sync = GradSync(made, model, failing, rank=rank)
        with sync.accumulate():
            model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(PeerError, match="rank 1"):
            sync.finish()
        with pytest.raises(ClosedError, match="in flight"), sync.accumulate():
            pass
        groups.abandon()
        with pytest.raises(ClosedError, match="was closed"):
            sync.zero_grad()

    run_on_virtual_groups(made.topology, grad_groups(made), task)


def test_sparse_gradients_become_dense() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    sync = sync_alone(model)
    for is_last in (False, True):
        with sync.accumulate(is_last=is_last, weight=1.0 + is_last):
            model(torch.tensor([1, 1, 3])).sum().backward()
    sync.finish()
    expected = torch.tensor([0.0, 6.0, 0.0, 3.0])[:, None].expand(4, 2)
    assert torch.equal(model.weight.grad, expected)


@pytest.mark.parametrize("what", ["added", "replaced", "removed", "frozen", "converted"])
def test_a_model_that_changed_is_refused(what: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    sync = sync_alone(model)
    match what:
        case "added":
            model.extra = nn.Parameter(torch.zeros(1))
        case "replaced":
            model[1].weight = nn.Parameter(torch.zeros(1, 2))
        case "removed":
            del model[1]
        case "frozen":
            model[1].weight.requires_grad_(False)
        case "converted":
            model[1].double()
    with pytest.raises(ConfigError, match=r"extra|1\.weight|1\.bias"), sync.accumulate():
        pass


def test_it_is_neither_copied_nor_pickled_and_a_copied_model_has_no_hooks() -> None:
    model = nn.Linear(2, 1)
    sync = sync_alone(model)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(UnsupportedError, match="GradSync"):
            copied(sync)
    copy.deepcopy(model)(torch.ones(1, 2)).sum().backward()


def test_hooks_end_with_it_with_its_groups_and_with_the_last_reference() -> None:
    for end in ("close", "groups", "abandon", "drop"):
        model = nn.Linear(2, 1)
        made, groups = alone()
        sync = GradSync(made, model, groups, rank=0)
        alive = weakref.ref(sync)
        match end:
            case "close":
                sync.close()
                sync.close()
                assert groups._closing.take_all() == []
            case "groups":
                groups.close()
            case "abandon":
                groups.abandon()
        if end != "drop":
            for call in (sync.finish, sync.zero_grad, sync.grad_norm):
                with pytest.raises(ClosedError):
                    call()
            del call
        del sync
        assert alive() is None, end
        model(torch.ones(1, 2)).sum().backward()
        assert not (end != "drop" and model.weight._post_accumulate_grad_hooks)


def test_gradients_of_a_compiled_model_are_summed() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    plain = copy.deepcopy(model)
    sync = sync_alone(model, bucket_bytes=1)
    compiled, x = torch.compile(model, backend="aot_eager"), torch.ones(2, 3)
    for turn, weight in enumerate((1.0, 0.5)):
        with sync.accumulate(is_last=turn == 1, weight=weight):
            compiled(x).sum().backward()
        (plain(x).sum() * weight).backward()
    sync.finish()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_a_backward_that_is_differentiated_again() -> None:
    """Sums are written into gradients that belong to a graph, and are not part of it."""
    model = nn.Linear(2, 1)
    sync, x = sync_alone(model, bucket_bytes=1), torch.ones(1, 2)
    y = model(x)
    with sync.accumulate(weight=0.5), pytest.warns(UserWarning, match="reference cycle"):
        y.square().sum().backward(create_graph=True)
    sync.finish()
    assert model.bias.grad is not None
    assert torch.equal(model.bias.grad, y.detach()[0])
    # Or parameters and gradients keep each other.
    sync.zero_grad()


def test_gradients_that_a_caller_asks_for_have_no_weight() -> None:
    """Those of `autograd.grad`, in a micro-batch of another weight than the first, and after it."""
    model, asked = nn.Linear(2, 1, bias=False), []
    sync, x = sync_alone(model, param_layouts={}), torch.tensor([4.0, 8.0])
    with sync.accumulate(is_last=False, weight=0.5):
        model(x).backward()
    with sync.accumulate(weight=0.25):
        asked += torch.autograd.grad(model(x), model.weight)
        model(x).backward()
    sync.finish()
    asked += torch.autograd.grad(model(x), model.weight)
    assert [gradient.tolist() for gradient in asked] == 2 * [[[4.0, 8.0]]]
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[3.0, 6.0]]


def test_dropped_gradients_inference_mode_and_parameters_that_are_frozen_meanwhile() -> None:
    model = nn.Linear(2, 1)
    sync = sync_alone(model, param_layouts={})
    with sync.accumulate():
        (model.weight * torch.tensor([3.0, 4.0])).sum().backward()
    with torch.inference_mode():
        sync.finish()
        assert float(sync.clip_grad_norm_(1.0)) == 5.0
    assert model.bias.grad is not None
    assert not model.bias.grad.is_inference()
    model.bias.grad = None
    assert float(sync.clip_grad_norm_(1.0)) == pytest.approx(1.0)
    # A parameter that was frozen meanwhile is named, and not torch's internals.
    sync.zero_grad()
    with sync.accumulate(is_last=False):
        model(torch.ones(2)).backward()
    model.bias.requires_grad_(False)
    with pytest.raises(ConfigError, match="'bias'"), sync.accumulate(weight=0.5):
        pass


def test_the_norm_of_complex_gradients_is_not_rounded_as_it_grows() -> None:
    model = nn.Module()
    model.register_parameter("x", nn.Parameter(torch.zeros(300_000, dtype=torch.complex64)))
    generator = torch.Generator().manual_seed(0)
    parts = torch.randint(-20, 21, (2, 300_000), generator=generator).float()
    upstream = torch.complex(*parts)
    sync = sync_alone(model, param_layouts={})
    with sync.accumulate():
        (model.x * upstream).sum().real.backward()
    sync.finish()
    expected = float(upstream.to(torch.complex128).abs().square().sum().sqrt())
    assert float(sync.grad_norm()) == pytest.approx(expected, rel=1e-6)


def test_the_store_is_enough_to_agree() -> None:
    """No process group of torch is begun: recovery makes groups without one."""
    assert not dist.is_initialized()
    sync_alone(nn.Linear(2, 1)).close()
    assert tags(0).keys() == tags(1).keys()
