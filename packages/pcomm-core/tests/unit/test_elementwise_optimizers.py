"""Optimizers that may be given shards, those that look at other elements; sums of squares."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pcomm.core.errors import UnsupportedError
from pcomm.core.tensor_parallel import optimizers as elementwise
from pcomm.core.tensor_parallel.optimizers import _PIECE, first_mixed, sum_of_squares


class Own(Optimizer):
    """Adds what a function makes of a gradient and the number of the step."""

    def __init__(
        self, parameters: list[Tensor], update: Callable[[Tensor, int], Tensor], lr: float = 0.1
    ) -> None:
        super().__init__(parameters, {"lr": lr})
        self.update = update

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["step"] = step = self.state[p].get("step", 0) + 1
                p.add_(self.update(p.grad, step), alpha=-group["lr"])


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is mixed is so in the first of 128 steps, but where a test says how many it wants."""
    monkeypatch.setattr(elementwise, "_STEPS", 8)


def every(steps: int) -> Callable[[Tensor, int], Tensor]:
    return lambda g, step: g * g.mean() if step % steps == 0 else g


ALONG: dict[str, tuple[Callable[[Tensor, int], Tensor], set[tuple[int, int]]]] = {
    # What is mixed, by number of dimensions and the one that is cut.
    "elementwise": (lambda g, _: g.sign(), set()),
    "drawn": (lambda g, _: g * torch.rand_like(g), set()),
    "rows": (lambda g, _: g / g.norm(dim=-1, keepdim=True), {(1, 0), (2, 1), (3, 2)}),
    "first": (lambda g, _: g - g.mean(0), {(1, 0), (2, 0), (3, 0)}),
    "all": (lambda g, _: g / g.abs().amax(), {(d, i) for d in (1, 2, 3) for i in range(d)}),
    "every 128 steps": (every(128), {(d, i) for d in (1, 2, 3) for i in range(d)}),
    # No element of another rank is looked at, but how many there are.
    "number": (lambda g, _: g / g.numel(), {(d, i) for d in (1, 2, 3) for i in range(d)}),
    "fan in": (lambda g, _: g / g.shape[-1], {(1, 0), (2, 1), (3, 2)}),
    "norm up to 100": (
        lambda g, _: g * (100 / g.norm()).clamp(max=1),
        {(d, i) for d in (1, 2, 3) for i in range(d)},
    ),
    # Its documentation says so.
    "every 129 steps": (every(129), set()),
}


@pytest.mark.parametrize("kind", ALONG)
def test_what_depends_on_other_shards(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    update, mixed = ALONG[kind]
    if "steps" in kind:
        monkeypatch.setattr(elementwise, "_STEPS", 128)
    for num_dims, dim in ((1, 0), (2, 0), (2, 1), (3, 2)):
        parameter = nn.Parameter(torch.randn([3] * num_dims))
        found = first_mixed(Own([parameter], update), {parameter: dim})
        assert (found is parameter) is ((num_dims, dim) in mixed), (num_dims, dim)
        if "steps" in kind:
            break


@pytest.mark.parametrize(("share", "is_seen"), [(1e-2, True), (1e-5, False)])
def test_how_small_a_difference_is_seen(share: float, is_seen: bool) -> None:
    """The maximum of the other elements is 8 and 1/8 times that of the first at most."""
    parameter = nn.Parameter(torch.randn(3, 4))
    optimizer = Own([parameter], lambda g, _: g * (1 + share * g.amax()))
    assert (first_mixed(optimizer, {parameter: 0}) is parameter) is is_seen


def test_a_rate_that_is_estimated_of_all_elements() -> None:
    """As Prodigy's is, from how far they went: with a factor of 1 it grows, with 0.001 not."""

    class Estimated(Optimizer):
        @torch.no_grad()
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            (group,) = self.param_groups
            group.setdefault("distance", 1e-6)
            for p in group["params"]:
                first = self.state[p].setdefault("first", p.clone())
                went = (p.grad * (first - p)).sum() / p.grad.abs().sum()
                group["distance"] = max(group["distance"], went.item())
                p.sub_(p.grad.sign(), alpha=group["lr"] * group["distance"])

    parameter = nn.Parameter(torch.randn(3, 4))
    optimizer = Estimated([parameter], {"lr": 1.0})
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    assert optimizer.param_groups[0]["lr"] == 0
    assert first_mixed(optimizer, {parameter: 0}) is parameter


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("keepdim", [False, True])
def test_state_of_rows_that_is_made_with_the_optimizer(rows: int, keepdim: bool) -> None:
    parameter = nn.Parameter(torch.randn(rows, 4))

    class Rows(Optimizer):
        @torch.no_grad()
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                squares = self.state[p]["rows"].add_(p.grad.square().mean(1, keepdim=keepdim))
                p.sub_(p.grad / squares.view(-1, 1).sqrt(), alpha=0.1)

    optimizer = Rows([parameter], {"lr": 0.1})
    optimizer.state[parameter]["rows"] = torch.zeros((rows, 1) if keepdim else rows)
    assert first_mixed(optimizer, {parameter: 0}) is None
    # Each of these rows is cut.
    assert first_mixed(optimizer, {parameter: 1}) is parameter


def test_numbers_that_are_drawn_elsewhere() -> None:
    parameter = nn.Parameter(torch.randn(3, 4))
    optimizer = Own([parameter], lambda g, _: g * random.random())
    drawn = random.getstate()
    assert first_mixed(optimizer, {parameter: 0}) is None
    assert random.getstate() == drawn

    class Noisy(Own):
        generator = torch.Generator()

        @torch.no_grad()
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                p.add_(torch.randn(p.shape, generator=self.generator), alpha=0.1)

    noisy = Noisy([parameter], lambda g, _: g)
    noisy.generator = torch.Generator().manual_seed(1)
    assert first_mixed(noisy, {parameter: 0}) is None


def test_groups_and_parameters_that_are_not_cut() -> None:
    def by_matrix(g: Tensor, _: int) -> Tensor:
        return g / g.norm() if g.dim() == 2 else g

    matrix, vector = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(4))
    optimizer = Own([vector, matrix], by_matrix)
    assert first_mixed(optimizer, {vector: 0}) is None
    assert first_mixed(optimizer, {vector: 0, matrix: 0}) is matrix


