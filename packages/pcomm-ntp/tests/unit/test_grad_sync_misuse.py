"""Calls and changes that `GradSync` refuses while it is in use."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from ntp_support.refusals import refused
from ntp_support.sync_alone import sync_alone
from ntp_support.virtual_groups import run_on_virtual_groups
from pcomm.core.collectives import Call, InstrumentedCollectives, Pending
from pcomm.core.errors import ClosedError, ConfigError, PeerError, UnsupportedError
from pcomm.core.groups.open_groups import Groups
from pcomm.core.topology import Topology
from pcomm.ntp import Failures, GradSync, Units, grad_groups, plan


def test_calls_in_another_order_are_refused() -> None:
    model = nn.Linear(2, 1)
    sync, x = sync_alone(model), torch.ones(1, 2)
    refused(ConfigError, "no last micro-batch", sync.finish)
    with pytest.raises(ConfigError, match="outside of accumulate"):
        model(x).sum().backward()
    sync.zero_grad()
    with sync.accumulate(is_last=False):
        model(x).sum().backward()
        with pytest.raises(ConfigError, match="around it"), sync.accumulate():
            pass
    for call in (sync.grad_norm, lambda: sync.clip_grad_norm_(1.0)):
        refused(ConfigError, "not summed", call)
    with sync.accumulate():
        model(x).sum().backward()
    with pytest.raises(ConfigError, match="last micro-batch has been"), sync.accumulate():
        pass
    refused(ConfigError, "about to be summed", sync.zero_grad)
    sync.finish()
    assert torch.equal(model.weight.grad, torch.full((1, 2), 2.0))
    refused(ConfigError, "summed already", sync.finish)
    with pytest.raises(ConfigError, match="before the first backward"), sync.accumulate():
        pass
    sync.clip_grad_norm_(1.0)
    with pytest.raises(ConfigError, match="before the first backward"), sync.accumulate():
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

    refused(ConfigError, "second gradient", step)
    for call in (sync.finish, sync.zero_grad):
        refused(ClosedError, "in flight", call)


@pytest.mark.parametrize("how", ["written", "replaced", "dropped", "a second backward", "a hook"])
def test_a_gradient_that_changes_after_its_sum_began_is_refused(how: str) -> None:
    """The sum would be written over the change."""
    model = nn.Linear(2, 1)
    sync, x = sync_alone(model), torch.ones(1, 2)
    if how == "a hook":

        def double(parameter: Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad *= 2

        model.weight.register_post_accumulate_grad_hook(double)
    with sync.accumulate():
        model(x).sum().backward()
    gradient = model.weight.grad
    assert gradient is not None
    match how:
        case "written":
            gradient.mul_(0.5)
        case "replaced":
            model.weight.grad = gradient.clone()
        case "dropped":
            model.zero_grad()
        case "a second backward":
            with pytest.raises(ConfigError, match="outside of accumulate"):
                model(x).sum().backward()
    refused(ConfigError, r"'(weight|bias)' that was changed", sync.finish)
    refused(ClosedError, "in flight", sync.zero_grad)


def test_gradients_that_change_between_micro_batches_are_summed_as_they_are() -> None:
    model = nn.Linear(2, 1, bias=False)
    sync, x = sync_alone(model), torch.tensor([[1.0, 2.0]])
    with sync.accumulate(is_last=False, weight=0.5):
        model(x).backward()
    assert model.weight.grad is not None
    model.weight.grad.mul_(8)
    with sync.accumulate(weight=2.0):
        model(x).backward()
    sync.finish()
    # 8 * 0.5 + 2 times x.
    assert model.weight.grad.tolist() == [[6.0, 12.0]]
    sync.zero_grad()
    with sync.accumulate(is_last=False):
        model(x).backward()
    model.zero_grad()
    with sync.accumulate():
        model(x).backward()
    sync.finish()
    assert model.weight.grad.tolist() == [[1.0, 2.0]]


@pytest.mark.parametrize("when", ["before it was made", "last step, clipped", "last step, halved"])
def test_a_gradient_that_is_there_before_a_step_is_refused(when: str) -> None:
    """It would be summed with those of the step: that of the last step once for each replica."""
    model, x = nn.Linear(2, 1), torch.ones(1, 2)
    if when == "before it was made":
        model(x).sum().backward()
    sync = sync_alone(model)
    if when.startswith("last step"):
        with sync.accumulate():
            model(x).sum().backward()
        sync.finish()
        for parameter in model.parameters():
            if when.endswith("clipped"):
                nn.utils.clip_grad_norm_(parameter, 0.1)
            else:
                assert parameter.grad is not None
                parameter.grad.mul_(0.5)
    with pytest.raises(ConfigError, match="before the first backward"), sync.accumulate():
        pass
    sync.zero_grad()
    with sync.accumulate():
        model(x).sum().backward()
    sync.finish()
    assert torch.equal(model.weight.grad, torch.ones(1, 2))


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
        refused(PeerError, "rank 1", sync.finish)
        with pytest.raises(ClosedError, match="in flight"), sync.accumulate():
            pass
        groups.abandon()
        refused(ClosedError, "was closed", sync.zero_grad)

    run_on_virtual_groups(made.topology, grad_groups(made), task)


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
        refused(UnsupportedError, "GradSync", copied, sync)
    copy.deepcopy(model)(torch.ones(1, 2)).sum().backward()
