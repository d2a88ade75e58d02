"""Forwards and backwards in any order train as with FSDP2 and in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2

from fsdp_support.trainings import (
    STRATEGIES,
    ZERO,
    check_gradients,
    open_two,
    replicated,
    shard,
)
from pcomm.core.groups.open_groups import Groups
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.trace.recording import Recorder, traced
from pcomm.fsdp._fully_shard import fully_shard
from pcomm.fsdp.runtime.peers import ScheduleAgreement
from pcomm.fsdp.settings import CommPolicy
from pcomm.fsdp.sharded import Sharded

# B batch, D model dim

# Each program repeats itself within four steps, but for those that take parts out step by step.
STEPS = 4


class Net(nn.Module):
    """Four layers, of which some may be left out, and two heads, of which one is used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(5, 5))
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.heads = nn.ModuleList(nn.Linear(5, 3 + i) for i in range(2))

    def forward(
        self, x_BD: Tensor, *, head: int = 0, dropped: Sequence[int] = (), predicts: bool = False
    ) -> Tensor:
        x_BD = x_BD @ self.table
        for number, layer in enumerate(self.layers):
            if number not in dropped:
                x_BD = x_BD + torch.tanh(layer(x_BD))
        y_BD: Tensor = self.heads[head](x_BD)
        return y_BD.argmax(-1) if predicts else y_BD


def batch(step: int, number: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * number + rank)
    return torch.randn(3, 5, generator=generator, dtype=torch.float64)


def loss(net: Net, step: int, number: int, rank: int, **options: object) -> Tensor:
    y_BD: Tensor = net(batch(step, number, rank), **options)
    return y_BD.square().mean()


# -- what one step does, with a rank's batches; `share` is that of the rank in the loss -----------


def one_loss_of_two(net: Net, step: int, rank: int, share: float) -> None:
    both = loss(net, step, 0, rank) + 2 * loss(net, step, 1, rank)
    (both * share).backward()


def forwards_of_any_number(net: Net, step: int, rank: int, share: float) -> None:
    each = [loss(net, step, i, rank) for i in range(1 + step % 3)]
    (torch.stack(each).sum() * share).backward()


def two_losses(net: Net, step: int, rank: int, share: float) -> None:
    first, second = (loss(net, step, i, rank) * share for i in range(2))
    if step % 3 == 2:
        first, second = second, first
    first.backward()
    second.backward()


def look_between(net: Net, step: int, rank: int, share: float) -> None:
    found = loss(net, step, 0, rank) * share
    with torch.no_grad():
        loss(net, step, 1, rank, head=step % 2)
    found.backward()


def predict_first(net: Net, step: int, rank: int, share: float) -> None:
    net(batch(step, 1, rank), predicts=True)
    (loss(net, step, 0, rank) * share).backward()
    net(batch(step, 1, rank), predicts=True)


def loss_that_is_only_read(net: Net, step: int, rank: int, share: float) -> None:
    for number in range(step % 3):
        loss(net, step, number, rank).item()
    (loss(net, step, 0, rank) * share).backward()
    # Old when the optimizer has stepped.
    loss(net, step, 1, rank).item()


def dropped_layers(net: Net, step: int, rank: int, share: float) -> None:
    dropped = [(), (1,), (2, 3), (0,), (0, 1, 2, 3), (1,)][step % 6]
    (loss(net, step, 0, rank, dropped=dropped) * share).backward()


def alternating_heads(net: Net, step: int, rank: int, share: float) -> None:
    (loss(net, step, 0, rank, head=step % 2) * share).backward()


def a_head_now_and_then(net: Net, step: int, rank: int, share: float) -> None:
    (loss(net, step, 0, rank, head=int(step in (1, 4, 5))) * share).backward()


def both_heads(net: Net, step: int, rank: int, share: float) -> None:
    total = loss(net, step, 0, rank, head=0) + loss(net, step, 1, rank, head=1, dropped=(2,))
    (total * share).backward()


def input_of_itself(net: Net, step: int, rank: int, share: float) -> None:
    y_BD = net(batch(step, 0, rank))
    again = torch.cat([y_BD, y_BD[:, :2]], dim=1)
    (net(again).square().mean() * share).backward()


Program = Callable[[Net, int, int, float], None]
EVERY: tuple[Program, ...] = (
    *(one_loss_of_two, forwards_of_any_number, two_losses, look_between, predict_first),
    *(loss_that_is_only_read, dropped_layers, alternating_heads, a_head_now_and_then),
    *(both_heads, input_of_itself),
)
PROGRAMS = {one.__name__: one for one in EVERY}


def shard_net(net: Net, groups: Groups, strategy: str = "zero3", **options: object) -> Sharded:
    return shard(net, groups, units=[nn.Linear], reshard=STRATEGIES[strategy], **options)


def pair(model: nn.Module, other: nn.Module, **options: float) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(one.parameters(), lr=0.1, **options) for one in (model, other)]


