"""Gradients that tell where they belong, after a sum over replicas of different degrees."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from pcomm.core.collectives.spy import CallRecord, SpyCollectives
from pcomm.core.groups.groups import Groups
from pcomm.core.testing.poison import poisoned_memory
from pcomm.core.topology import Topology
from pcomm.ntp import Coord, Failures, GradSync, Plan, Units, grad_groups, plan
from pcomm.ntp.sync.buckets import deal_out
from pcomm.ntp.sync.grad_groups import Strategy
from pcomm.ntp.sync.synced_params import SyncedParam
from pcomm.ntp.testing.tagged_model import (
    TaggedModel,
    summed_gradients,
    tagged_units,
    tags,
    whole_shapes,
)
from pcomm.ntp.testing.virtual_groups import run_on_virtual_groups

STRATEGIES: tuple[Strategy, ...] = ("interval", "gather-core")
DEGREES = [(4, 3), (3, 4), (4, 2), (2, 3, 1), (3, 2), (3, 3), (1, 1), (4,), (4, 3, 3, 2)]


def plan_of(degrees: Sequence[int], **axes: int) -> Plan:
    """A plan whose replicas have these degrees, since their lowest ranks have failed."""
    full = max(degrees)
    topology = Topology({"dp": len(degrees), **axes, "tp": full})
    rest = dict.fromkeys(axes, 0)
    gone = [
        Coord(dp=dp, tp=tp, **rest) for dp, own in enumerate(degrees) for tp in range(full - own)
    ]
    return plan(topology, Failures.at(*gone), tagged_units())


def on_all(
    made: Plan,
    task: Callable[[GradSync, TaggedModel, Groups], object],
    strategy: Strategy = "interval",
    *,
    dtype: torch.dtype = torch.float64,
    **options: object,
) -> dict[int, object]:
    """What `task` returns on each used rank, with a model and a GradSync that is closed after."""

    def run(rank: int, groups: Groups) -> object:
        if made.place(rank).is_idle:
            return None
        model = TaggedModel(made, rank, dtype)
        sync = GradSync(made, model, groups, rank=rank, strategy=strategy, **options)  # type: ignore[arg-type]
        return task(sync, model, groups)

    with poisoned_memory():
        return run_on_virtual_groups(made.topology, grad_groups(made, strategy), run)


def gradients(model: TaggedModel) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    return {name: named[name].grad.clone() for name in whole_shapes()}  # type: ignore[union-attr]


def own(model: TaggedModel, whole: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: model.own(name, one) for name, one in whole.items()}


def check_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    wrong = [name for name in found if not torch.equal(found[name], expected[name])]
    assert wrong == []


# -- the sum ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_every_element_is_the_weighted_sum_of_all_replicas(
    degrees: tuple[int, ...], strategy: Strategy
) -> None:
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
            check_equal(gradients(model), own(model, expected))
            assert model.get_parameter("0.frozen").grad is None, bucket
            sync.zero_grad()

    # Buckets of a few parameters.
    on_all(plan_of(degrees), task, strategy, bucket_bytes=500)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_random_gradients_and_weights_that_round(strategy: Strategy) -> None:
    degrees, weights = (2, 3, 1), {0: 0.31, 1: 0.47, 2: 0.22}
    expected = summed_gradients(weights, seed=1)

    def task(sync: GradSync, model: TaggedModel, _: Groups) -> dict[str, Tensor]:
        replica = model.place.replica
        with sync.accumulate(weight=weights[replica]):
            model.loss(tags(replica, seed=1)).backward()
        sync.finish()
        found = gradients(model)
        for name, one in own(model, expected).items():
            torch.testing.assert_close(found[name], one, rtol=0, atol=1e-12)
        return found

    made = plan_of(degrees)
    found = on_all(made, task, strategy)
    check_replicas(made, found)


def check_replicas(made: Plan, found: dict[int, object]) -> None:
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
    made = plan_of((3, 2), cp=2)
    # The group of each tensor-parallel group, by its coordinates; only dp=1, cp=0 is damaged, and
    # its whole replica has that degree.
    expected = summed_gradients({0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0})

    def task(sync: GradSync, model: TaggedModel, groups: Groups) -> None:
        everyone = groups["ntp.all"]
        at = made.topology.coordinates(everyone.ranks[everyone.rank])
        with sync.accumulate():
            model.loss(tags(2 * at["dp"] + at["cp"])).backward()
        sync.finish()
        check_equal(gradients(model), own(model, expected))

    for strategy in STRATEGIES:
        assert None not in on_all(made, task, strategy).values() or made.idle_ranks


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
        check_equal(gradients(model), own(model, expected))
        return sync.grad_norm()

    norms = list(on_all(made, task, strategy, bucket_bytes=500).values())
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
            before = sent_by(groups)
            for turn, weight in enumerate(weights[replica]):
                with sync.accumulate(is_last=turn == 2, weight=weight):
                    model.loss(tags(replica + 2 * turn)).backward()
                assert (sent_by(groups) == before) is (turn < 2)
            sync.finish()
            check_equal(gradients(model), own(model, expected))
            sync.zero_grad()

    on_all(plan_of((3, 2)), task)


def sent_by(groups: Groups) -> int:
    return len(calls(groups))


def calls(groups: Groups) -> list[CallRecord]:
    """All calls of this rank; each group is there under two keys."""
    spies = {id(group): group.collectives for group in groups.values()}
    return [c for spy in spies.values() if isinstance(spy, SpyCollectives) for c in spy.calls]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_of_16_bits_are_weighted_and_summed_in_fp32(strategy: Strategy) -> None:
    """What is sent has four bytes an element, and is rounded once, after the sum."""
    made, weights = plan_of((4, 3)), {0: 0.7, 1: 0.3}
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
        found = gradients(model)
        check_equal(found, {n: one.bfloat16() for n, one in own(model, expected).items()})
        if strategy == "interval":
            spies = {id(one): one.collectives for one in groups.values()}.values()
            sent = sum(
                c.input_bytes for s in spies if isinstance(s, SpyCollectives) for c in s.calls
            )
            assert sent == 4 * sum(one.numel() for one in found.values())

    on_all(made, task, strategy, dtype=torch.bfloat16)


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
        found = gradients(model)
        assert (found.pop("router") == 0).all()
        wanted = own(model, expected)
        del wanted["router"]
        check_equal(found, wanted)

    on_all(plan_of((4, 3)), task, strategy, bucket_bytes=500)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_may_arrive_in_another_order_in_each_replica(strategy: Strategy) -> None:
    """Sums start in one order all the same: here an operation ends when all have called it."""
    made, expected = plan_of((3, 2)), summed_gradients({0: 1.0, 1: 1.0})

    def task(sync: GradSync, model: TaggedModel, _: Groups) -> None:
        replica = model.place.replica
        upstream = tags(replica)
        if replica == 1:
            upstream = dict(reversed(upstream.items()))
        with sync.accumulate():
            model.loss(upstream).backward()
        sync.finish()
        check_equal(gradients(model), own(model, expected))

    on_all(made, task, strategy, bucket_bytes=1)


# -- what is sent ----------------------------------------------------------------------------------


def test_bytes_are_those_of_an_all_reduce_over_replicas_and_none_inside_a_group() -> None:
    """2 (n-1)/n of a shard for n replicas: P/N of the parameters at degree N, and no other call."""
    made = plan_of((4, 3, 3, 2))
    split = [name for name in whole_shapes() if made.units_of(name)]
    split.remove("router")

    def task(sync: GradSync, model: TaggedModel, groups: Groups) -> None:
        with sync.accumulate():
            model.loss(tags(model.place.replica)).backward()
        sync.finish()
        named = dict(model.named_parameters())
        shard = sum(named[name].nbytes for name in split)
        everyone, sent = groups["ntp.all"], 0
        for key, group in groups.items():
            spy = group.collectives
            if not isinstance(key, str) or group is everyone or not isinstance(spy, SpyCollectives):
                continue
            assert set(spy.counts) == {"all_reduce"}
            assert len({made.place(rank).replica for rank in group.ranks}) == group.size == 4
            sent += sum(call.input_bytes for call in spy.calls)
            assert spy.sent_bytes == 2 * sum(c.input_bytes * 3 // 4 for c in spy.calls)
        assert sent == shard

    on_all(made, task)


def test_sums_start_during_backward_in_one_order() -> None:
    made = plan_of((3, 2))

    def task(sync: GradSync, model: TaggedModel, groups: Groups) -> tuple[int, int]:
        during: list[int] = []
        # The first parameter of the model is the last one to get its gradient.
        first = model.get_parameter("embedding.weight")
        first.register_hook(lambda _: during.append(sent_by(groups)))
        with sync.accumulate():
            model.loss(tags(model.place.replica)).backward()
        ended = sent_by(groups)
        sync.finish()
        assert sent_by(groups) == ended
        return ended, max(during)

    for before_end, before_last in on_all(made, task, bucket_bytes=200).values():  # type: ignore[misc, attr-defined]
        assert 0 < before_last <= before_end


def test_buckets_start_in_the_order_in_which_they_are_complete() -> None:
    """Parameters of 16 bits between others: a bucket has one type, and is closed when full."""

    def param(name: str, dtype: torch.dtype, length: int) -> SyncedParam:
        parameter = nn.Parameter(torch.zeros(length, dtype=dtype))
        return SyncedParam(name, parameter, "", None, None, 0, True, torch.float32)

    wide, narrow = torch.float32, torch.bfloat16
    params = [
        *(param("a", wide, 4), param("b", narrow, 1), param("c", wide, 2)),
        *(param("d", wide, 2), param("e", narrow, 1), param("f", wide, 1)),
    ]
    dealt = [[one.name for one in own] for own in deal_out(params, 16, 1)]
    # 16 bytes are four elements of the sum; the others end with the first parameters.
    assert dealt == [["f", "d", "c"], ["e", "b"], ["a"]]
    assert [len(own) for own in deal_out(params, 1, 1)] == [1] * 6


def test_groups_are_one_for_each_set_of_ranks() -> None:
    for degrees in DEGREES:
        made = plan_of(degrees)
        for strategy in STRATEGIES:
            specs = grad_groups(made, strategy)
            sets = [spec.ranks for spec in specs]
            assert len(set(sets)) == len(sets)
            assert specs[0].axes == "ntp.all"
    # Units that divide by both: N1 + N2 - gcd(N1, N2) segments, and the group of all.
    topology = Topology({"dp": 2, "tp": 8})
    two = plan(topology, Failures.at(Coord(dp=0, tp=3)), {"w": Units.columns(56)})
    assert len(grad_groups(two)) == 1 + 8 + 7 - 1


# -- the norm --------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("degrees", [(4, 3), (2, 3, 1)], ids=str)
def test_the_norm_counts_every_element_once_and_has_the_same_bits(
    degrees: tuple[int, ...], strategy: Strategy
) -> None:
    weights = dict.fromkeys(range(len(degrees)), 0.3)
    expected = summed_gradients(weights, seed=3)
    whole = [one.clone().requires_grad_() for one in expected.values()]
    for one in whole:
        one.grad = one.detach().clone()
    exact = torch.nn.utils.clip_grad_norm_(whole, 0.7)
    clipped = dict(zip(expected, (one.grad for one in whole), strict=True))

    def task(sync: GradSync, model: TaggedModel, _: Groups) -> Tensor:
        replica = model.place.replica
        with sync.accumulate(weight=0.3):
            model.loss(tags(replica, seed=3)).backward()
        sync.finish()
        norm = sync.grad_norm()
        assert torch.equal(norm, sync.clip_grad_norm_(0.7))
        for name, one in gradients(model).items():
            wanted = model.own(name, clipped[name])  # type: ignore[arg-type]
            torch.testing.assert_close(one, wanted, rtol=0, atol=1e-14)
        return norm

    norms = on_all(plan_of(degrees), task, strategy)
    first, *others = [one for one in norms.values() if isinstance(one, Tensor)]
    assert first.dtype == torch.float64
    torch.testing.assert_close(first, exact, rtol=1e-14, atol=0)
    assert all(torch.equal(first, other) for other in others)


def test_a_gradient_that_is_not_finite_is_so_for_all() -> None:
    def task(sync: GradSync, model: TaggedModel, _: Groups) -> None:
        replica = model.place.replica
        upstream = tags(replica)
        if replica == 1:
            upstream["0.fc2.weight"][0, -1] = float("inf")
        with sync.accumulate():
            model.loss(upstream).backward()
        sync.finish()
        assert sync.grad_norm().isinf()

    on_all(plan_of((3, 2)), task)


def test_all_ranks_skip_a_step_that_overflows_on_one() -> None:
    made = plan_of((3, 2))

    def task(sync: GradSync, model: TaggedModel, _: Groups) -> tuple[bool, float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for overflows in (True, False):
            before = [one.detach().clone() for one in model.parameters()]
            upstream = tags(model.place.replica)
            if overflows and model.place.replica == 1:
                upstream["0.fc2.weight"][0, -1] = float("inf")
            with sync.accumulate():
                scaler.scale(model.loss(upstream)).backward()
            sync.finish()
            sync.unscale_(scaler, optimizer)
            if not overflows:
                check_equal(gradients(model), own(model, summed_gradients({0: 1.0, 1: 1.0})))
            scaler.step(optimizer)
            scaler.update()
            same = all(map(torch.equal, before, model.parameters()))
            assert same == overflows
            sync.zero_grad()
        return scaler.get_scale()  # type: ignore[return-value]

    assert set(on_all(made, task).values()) == {4.0}
