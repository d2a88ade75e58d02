"""Training on one GPU: in registered memory, and in a CUDA graph."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from fsdp_support.trainings import on_gloo_and_nccl, one_rank_groups
from pcomm.core.groups.group import Group
from pcomm.core.groups.open_groups import Groups
from pcomm.core.memory.pool_backends import FakePools, NcclPools
from pcomm.core.memory.pools import PoolRegistry, State
from pcomm.fsdp._fully_shard import fully_shard
from pcomm.fsdp.settings import Precision, Roles

# -- training in registered memory on one rank, whose groups have communicators all the same ----

# The case on NCCL has never run: no GPU was at hand. The same code runs on gloo and fake pools.

LEARNING_RATE, STEPS = 0.1, 3


def model_of(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())]
    return nn.Sequential(*layers).to(device)


def inputs(step: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 8, generator=generator, dtype=torch.float64).to(device)


def unsharded(device: torch.device) -> dict[str, Tensor]:
    """The same arithmetic by hand: weights in fp32, computed with in fp64."""
    main = model_of(device)
    for step in range(STEPS):
        whole = copy.deepcopy(main).double()
        whole(inputs(step, device)).square().mean().backward()
        with torch.no_grad():
            for mine, computed in zip(main.parameters(), whole.parameters(), strict=True):
                assert computed.grad is not None
                mine.sub_(LEARNING_RATE * computed.grad.float())
    return main.state_dict()


@on_gloo_and_nccl
def test_both_roles_are_registered_and_training_is_that_of_one_process(
    tmp_path: Path, kind: str
) -> None:
    device = torch.device("cuda", 0) if kind == "nccl" else torch.device("cpu")
    if kind == "nccl":
        torch.cuda.set_device(device)
    with one_rank_groups(kind, tmp_path) as groups:
        gather, reduce = groups["dp", "gather"], groups["dp", "reduce"]
        backend = NcclPools(gather) if kind == "nccl" else FakePools()
        registry = PoolRegistry(groups, Group("dp", (0,), None, role="control"), backend)
        model = model_of(device)
        sharded = fully_shard(
            model,
            Roles(gather, reduce),
            units=[nn.Linear],
            precision=Precision(torch.float64),
            pools=registry,
        )
        bindings = registry.bindings
        assert [binding.group for binding in bindings] == ["dp[gather]", "dp[reduce]"]
        assert all(binding.state is State.BOUND for binding in bindings)
        segments = [backend.segments(binding.arena.pool) for binding in bindings]
        optimizer = torch.optim.SGD(sharded.parameters(), lr=LEARNING_RATE)
        for step in range(STEPS):
            sharded.zero_grad()
            model(inputs(step, device)).square().mean().backward()
            optimizer.step()
        found = sharded.full_state_dict()
        for name, value in unsharded(device).items():
            # fp32 weights after a few steps; gradients are computed in fp64.
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7, msg=name)
        assert [backend.segments(binding.arena.pool) for binding in bindings] == segments
        groups.close()
        assert [binding.state for binding in bindings] == [State.UNBOUND] * 2


# -- a whole training step in a CUDA graph: forward, backward and optimizer, replayed -----------

# The captured case has never run: no GPU was at hand. The same code runs step by step on gloo.

ROWS, WIDTH, WARM_STEPS = 4, 16, 3
RATE = 0.05


def batch(step: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def trained(groups: Groups, device: torch.device, *, is_captured: bool) -> dict[str, Tensor]:
    """Parameters after all steps, of which the last ones are replayed."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).to(device)
    roles = Roles(groups["dp", "gather"], groups["dp", "reduce"])
    # Another dtype to compute in: with one rank and one dtype nothing would be gathered.
    sharded = fully_shard(model, roles, units=[nn.Linear], precision=Precision(torch.float64))
    optimizer = torch.optim.SGD(sharded.parameters(), lr=RATE)
    x = torch.empty(ROWS, WIDTH, device=device)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    def run(steps: range, do: Callable[[], None]) -> None:
        for index in steps:
            x.copy_(batch(index))
            do()

    if is_captured:
        # Records the schedule, and lets libraries allocate what a capture must not.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run(range(WARM_STEPS), step)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        run(range(WARM_STEPS, WARM_STEPS + STEPS), graph.replay)
    else:
        run(range(WARM_STEPS + STEPS), step)
    return sharded.full_state_dict()


@on_gloo_and_nccl
def test_a_replayed_step_trains_as_a_step_does(tmp_path: Path, kind: str) -> None:
    device = torch.device("cuda", 0) if kind == "nccl" else torch.device("cpu")
    if kind == "nccl":
        torch.cuda.set_device(device)
    expected = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    with one_rank_groups(kind, tmp_path) as groups:
        found = trained(groups, device, is_captured=kind == "nccl")
    torch.manual_seed(0)
    for layer in expected:
        assert isinstance(layer, nn.Linear)
        layer.reset_parameters()
    main = list(expected.parameters())
    for index in range(WARM_STEPS + STEPS):
        whole = [p.detach().double().requires_grad_() for p in main]
        y = batch(index).double()
        for weight, bias in zip(whole[::2], whole[1::2], strict=True):
            y = y @ weight.t() + bias
        gradients = torch.autograd.grad(y.square().mean(), whole)
        with torch.no_grad():
            for p, gradient in zip(main, gradients, strict=True):
                p.sub_(RATE * gradient.float())
    for (name, value), p in zip(found.items(), main, strict=True):
        # fp32 weights after a few steps; all else is computed in fp64.
        torch.testing.assert_close(value.cpu(), p.detach(), rtol=1e-6, atol=1e-7, msg=name)
