"""Ranks of a session whose replicas would not stay equal, which ends them before it is too late."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from pcomm.core import Groups, Topology
from pcomm.core.errors import DivergenceError, PcommError, PeerError
from pcomm.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from pcomm.core.testing import ranks
from pcomm.ntp import Failures, NtpPlan, Session, TrainState, Units
from pcomm.ntp.redistribute import Moved
from pcomm.ntp.session import recovery
from pcomm.ntp.session import training_state as state_transfer

HIDDEN = 6
UNITS = {"*.weight": Units.columns(HIDDEN)}


class Norms(torch.optim.SGD):
    """An optimizer that divides by the norm of a gradient, under a name that no list has."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for one in group["params"]:
                one.grad.div_(one.grad.norm())
        return super().step(closure)


def layers(plan: NtpPlan, groups: Groups, rank: int, *, seed: int = 0) -> nn.Sequential:
    """Two layers that are split along either dimension, cut from whole ones of a seed."""
    place = plan.place(rank)
    layout, over = plan.layout("0.weight", place.replica), groups["tp"].collectives
    model = nn.Sequential(
        ColumnParallelLinear(3, layout, over, dtype=torch.float64),
        RowParallelLinear(layout, 2, over, dtype=torch.float64),
    )
    generator = torch.Generator().manual_seed(seed)
    for number, shape in enumerate(((HIDDEN, 3), (2, HIDDEN))):
        whole = torch.randn(shape, generator=generator, dtype=torch.float64)
        own = whole.split(layout.sizes, number)[place.index]
        model.get_parameter(f"{number}.weight").data.copy_(own)
    return model


def train(
    store, rank, build, *, axes=(2, 1), gone=(), until=3, max_norm=None, each_step=lambda _: None
):
    """Train, and return this rank's parameters."""
    topology = Topology(dict(zip(("dp", "tp"), axes, strict=True)))
    failures = Failures.from_global_ranks([*gone])
    with Session(store, topology, UNITS, build, rank=rank, failures=failures) as session:
        for attempt in session.attempts(until=until):
            with attempt as step:
                x = torch.arange(12.0, dtype=torch.float64).view(4, 3) + step.number
                each_step(session)
                step.backward(session.model(x.cos()).square().sum())
                step.commit(max_norm=max_norm)
        return {name: one.detach() for name, one in session.model.named_parameters()}


