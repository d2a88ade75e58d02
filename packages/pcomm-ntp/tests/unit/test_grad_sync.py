"""Gradients that tell where they belong, after a sum over replicas of different degrees."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ntp_support.tagged_sums import (
    TaggedModel,
    assert_same_bits,
    calls_of,
    gradients_of,
    on_tagged_ranks,
    plan_of_degrees,
    shards_of,
    summed_gradients,
    tagged_units,
    tags,
    whole_shapes,
)
from ntp_support.virtual_groups import run_on_virtual_groups
from pcomm.core.groups.open_groups import Groups
from pcomm.core.topology import Topology
from pcomm.ntp import Coord, Failures, GradSync, NtpPlan, grad_groups, plan
from pcomm.ntp.sync.grad_groups import Strategy

STRATEGIES: tuple[Strategy, ...] = ("interval", "gather-core")
DEGREES = [(4, 3), (3, 4), (4, 2), (3, 2, 4), (2, 3, 1), (3, 2), (3, 3), (1, 1), (4,), (4, 3, 3, 2)]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_every_element_is_the_weighted_sum_of_all_replicas(degrees, strategy):
    """Bitwise: integers with weights that are powers of two. Covers every class of parameter.

    So also what the public implementation gets wrong: row-parallel weights, column-parallel ones in
    natural order, replicated ones on every rank, and units that divide by no degree.
    """
    weights = {replica: 2.0**-replica for replica in range(len(degrees))}
    expected = summed_gradients(weights)

    def task(sync: GradSync, model: TaggedModel, _: Groups) -> None:
        for bucket in range(2):
            replica = model.place.replica
            with sync.accumulate(weight=weights[replica]):
                model.loss(tags(replica)).backward()
            sync.finish()
            assert_same_bits(gradients_of(model), shards_of(model, expected))
            assert model.get_parameter("0.frozen").grad is None, bucket
            sync.zero_grad()

    # Buckets of a few parameters.
    on_tagged_ranks(plan_of_degrees(degrees), task, strategy, bucket_bytes=500)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_random_gradients_and_weights_that_round(strategy: Strategy) -> None:
    degrees, weights = (2, 3, 1), {0: 0.31, 1: 0.47, 2: 0.22}
    expected = summed_gradients(weights, seed=1)

    def task(sync: GradSync, model: TaggedModel, _: Groups) -> dict[str, Tensor]:
        replica = model.place.replica
        with sync.accumulate(weight=weights[replica]):
            model.loss(tags(replica, seed=1)).backward()
        sync.finish()
        found = gradients_of(model)
        for name, one in shards_of(model, expected).items():
            torch.testing.assert_close(found[name], one, rtol=0, atol=1e-12)
        return found

    made = plan_of_degrees(degrees)
    found = on_tagged_ranks(made, task, strategy)
    assert_same_replicas(made, found)


def assert_same_replicas(made: NtpPlan, found: dict[int, object]) -> None:
    """All replicas have the same bits: every element has one value on all of its holders."""
    whole: dict[str, dict[int, Tensor]] = {}
    for rank, one in found.items():
        assert isinstance(one, dict)
        place = made.place(rank)
        for name, shard in one.items():
            model = TaggedModel(made, rank)
            numbers = torch.arange(torch.Size(whole_shapes()[name]).numel())
            at = model.own(name, numbers.view(whole_shapes()[name])).flatten()
            into = whole.setdefault(name, {}).setdefault(
                place.replica, torch.full((len(numbers),), float("nan"), dtype=torch.float64)
            )
            into[at] = shard.flatten().double()
    for by_replica in whole.values():
        first, *others = by_replica.values()
        assert not first.isnan().any()
        assert all(torch.equal(first, other) for other in others)


def test_context_parallel_ranks_are_replicas_too() -> None:
    made = plan_of_degrees((3, 2), cp=2)
    # The group of each tensor-parallel group, by its coordinates; only dp=1, cp=0 is damaged, and
    # its whole replica has that degree.
    expected = summed_gradients({0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0})

    def task(sync: GradSync, model: TaggedModel, groups: Groups) -> int:
        everyone = groups["ntp.all"]
        at = made.topology.coordinates(everyone.ranks[everyone.rank])
        with sync.accumulate():
            model.loss(tags(2 * at["dp"] + at["cp"])).backward()
        sync.finish()
        assert_same_bits(gradients_of(model), shards_of(model, expected))
        return at["cp"]

    for strategy in STRATEGIES:
        found = on_tagged_ranks(made, task, strategy)
        assert [rank for rank, cp in found.items() if cp is None] == list(made.idle_ranks)
        assert set(found.values()) == {0, 1, None}


@pytest.mark.parametrize("gone", [[], [7]], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_groups_of_one_degree_and_different_forms(strategy: Strategy, gone: list[int]) -> None:
    """A slow rank has fewer units, so ranks at one index do not hold the same ones."""
    topology = Topology({"dp": 3, "tp": 3})
    failures = Failures.from_global_ranks(gone)
    made = plan(topology, failures, tagged_units(), speeds={0: 0.5, 8: 0.5})
    assert len({made.form(replica) for replica in range(3)}) == 3
    expected = summed_gradients({0: 1.0, 1: 0.5, 2: 0.25})

    def task(sync: GradSync, model: TaggedModel, _: Groups) -> Tensor:
        replica = model.place.replica
        with sync.accumulate(weight=0.5**replica):
            model.loss(tags(replica)).backward()
        sync.finish()
        assert_same_bits(gradients_of(model), shards_of(model, expected))
        return sync.grad_norm()

    norms = list(on_tagged_ranks(made, task, strategy, bucket_bytes=500).values())
    assert len(set(map(float, norms))) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_pipeline_stages_have_parameters_and_degrees_of_their_own(strategy: Strategy) -> None:
    """Stages sum apart, and share one norm."""
    topology = Topology({"pp": 2, "dp": 2, "tp": 3})
    made = plan(topology, Failures.at(Coord(pp=0, dp=1, tp=0)), tagged_units())
    assert made.degrees == ((3, 3), (2, 3))
    expected = summed_gradients({0: 1.0, 1: 1.0})
    squares = sum(float(one.square().sum()) for one in expected.values())
    squares -= float(expected["router"].square().sum())

    def run(rank: int, groups: Groups) -> Tensor:
        model = TaggedModel(made, rank)
        stage, replica = model.place.stage, model.place.replica
        if stage == 1:
            del model.router
        sync = GradSync(
            made,
            model,
            groups,
            rank=rank,
            strategy=strategy,
            param_layouts={n: model.param_layouts[n] for n, _ in model.named_parameters()},
        )
        upstream = tags(replica)
        if stage == 1:
            del upstream["router"]
        with sync.accumulate():
            model.loss(upstream).backward()
        sync.finish()
        for name in upstream:
            gradient = model.get_parameter(name).grad
            assert gradient is not None
            assert torch.equal(gradient, model.own(name, expected[name])), name
        return sync.grad_norm()

    norms = run_on_virtual_groups(made.topology, grad_groups(made, strategy), run)
    (norm,) = set(map(float, norms.values()))
    total = 2 * squares + float(expected["router"].square().sum())
    assert norm == pytest.approx(total**0.5, rel=1e-14)


def test_micro_batches_with_weights_of_their_own() -> None:
    """The first may have none: the factor of the others does not come from it."""
    weights = [(0.0, 0.5, 0.25), (1.0, 1.0, 2.0)]

    expected = summed_gradients(
        {r + 2 * t: w for r, turns in enumerate(weights) for t, w in enumerate(turns)}
    )

    def task(sync: GradSync, model: TaggedModel, groups: Groups) -> None:
        replica = model.place.replica
        for _ in range(2):
            before = len(calls_of(groups))
            for turn, weight in enumerate(weights[replica]):
                with sync.accumulate(is_last=turn == 2, weight=weight):
                    model.loss(tags(replica + 2 * turn)).backward()
                assert (len(calls_of(groups)) == before) is (turn < 2)
            sync.finish()
            assert_same_bits(gradients_of(model), shards_of(model, expected))
            sync.zero_grad()

    on_tagged_ranks(plan_of_degrees((3, 2)), task)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_of_16_bits_are_weighted_and_summed_in_fp32(strategy: Strategy) -> None:
    """What is sent has four bytes an element, and is rounded once, after the sum."""
    made, weights = plan_of_degrees((4, 3)), {0: 0.7, 1: 0.3}
    upstream = {
        replica: {name: one.bfloat16() for name, one in tags(replica, seed=5).items()}
        for replica in weights
    }
    # Its two halves would be rounded by autograd.
    for own_tags in upstream.values():
        own_tags["embedding.weight"].round_()
    expected = {
        name: sum((upstream[r][name].float() * w for r, w in weights.items()), torch.zeros(()))
        for name in whole_shapes()
    }

    def task(sync: GradSync, model: TaggedModel, groups: Groups) -> None:
        replica = model.place.replica
        with sync.accumulate(weight=weights[replica]):
            model.loss(upstream[replica]).backward()
        sync.finish()
        found, wanted = gradients_of(model), shards_of(model, expected)
        assert_same_bits(found, {name: one.bfloat16() for name, one in wanted.items()})
        if strategy == "interval":
            sent = sum(call.input_bytes for call in calls_of(groups))
            assert sent == 4 * sum(one.numel() for one in found.values())

    on_tagged_ranks(made, task, strategy, dtype=torch.bfloat16)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_that_one_replica_does_not_use(strategy: Strategy) -> None:
    """Its gradient is the sum of the others', and zeros if no replica uses it."""
    expected = summed_gradients({0: 1.0})
    everyone = set(whole_shapes()) - {"router"}

    def task(sync: GradSync, model: TaggedModel, _: Groups) -> None:
        used = {0: everyone, 1: set[str]()}[model.place.replica]
        with sync.accumulate():
            if used:
                model.loss({n: t for n, t in tags(0).items() if n in used}).backward()
        sync.finish()
        found = gradients_of(model)
        assert (found.pop("router") == 0).all()
        wanted = shards_of(model, expected)
        del wanted["router"]
        assert_same_bits(found, wanted)

    on_tagged_ranks(plan_of_degrees((4, 3)), task, strategy, bucket_bytes=500)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_may_arrive_in_another_order_in_each_replica(strategy: Strategy) -> None:
    """Sums start in one order all the same: here an operation ends when all have called it."""
    made, expected = plan_of_degrees((3, 2)), summed_gradients({0: 1.0, 1: 1.0})

    def task(sync: GradSync, model: TaggedModel, _: Groups) -> None:
        replica = model.place.replica
        upstream = tags(replica)
        if replica == 1:
            upstream = dict(reversed(upstream.items()))
        with sync.accumulate():
            model.loss(upstream).backward()
        sync.finish()
        assert_same_bits(gradients_of(model), shards_of(model, expected))

    on_tagged_ranks(made, task, strategy, bucket_bytes=1)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_models_over_the_same_groups_of_which_one_is_used_in_part(strategy: Strategy) -> None:
    """Sums that no gradient starts come before those of the next model, on all ranks alike."""
    made = plan_of_degrees((3, 2))
    expected = {False: summed_gradients({0: 1.0, 1: 1.0}), True: summed_gradients({0: 1.0})}

    def task(first: GradSync, model: TaggedModel, groups: Groups) -> None:
        everyone = groups["ntp.all"]
        rank, replica = everyone.ranks[everyone.rank], model.place.replica
        other = TaggedModel(made, rank)
        second = GradSync(made, other, groups, rank=rank, strategy=strategy, bucket_bytes=500)
        used = {n: t for n, t in tags(replica).items() if replica == 0 or n in ("router", "0.norm")}
        with first.accumulate():
            model.loss(used).backward()
        with second.accumulate():
            other.loss(tags(replica)).backward()
        # So does what a caller sends meanwhile.
        assert everyone.collectives.all_reduce(torch.ones(1)) == everyone.size
        first.finish()
        second.finish()
        for name, gradient in gradients_of(model).items():
            whole = expected[name not in ("router", "0.norm")][name]
            assert torch.equal(gradient, model.own(name, whole)), name
        assert_same_bits(gradients_of(other), shards_of(other, expected[False]))

    on_tagged_ranks(made, task, strategy, bucket_bytes=500)