def test_nothing_of_the_optimizer_changes() -> None:
    """With a rate of zero and a scheduler, which puts its own `step` at the optimizer."""
    parameter = nn.Parameter(torch.randn(3, 4))
    optimizer = Own([parameter], lambda g, _: g / g.norm(), lr=0.0)
    optimizer.held = [parameter]  # type: ignore[attr-defined]
    calls: list[object] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before, drawn = parameter.detach().clone(), torch.random.get_rng_state()
    assert first_mixed(optimizer, {parameter: 0}) is parameter
    assert torch.equal(parameter, before)
    assert parameter.grad is None
    assert not optimizer.state
    assert not calls
    assert optimizer.held == [parameter]  # type: ignore[attr-defined]
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert scheduler.last_epoch == 0


def test_known_ones_are_not_tried_and_others_may_say_so() -> None:
    class Counted(torch.optim.SGD):
        steps = 0

        def step(self, closure: None = None) -> None:  # type: ignore[override]
            type(self).steps += 1
            super().step(closure)

    parameter = nn.Parameter(torch.randn(3, 4))
    for kind in (torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop):
        optimizer = kind([parameter])
        optimizer.__dict__.clear()
        optimizer.param_groups = [{"params": [parameter]}]
        assert first_mixed(optimizer, {parameter: 0}) is None
    assert first_mixed(Counted([parameter]), {parameter: 0}) is None
    assert Counted.steps
    # Its state is made with it.
    own = type("Own", (torch.optim.Adagrad,), {})
    assert first_mixed(own([parameter]), {parameter: 0}) is None
    for kind in (torch.optim.Muon, torch.optim.Adafactor):
        assert first_mixed(kind([parameter]), {parameter: 0}) is parameter
    lbfgs = torch.optim.LBFGS([parameter])
    with pytest.raises(UnsupportedError, match="is_elementwise = True"):
        first_mixed(lbfgs, {parameter: 0})
    lbfgs.is_elementwise = True  # type: ignore[attr-defined]
    assert first_mixed(lbfgs, {parameter: 0}) is None


CPU = torch.device("cpu")


@pytest.mark.parametrize("size", [0, 1, _PIECE - 1, _PIECE, _PIECE + 1, 3 * _PIECE, 1 << 22])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_does_not_lose_what_is_small_beside_the_sum(size: int, dtype: torch.dtype) -> None:
    values = 1e-3 * torch.randn(size, dtype=dtype, generator=torch.Generator().manual_seed(0))
    exact = float(values.double().square().sum())
    # Each piece is a norm in fp32. Added up as one, 2**22 elements are off by 1e-4.
    assert float(sum_of_squares([values], CPU)) == pytest.approx(exact, rel=1e-6)


def test_it_adds_tensors_of_every_layout_and_none() -> None:
    wide = torch.ones(3 * _PIECE, 2)
    assert not wide.T[:, ::2].is_contiguous()
    found = sum_of_squares([wide.T[:, ::2], torch.tensor(2.0), torch.empty(0)], CPU)
    assert found.dtype == torch.float64
    assert float(found) == pytest.approx(3 * _PIECE + 4, rel=1e-6)
    assert float(sum_of_squares([], CPU)) == 0.0
