"""A whole training step in a CUDA graph: forward, backward and optimizer, replayed.

The captured case has never run: no GPU was at hand. The same code runs step by step on gloo.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from fsdp_support.trainings import on_gloo_and_nccl, one_rank_groups
from pcomm.core.groups.open_groups import Groups
from pcomm.fsdp._fully_shard import fully_shard
from pcomm.fsdp.settings import Precision, Roles

ROWS, WIDTH, WARM_STEPS, STEPS = 4, 16, 3, 3
LEARNING_RATE = 0.05


def batch(step: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def trained(groups: Groups, device: torch.device, *, is_captured: bool) -> dict[str, Tensor]:
    """Parameters after all steps, of which the last ones are replayed."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).to(device)
    roles = Roles(groups["dp", "gather"], groups["dp", "reduce"])
    # Another dtype to compute in: with one rank and one dtype nothing would be gathered.
    sharded = fully_shard(model, roles, units=[nn.Linear], precision=Precision(torch.float64))
    optimizer = torch.optim.SGD(sharded.parameters(), lr=LEARNING_RATE)
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
                p.sub_(LEARNING_RATE * gradient.float())
    for (name, value), p in zip(found.items(), main, strict=True):
        # fp32 weights after a few steps; all else is computed in fp64.
        torch.testing.assert_close(value.cpu(), p.detach(), rtol=1e-6, atol=1e-7, msg=name)