def step_all(optimizers: list[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def with_fsdp2(program: Program, rank: int) -> dict[str, Tensor]:
    net = Net().double()
    mesh = init_device_mesh("cpu", (2,))
    units = [fsdp2(unit, mesh=mesh) for unit in (*net.layers, *net.heads, net)]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
    for step in range(STEPS):
        program(net, step, rank, 1.0)
        for unit in units:
            # What a forward without backward has left gathered would be used again, old.
            unit.reshard()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.full_tensor() for name, p in net.named_parameters()}  # type: ignore[attr-defined]


def do_both(program: Program, net: Net, reference: Net, step: int, rank: int) -> None:
    """On this rank, and in one process on the batches of both."""
    program(net, step, rank, 1.0)
    for r in (0, 1):
        program(reference, step, r, 0.5)


def check(found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    for name, value in expected.items():
        message = f"{what}: {name}"
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11, msg=message)


LONG = {"dropped_layers", "a_head_now_and_then"}
# Where gradients are reduced or kept differently only between micro-batches, and here each is the
# last one: what is left are forwards without a backward.
AMONG_THEM = ("look_between", "loss_that_is_only_read", "two_losses")
# Torch's own is beside one process where backwards and forwards are mixed most.
WITH_FSDP2 = {"one_loss_of_two", "two_losses", "loss_that_is_only_read", "input_of_itself"}


# Where nothing is dropped between forward and backward, those that leave parts out or use them
# twice, too; the long form has all programs.
WITH_ZERO1 = (*AMONG_THEM, "dropped_layers", "both_heads", "input_of_itself")
NAMES = {
    **dict.fromkeys(STRATEGIES, AMONG_THEM),
    "zero3": tuple(PROGRAMS),
    "zero1": WITH_ZERO1,
}


@pytest.mark.parametrize(
    ("strategy", "names"),
    [
        *(pytest.param(*one, id=one[0]) for one in NAMES.items()),
        pytest.param(
            "zero1",
            tuple(name for name in PROGRAMS if name not in WITH_ZERO1),
            id="zero1, the others",
            marks=pytest.mark.soak,
        ),
    ],
)
@ranks(2)
def test_parameters_are_those_of_fsdp2_and_of_one_process(
    rank: int, strategy: str, names: tuple[str, ...]
) -> None:
    with open_two() as groups:
        for number, name in enumerate(names):
            program, steps = PROGRAMS[name], 6 if name in LONG else STEPS
            net, reference = Net().double(), Net().double()
            comm = CommPolicy(prefetch=number % 3, inflight_reduce=1 + number % 2)
            sharded = shard_net(net, groups, strategy, comm=comm)
            optimizers = pair(net, reference, momentum=0.5)
            for step in range(steps):
                do_both(program, net, reference, step, rank)
                gradients = sharded.full_gradients()
                for key, parameter in reference.named_parameters():
                    # A unit that took no part has none, as in plain torch.
                    assert (key in gradients) == (parameter.grad is not None), (name, step, key)
                step_all(optimizers)
            state = sharded.full_state_dict()
            check(state, {k: p.detach() for k, p in reference.named_parameters()}, name)
            if strategy == "zero3" and name in WITH_FSDP2:
                check(state, with_fsdp2(program, rank), f"{name}, FSDP2")
            assert sharded.memory()["gradients"] == 0


# -- what is left to the last micro-batch ------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_units_that_the_last_micro_batch_leaves_out(rank: int, strategy: str) -> None:
    """Their gradients of the micro-batches before are reduced, and summed over replicas."""
    for sizes in ((2, 1), (1, 2)):
        with replicated(*sizes) as roles:
            net, reference = Net().double(), Net().double()
            sharded = fully_shard(net, roles, units=[nn.Linear], reshard=STRATEGIES[strategy])
            for step in range(3):
                for number, (head, dropped) in enumerate([(0, ()), (1, (1,)), (1, (0, 2))]):
                    with sharded.accumulate(is_last=number == 2):
                        loss(net, step, number, rank, head=head, dropped=dropped).backward()
                    for r in (0, 1):
                        part = loss(reference, step, number, r, head=head, dropped=dropped)
                        (part / 2).backward()
                check_gradients(sharded, reference, f"{sizes}, step {step}")
                sharded.zero_grad()
                reference.zero_grad()


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_a_backward_is_the_last_one_by_what_holds_when_it_begins(rank: int, strategy: str) -> None:
    """Each forward runs as that of a last micro-batch, and one of the two backwards is not."""
    with replicated(1, 2) as roles:
        assert roles.replicate is not None
        recorder = Recorder(rank)
        roles.replicate.collectives = traced(
            roles.replicate.collectives, recorder, group="rep", role="replicate"
        )
        net, reference = Net().double(), Net().double()
        sharded = fully_shard(net, roles, units=[nn.Linear], reshard=STRATEGIES[strategy])
        for step in range(3):
            sums = []
            for number in range(2):
                found = loss(net, step, number, rank)
                recorder.clear()
                with sharded.accumulate(is_last=number == 1):
                    found.backward()
                sums.append(sum(event.is_communication for event in recorder.events))
                for r in (0, 1):
                    (loss(reference, step, number, r) / 2).backward()
            check_gradients(sharded, reference, f"step {step}")
            assert sums[0] == 0
            assert sums[1] > 0
            sharded.zero_grad()
            reference.zero_grad()


@pytest.mark.parametrize("strategy", ["zero2", "zero1"])
@ranks(2)
def test_a_layer_that_was_gathered_ahead_and_is_used_a_micro_batch_later(
    rank: int, strategy: str
) -> None:
    """It stays gathered, and its gather has ended before it is used."""
    with open_two() as groups:
        net, reference = Net().double(), Net().double()
        comm = CommPolicy(prefetch=2)
        sharded = shard_net(net, groups, strategy, comm=comm)
        optimizers = pair(net, reference)
        for step, dropped in enumerate([(), (1, 2), (2, 3), (0, 1)]):
            for number, left_out in enumerate((dropped, ())):
                with sharded.accumulate(is_last=number == 1):
                    loss(net, step, number, rank, dropped=left_out).backward()
                for r in (0, 1):
                    (loss(reference, step, number, r, dropped=left_out) / 2).backward()
            step_all(optimizers)
        state = {name: p.detach() for name, p in reference.named_parameters()}
        check(sharded.full_state_dict(), state, strategy)


@ranks(2)
def test_replicas_sum_once_what_is_reduced_twice(rank: int) -> None:
    """A backward of two forwards that was never seen before, and one that was."""
    with replicated(1, 2) as roles:
        for program in (one_loss_of_two, both_heads, two_losses):
            net, reference = Net().double(), Net().double()
            sharded = fully_shard(net, roles, units=[nn.Linear])
            for step in range(3):
                do_both(program, net, reference, step, rank)
                check_gradients(sharded, reference, str(step))


@pytest.mark.parametrize("strategy", ZERO)
@ranks(2)
def test_zero_grad_forgets_what_was_left_over(rank: int, strategy: str) -> None:
    with open_two() as groups:
        net, reference = Net().double(), Net().double()
        sharded = shard_net(net, groups, strategy)
        with sharded.accumulate(is_last=False):
            loss(net, 0, 0, rank, head=0).backward()
        sharded.zero_grad()
        loss(net, 0, 1, rank, head=1).backward()
        for r in (0, 1):
            (loss(reference, 0, 1, r, head=1) / 2).backward()
        check_gradients(sharded, reference)
        used = {k for k, p in reference.named_parameters() if p.grad is not None}
        assert sharded.full_gradients().keys() == used


# -- autocast ----------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["zero3", "zero1"])
@ranks(2)
def test_micro_batches_within_one_autocast_region(rank: int, strategy: str) -> None:
    """The weights that autocast keeps are those of one forward. Two ranks: sums have one order."""
    mesh = init_device_mesh("cpu", (2,))
    theirs = Net()
    for unit in (*theirs.layers, *theirs.heads, theirs):
        fsdp2(unit, mesh=mesh)
    with open_two() as groups:
        ours = Net()
        sharded = shard_net(ours, groups, strategy)
        optimizers = pair(theirs, ours)
        for step in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                for number in range(2):
                    x_BD = batch(step, number, rank).float()
                    with torch.no_grad():
                        ours(x_BD)
                    theirs(x_BD).float().square().mean().backward()
                    with sharded.accumulate(is_last=number == 1):
                        ours(x_BD).float().square().mean().backward()
            step_all(optimizers)
        state = sharded.full_state_dict()
        for name, value in theirs.named_parameters():
            expected = value.full_tensor()  # type: ignore[attr-defined]
            # Gradients of micro-batches are added before or after the sum over ranks.
            torch.testing.assert_close(state[name], expected, rtol=1e-5, atol=1e-6, msg=name)


# -- how often ranks have to agree -------------------------------------------------------------


@ranks(2)
def test_ranks_agree_only_about_what_is_new(rank: int) -> None:
    """A step that was seen before asks nothing of the store."""
    number = 0
    agree = ScheduleAgreement.agree

    def counted(self: ScheduleAgreement, place: int, text: str) -> None:
        nonlocal number
        number += 1
        agree(self, place, text)

    def agreements(net: Net, *, head: int = 0, dropped: Sequence[int] = ()) -> int:
        before = number
        loss(net, 0, 0, rank, head=head, dropped=dropped).backward()
        return number - before

    ScheduleAgreement.agree = counted  # type: ignore[method-assign]
    try:
        for checks in (True, False):
            with open_two() as groups:
                net = Net().double()
                shard_net(net, groups, comm=CommPolicy(checks_first_step=checks))
                # Each use of six units forward and backward, and what was recorded.
                assert agreements(net) == (12 + 1 if checks else 1)
                assert agreements(net) == 0
                # The layer is left out of backward too, without a word.
                assert agreements(net, dropped=(1,)) == 1
                assert agreements(net) in (0, 1)
                heads = [agreements(net, head=step % 2) for step in range(8)]
                assert heads[-4:] == [0, 0, 0, 0], heads
                # A forward without its backward is new; ranks agree about it when the next begins.
                loss(net, 0, 0, rank)
                assert agreements(net) >= 1
    finally:
        ScheduleAgreement.agree = agree  # type: ignore[method-assign]
