"""Owners of optimizer state: who they are, what they hold and send, beside one process."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
import torch

from ntp_support.foreign_training import assert_trains_like_one_process, foreign_model
from ntp_support.refusals import refused
from ntp_support.small_training import (
    assert_training,
    train,
    train_dense,
    training_specs,
    training_units,
)
from ntp_support.virtual_groups import run_on_virtual_groups
from pcomm.core import Groups, Topology
from pcomm.core.collectives import SpyCollectives
from pcomm.core.errors import ConfigError, TopologyError
from pcomm.ntp import Failures, NtpPlan, Policy, Units, plan
from pcomm.ntp.planning.hosts import Hosts
from pcomm.ntp.planning.owners import Owners, UnitSizes, holding_groups
from pcomm.ntp.planning.survival import Survival
from pcomm.ntp.sync.grad_groups import group_names
from pcomm.ntp.sync.owned_params import OwnedParams, unit_sizes

UNITS = {"a": Units.columns(40), "b": Units.gated(13), "v": Units.vocab(101)}
SIZES = {
    "a": UnitSizes("a", 40, 3),
    "b": UnitSizes("b", 13, 7),
    "v": UnitSizes("v", 101, 5),
    "norm": UnitSizes("", 9, 1),
    "scale": UnitSizes("", 1, 1),
}


def without(topology: Topology, gone: set[int]) -> NtpPlan:
    failures = Failures.from_global_ranks(sorted(gone))
    return plan(topology, failures, UNITS, Policy(drops_replicas=True))


@pytest.mark.parametrize("ranks_each", [None, 1, 3])
@pytest.mark.parametrize(
    "seed", [pytest.param(one, marks=[pytest.mark.soak] * (one >= 12)) for one in range(40)]
)
def test_owners_are_on_other_hosts_level_and_stay_through_deaths_and_returns(
    seed: int, ranks_each: int | None
) -> None:
    generator = random.Random(seed)
    topology = Topology({"dp": generator.randint(2, 5), "tp": generator.randint(1, 3)})
    # Each replica is a host; or each has so many replicas, the last one maybe fewer.
    tp = topology.axes["tp"]
    names = {one: str(one // (tp * (ranks_each or 1))) for one in topology.ranks}
    hosts = Hosts.of(topology, generator.randint(1, 3), ranks_each and names)
    gone, before, alive = set[int](), None, list[int]()
    for _ in range(6):
        made = without(topology, gone)
        left = [rank for rank in topology.ranks if rank not in gone]
        found = Owners.deal(made, left[0], SIZES, hosts, before=before, alive=alive)
        assert Owners.from_json(found.to_json()).digest() == found.digest()
        num_hosts = len({hosts.names[rank] for rank in left})
        survival = found.survival(hosts)
        assert survival.hosts == min(hosts.copies, num_hosts)
        for name, ranges in found.ranges.items():
            ends = [0, *(one.stop for one in ranges)]
            assert [one.start for one in ranges] == ends[:-1]
            assert ends[-1] == SIZES[name].units
            for one in ranges:
                holders = holders_of(made, SIZES[name], one.start)
                assert set(one.owners) <= set(holders)
                assert len(set(one.owners)) == min(hosts.copies, len(holders))
                on = {hosts.names[rank] for rank in one.owners}
                assert len(on) == min(hosts.copies, len({hosts.names[r] for r in holders}))
                if len({hosts.names[r] for r in holders}) == 1:
                    # And of other replicas, as far as there are so many of them.
                    replicas = {made.place(r).replica for r in holders}
                    apart = {made.place(r).replica for r in one.owners}
                    assert len(replicas) < hosts.copies or len(apart) == hosts.copies
            # Each unit has one sender, which owns it.
            assert sum(stop - start for start, stop, _ in found.senders[name]) == ends[-1]
            for start, stop, rank in found.senders[name]:
                assert any(a <= start and stop <= b for a, b in found.held(name, rank))
        for rank in left:
            # Its part of each range that it holds, and a unit of each for rounding.
            share, rounding = Fraction(0), 0
            for own in SIZES.values():
                for start, stop, ranks in holding_groups(made, rank, own):
                    if rank in ranks:
                        by_host = {hosts.names[one] for one in ranks}
                        mates = [one for one in ranks if hosts.names[one] == hosts.names[rank]]
                        copies = min(hosts.copies, len(ranks))
                        even = Fraction(copies, len(ranks))
                        most = Fraction(copies, len(by_host) * len(mates))
                        if 1 < len(by_host) < copies:
                            # As many copies on each host may be all of it for one rank.
                            most = Fraction(1)
                        share += (stop - start) * own.size * max(even, min(Fraction(1), most))
                        rounding += 2 * own.size
            assert found.elements(rank) <= share + rounding, (rank, gone)
        if before is not None and len(alive) == len(left):
            # No unit moves that lives where it is, but for what levels the ranks.
            kept = {rank: before.elements(rank) for rank in left}
            new = sum(found.elements(rank) - _common(before, found, rank) for rank in left)
            owned = sum(found.elements(rank) for rank in left)
            lost = owned - sum(kept.values())
            assert new <= max(0, lost) + _total() // 2, (new, lost)
        before = found
        returned = generator.choice(sorted(gone)) if gone and generator.random() < 0.3 else None
        gone = gone - {returned} if returned is not None else gone | {generator.choice(left)}
        if len(gone) == len(topology.ranks):
            break
        alive = [rank for rank in left if rank not in gone]


def holders_of(made: NtpPlan, own: UnitSizes, unit: int) -> tuple[int, ...]:
    """The ranks that hold a unit."""
    first = min(set(made.topology.ranks) - made.topology.failed)
    groups = holding_groups(made, first, own)
    return next(ranks for start, stop, ranks in groups if start <= unit < stop)


def _total() -> int:
    return sum(own.units * own.size for own in SIZES.values())


def _common(before: Owners, found: Owners, rank: int) -> int:
    """Elements that a rank owns of both."""
    common = 0
    for name, own in SIZES.items():
        units = [
            {unit for start, stop in one.held(name, rank) for unit in range(start, stop)}
            for one in (before, found)
        ]
        common += own.size * len(units[0] & units[1])
    return common


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("seed", range(10))
def test_owners_of_replicas_of_different_degrees_are_level_from_the_start(
    seed: int, copies: int
) -> None:
    """A rank holds parts of several ranks of another replica, and owns its share of each."""
    generator = random.Random(seed)
    topology = Topology({"dp": generator.randint(2, 6), "tp": generator.randint(2, 6)})
    count = generator.randint(1, max(1, topology.world_size // 8))
    failures = Failures.from_global_ranks(generator.sample(list(topology.ranks), count))
    units, size = {"a": Units.columns(4000)}, {"a": UnitSizes("a", 4000, 1)}
    made = plan(topology, failures, units, Policy(drops_replicas=True))
    left = made.stage_ranks(min(set(topology.ranks) - made.topology.failed))
    found = Owners.deal(made, left[0], size, Hosts.of(topology, copies))
    for rank in left:
        share = sum(
            Fraction(min(copies, len(ranks)) * (stop - start), len(ranks))
            for start, stop, ranks in holding_groups(made, left[0], size["a"])
            if rank in ranks
        )
        assert found.elements(rank) <= share * Fraction(33, 32) + 2, rank


def test_what_moves_after_a_death_is_what_the_dead_rank_owned() -> None:
    topology = Topology({"dp": 4, "tp": 1})
    hosts = Hosts.of(topology, 2)
    first = Owners.deal(without(topology, set()), 0, SIZES, hosts)
    alive = [0, 1, 3]
    second = Owners.deal(without(topology, {2}), 0, SIZES, hosts, before=first, alive=alive)
    moved = sum(second.elements(rank) - _common(first, second, rank) for rank in alive)
    assert first.elements(2) <= moved <= 1.05 * first.elements(2)
    again = Owners.deal(without(topology, {2}), 0, SIZES, hosts, before=second, alive=alive)
    assert again.digest() == second.digest()


def test_hosts_that_are_named_are_apart_and_mistakes_are_refused() -> None:
    topology = Topology({"dp": 4, "tp": 1})
    # Replicas 0 and 1 are on one host.
    hosts = Hosts.of(topology, 2, {0: "x", 1: "x", 2: "y", 3: "z"})
    found = Owners.deal(without(topology, set()), 0, SIZES, hosts)
    for ranges in found.ranges.values():
        assert all(not {0, 1} <= set(one.owners) for one in ranges)
    assert found.survival(hosts) == Survival(2, 2)
    # On one host they are on two ranks, and go to another host as soon as there is one.
    one_host = Hosts.of(topology, 2, dict.fromkeys(range(4), "x"))
    first = Owners.deal(without(topology, set()), 0, SIZES, one_host)
    assert first.survival(one_host) == Survival(2, 1)
    left, two_hosts = without(topology, {3}), Hosts.of(topology, 2, {**one_host.names, 3: "y"})
    second = Owners.deal(left, 0, SIZES, one_host, before=first, alive=[0, 1, 2])
    assert second.survival(one_host) == Survival(2, 1)
    whole = without(topology, set())
    third = Owners.deal(whole, 0, SIZES, two_hosts, before=second, alive=[0, 1, 2])
    assert third.survival(two_hosts) == Survival(2, 2)
    for copies in (0, True, 1.5):
        refused(ConfigError, "copies", Hosts.of, topology, copies)
    refused(TopologyError, "no host of rank 1", Hosts.of, topology, 2, {0: "x"})


# Several messages to a group, of replicas of one degree and of two; the long form has all.
CUT = [((1, 1), 1), ((2, 1, 2), 2)]
DEGREES = [
    # Of split parameters nobody else has the units.
    ((2,), 1),
    ((1, 1), 1),
    ((1, 1, 1, 1), 2),
    ((2, 2, 2), 2),
    ((3, 2, 3), 2),
    ((3, 1), 1),
    ((2, 3, 1, 3), 3),
]


@pytest.mark.parametrize(
    ("degrees", "copies", "most"),
    [
        *((*one, 1 << 23) for one in DEGREES),
        *((*one, 20) for one in CUT),
        *(pytest.param(*one, 20, marks=pytest.mark.soak) for one in DEGREES if one not in CUT),
    ],
)
def test_training_equals_one_process_with_its_share_of_state_and_bytes(
    degrees: tuple[int, ...], copies: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Weights go in one message to a group, or in several.
    monkeypatch.setattr("pcomm.ntp.sync.owned_params._CHUNK_ELEMENTS", most)
    full, replicas = max(degrees), len(degrees)
    gone = [dp * full + tp for dp, own in enumerate(degrees) for tp in range(full - own)]
    topology = Topology({"dp": replicas, "tp": full})
    made = plan(topology, Failures.from_global_ranks(gone), training_units())
    dense = train_dense()
    # Elements of a unit of each parameter.
    rounding = 6 + 2 * 6 + 2 + 6 + 3

    def task(rank: int, groups: Groups) -> tuple[int, int]:
        counted: list[int] = []
        # A group may have two names.
        spies = {
            id(one.collectives): one.collectives
            for one in groups.values()
            if one.name.startswith("ntp")
        }
        names = group_names(made, "interval")

        def after(owned: OwnedParams) -> None:
            before = sum(
                one.sent_bytes for one in spies.values() if isinstance(one, SpyCollectives)
            )
            owned.gather_weights(lambda ranks: groups[names[ranks]])
            sent = sum(one.sent_bytes for one in spies.values() if isinstance(one, SpyCollectives))
            counted.extend((owned.num_elements, sent - before))

        found = train(made, rank, groups, copies=copies, after=after)
        assert_training(made, rank, found, dense, atol=1e-12)
        held = sum(weight.numel() for weight, *_ in found[-1].tensors.values())
        assert counted[0] <= held * copies / replicas + rounding, (rank, counted, held)
        return counted[0], counted[1]

    found = run_on_virtual_groups(made.topology, training_specs(made, "interval"), task)
    whole = sum(weight.numel() for weight, *_ in dense[-1].tensors.values())
    assert sum(owned for owned, _ in found.values()) == copies * whole
    # Each weight comes to every rank that holds it, once; whole ones to all.
    layer_norm_and_bias = 18
    split = whole - layer_norm_and_bias
    ranks = len(found)
    least = 8 * (split * (replicas - 1) + layer_norm_and_bias * (ranks - 1))
    assert sum(sent for _, sent in found.values()) == least
    if len(set(degrees)) == 1:
        assert max(sent for _, sent in found.values()) <= least / ranks + 8 * rounding * replicas


def test_a_model_of_transformers_with_momentum_equals_one_process() -> None:
    assert_trains_like_one_process(foreign_model("llama", key_heads=4), (3, 2, 1), copies=2)


def test_a_plan_says_what_owners_cost_and_which_deaths_they_survive() -> None:
    topology = Topology({"dp": 4, "tp": 1})
    for gone, copies, share, survived, warns in (
        (set[int](), 2, "0.500", "any 1", False),
        (set[int](), 1, "0.250", "none: back to the checkpoint", False),
        ({1, 2, 3}, 2, "1.000", "none: back to the checkpoint", True),
    ):
        told = without(topology, gone).explain(copies=copies, rank_parameters=100)
        assert f"a rank keeps {share}" in told
        assert f"may die at once: {survived}" in told
        assert ("no longer survived" in told) is warns
        # Of 800 bytes of averages, and 400 of weights.
        assert f"{int(800 * float(share))} bytes a rank instead of 800" in told
    assert "sends 900 bytes" in without(topology, set()).explain(copies=2, rank_parameters=100)
    assert "optimizer state" not in without(topology, set()).explain()


def test_an_optimizer_whose_parameters_are_cut_already_is_refused() -> None:
    topology = Topology({"dp": 2, "tp": 1})
    made = plan(topology, Failures(), {})
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    sizes = unit_sizes(made, model, optimizer, {})
    owners = Owners.deal(made, 0, sizes, Hosts.of(topology, 1))
    OwnedParams(made, 0, model, optimizer, {}, owners)
    refused(ConfigError, "Make a new optimizer", OwnedParams, made, 0, model, optimizer, {}, owners)