class Cases:
    """Trains again and again, each time with a store of its own."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank, self._folder, self._numbers = rank, folder, count()

    def train(self, build: Callable[[NtpPlan, Groups, int], TrainState], **options: Any) -> Any:
        path = str(self._folder / str(next(self._numbers)))
        return train(lambda: dist.FileStore(path, -1), self.rank, build, **options)

    def fails(self, match, build, **options):
        """All ranks end with an error, and one at least with this one.

        A rank that hears that another one has left while it agrees may see that first.
        """
        with pytest.raises(PcommError) as caught:
            self.train(build, **options)
        texts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(texts, f"{type(caught.value).__name__}: {caught.value}")
        assert any(re.search(match, text) for text in texts), texts


def sgd(model: nn.Module, **options: Any) -> TrainState:
    return TrainState(model, torch.optim.SGD(model.parameters(), **{"lr": 0.01, **options}))


@ranks(2)
def test_replicas_that_begin_with_other_numbers_or_settings(rank: int, tmp_path: Path) -> None:
    cases = Cases(rank, tmp_path)
    cases.train(lambda *place: sgd(layers(*place)))

    def seeded(*place: Any) -> TrainState:
        return sgd(layers(*place, seed=rank))

    cases.fails(r"DivergenceError.*units 0 to 5 of 'model.0.weight'.*ranks \[\d\]", seeded)

    def one_element(*place: Any) -> TrainState:
        model = layers(*place)
        model.get_parameter("1.weight").data[1, 2] += 1e-6 * rank
        return sgd(model)

    cases.fails("'model.1.weight'", one_element)

    cases.fails(r"lr of group 0: 0\.[12]", lambda *p: sgd(layers(*p), lr=0.1 + rank / 10))

    def other_kind(*place: Any) -> TrainState:
        model = layers(*place)
        kinds: tuple[type[torch.optim.Optimizer], ...] = (torch.optim.SGD, torch.optim.Adagrad)
        return TrainState(model, kinds[rank](model.parameters(), lr=0.01))

    cases.fails(r"optimizer: torch\.optim\.", other_kind)


@ranks(2)
def test_steps_with_other_arguments_are_applied_by_no_rank(rank: int, tmp_path: Path) -> None:
    cases, kept = Cases(rank, tmp_path), []

    def build(*place: Any) -> TrainState:
        kept.append(layers(*place))
        return sgd(kept[-1])

    for options, match in (
        ({"max_norm": 1.0 + rank}, "max_norm: 2 on one rank, 1 on another"),
        ({"max_norm": 1.0 if rank else None}, "max_norm: inf on one rank"),
        ({"until": 2 + rank}, "until: 3 on one rank, 2 on another"),
    ):
        cases.fails(match, build, **options)
        fresh = torch.randn(
            (HIDDEN, 3), generator=torch.Generator().manual_seed(0), dtype=torch.float64
        )
        assert torch.equal(kept[-1].get_parameter("0.weight"), fresh)


@ranks(2)
def test_models_of_torchs_own_parallelism_are_refused_by_name(rank: int, tmp_path: Path) -> None:
    cases, mesh = Cases(rank, tmp_path), init_device_mesh("cpu", (2,))

    def parallelized(*_: object) -> TrainState:
        model = nn.Sequential(nn.Linear(3, HIDDEN), nn.Linear(HIDDEN, 2))
        return sgd(parallelize_module(model, mesh, {"0": ColwiseParallel()}))

    cases.fails("parameter '0.weight': a DTensor, as parallelize_module", parallelized)
    cases.fails(
        "module '': a module of FSDPModule",
        lambda *_: sgd(fully_shard(nn.Linear(3, HIDDEN), mesh=mesh)),
    )
    cases.fails(
        "module '': a module of DistributedDataParallel",
        lambda *_: sgd(nn.parallel.DistributedDataParallel(nn.Linear(3, HIDDEN))),
    )


@ranks(3)
def test_replicas_of_different_degrees_that_drift_apart(rank: int, tmp_path: Path) -> None:
    cases = Cases(rank, tmp_path)
    uneven: dict[str, Any] = {"axes": (2, 2), "gone": [3]}

    def norms(*place: Any) -> TrainState:
        model = layers(*place)
        optimizer = Norms(model.parameters(), lr=0.01)
        # Not so; otherwise it is tried, and refused before its first step.
        optimizer.is_elementwise = True  # type: ignore[attr-defined]
        return TrainState(model, optimizer)

    def tried(*place: Any) -> TrainState:
        model = layers(*place)
        return TrainState(model, Norms(model.parameters(), lr=0.01))

    cases.fails(r"UnsupportedError: Session: optimizer Norms of '0.weight'", tried, **uneven)
    # The first step is applied, and compared when the second one is about to be.
    cases.train(norms, **uneven, until=1)
    cases.fails(r"trained by Norms: units \d to \d of 'model.0.weight'", norms, **uneven, until=2)
    # Elementwise ones go past a comparison of every hundredth step, too.
    recovery._DRIFT_STEPS = 3
    try:

        def adamw(*place: Any) -> TrainState:
            model = layers(*place)
            return TrainState(model, torch.optim.AdamW(model.parameters(), lr=0.05))

        cases.train(adamw, **uneven, until=5)

        def late(*place: Any) -> TrainState:
            built = norms(*place)
            # As one that takes norms only after a warm-up.
            steps, step = count(), torch.optim.SGD.step
            built.optimizer.step = lambda: (  # type: ignore[method-assign]
                Norms.step if next(steps) == 1 else step
            )(built.optimizer)
            return built

        cases.train(late, **uneven, until=3)
        cases.fails("trained by Norms", late, **uneven, until=4)
    finally:
        recovery._DRIFT_STEPS = 100

    def muon(*place: Any) -> TrainState:
        model = layers(*place)
        return TrainState(model, torch.optim.Muon(model.parameters(), lr=0.01))

    cases.fails("UnsupportedError: Session: optimizer Muon of '0.weight'", muon, **uneven)


@ranks(3)
def test_a_rank_that_lost_its_peers_ends_since_they_have_drifted_apart(rank, tmp_path):
    cases, compare = Cases(rank, tmp_path), recovery.differing_units

    def norms(*place: Any) -> TrainState:
        optimizer = Norms((model := layers(*place)).parameters(), lr=0.01)
        optimizer.is_elementwise = True  # type: ignore[attr-defined]
        return TrainState(model, optimizer)

    def lost(*arguments: Any, **options: Any) -> str | None:
        found = compare(*arguments, **options)
        if found is not None and rank == 2:
            # The others have the result first, and close their connections.
            raise PeerError("all_gather", found="a connection closed by its peer", why="", fix="")
        return found

    recovery.differing_units = lost
    try:
        with pytest.raises(DivergenceError, match="trained by Norms"):
            cases.train(norms, axes=(2, 2), gone=[3], until=2)
    finally:
        recovery.differing_units = compare


@ranks(2)
def test_a_state_that_does_not_arrive_as_it_was_is_not_taken_over(rank, tmp_path):
    cases, whole = Cases(rank, tmp_path), state_transfer.redistribute

    def spoiled(*arguments: Any, target: dict[str, Tensor], **options: Any) -> Moved:
        found = whole(*arguments, target=target, **options)
        if rank:
            target["model.1.weight"][:, 2:4] *= -1
        return found

    def slow(session: Session) -> None:
        session.set_speed(0, 0.5)

    for redistribute in (whole, spoiled):
        state_transfer.redistribute = redistribute
        try:
            if redistribute is whole:
                cases.train(lambda *place: sgd(layers(*place)), each_step=slow)
            else:
                match = "DivergenceError: Session: the state after a change of ranks"
                cases.fails(match, lambda *place: sgd(layers(*place)), each_step=slow)
        finally:
            state_transfer.redistribute = whole


@ranks(2)
def test_state_that_could_not_move_is_found_before_the_first_step(rank, tmp_path):
    cases = Cases(rank, tmp_path)

    def averaged(is_persistent: bool) -> Callable[..., TrainState]:
        def build(*place: Any) -> TrainState:
            model = layers(*place)
            copy = model.get_parameter("0.weight").detach().clone()
            model.register_buffer("average", copy, persistent=is_persistent)
            return sgd(model)

        return build

    cases.train(averaged(False), axes=(1, 2))
    # Shards of one shape, and so of no other than those of a whole tensor.
    cases.fails("'model.average'", averaged(True), axes=(1, 2))
