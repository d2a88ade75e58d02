"""Sessions whose optimizer state has owners, which are killed at each point, beside one process."""

from __future__ import annotations

import random
from functools import partial

import pytest

from ntp_support.resilient_training import (
    PRELOAD,
    RECOVERY_POINTS,
    STEP_POINTS,
    Fault,
    train_in_session,
)
from ntp_support.seen_training import Seen, assert_seen
from ntp_support.session_events import from_the_start, hold_for_joins
from pcomm.core import Topology
from pcomm.core.process import ResilientRanks
from pcomm.core.testing.programs import scaled_s
from pcomm.ntp import StateLostError

POINTS = (*STEP_POINTS, "gather")


@pytest.mark.parametrize(
    ("dp", "tp", "copies", "faults"),
    [
        # One rank is left behind while weights travel, all ranks alive; another dies later.
        (3, 1, 2, (Fault(0, "gather", 1, 0), Fault(1, "optimizer", 2))),
        # Owners die while weights travel, in replicas that are cut at different places.
        (2, 2, 2, (Fault(1, "gather", 1), Fault(2, "gather", 2))),
        # One does not hear that all are ready, and one that has applied the step dies.
        (3, 1, 2, (Fault(0, "ready", 1, 0), Fault(2, "gather", 1))),
        # A whole replica, and the recovery is hit.
        (3, 2, 2, (Fault(2, "forward", 1), Fault(3, "forward", 1), Fault(4, "build", 1, 0))),
    ],
)
def test_a_death_costs_no_step_while_an_owner_is_left(
    dp: int, tp: int, copies: int, faults: tuple[Fault, ...]
) -> None:
    with ResilientRanks(dp * tp, preload=PRELOAD) as ranks:
        topology = Topology({"dp": dp, "tp": tp})
        ranks.start(train_in_session, (topology, 4, faults, {"copies": copies}))
        reports = ranks.wait(timeout_s=scaled_s(90.0))
    seen = {rank: report.result for rank, report in reports.items() if report.has_finished}
    assert set(seen) == set(range(dp * tp)) - {one.rank for one in faults if one.number}, reports
    assert_seen(seen, 4)
    for own in seen.values():
        for moved in own.moved:
            # What it needs, and nothing twice.
            assert moved.bytes_received <= 1.05 * moved.bytes_least


def test_a_process_that_comes_back_owns_its_share_again() -> None:
    faults, hold = (Fault(1, "gather", 1),), partial(hold_for_joins, counts={3: 1})
    with ResilientRanks(3, preload=PRELOAD) as ranks:
        topology = Topology({"dp": 3, "tp": 1})
        ranks.start(train_in_session, (topology, 5, faults, {"copies": 2}, hold))
        ranks.wait([1], timeout_s=scaled_s(60.0))
        ranks.join_again(1, (topology, 5, (), {"copies": 2}, hold))
        reports = ranks.wait(timeout_s=scaled_s(60.0))
    assert all(report.has_finished for report in reports.values()), reports
    assert_seen({rank: report.result for rank, report in reports.items()}, 5)
    for report in reports.values():
        owned, held = report.result.owned
        assert abs(owned - 2 * held / 3) <= 0.1 * held


def test_with_one_copy_a_death_goes_back_to_the_checkpoint() -> None:
    topology, faults = Topology({"dp": 2, "tp": 1}), (Fault(1, "forward", 2),)
    for restore in (None, from_the_start):
        with ResilientRanks(2, preload=PRELOAD) as ranks:
            options = {"copies": 1, "restore": restore}
            ranks.start(train_in_session, (topology, 3, faults, options))
            report = ranks.wait(timeout_s=scaled_s(60.0))[0]
        if restore is None:
            assert isinstance(report.error, StateLostError), report
            continue
        own = report.result
        assert [one.step for one in own.steps] == [0, 1, 0, 1, 2]
        assert_seen({0: Seen(own.steps[2:], own.states)}, 3)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(25))
def test_fifty_kills_at_random_points(seed: int) -> None:
    """Two kills in each of 25 jobs, one after the other: state has two owners."""
    generator = random.Random(seed)
    dp, tp = generator.choice([(3, 2), (4, 1), (3, 1), (2, 3), (4, 2)])
    size = dp * tp
    victims = generator.sample(range(size), 2)
    while dp == 2 and victims[0] // tp != victims[1] // tp:
        victims = generator.sample(range(size), 2)
    faults = [Fault(one, generator.choice(POINTS), 1 + 2 * n) for n, one in enumerate(victims)]
    if generator.random() < 0.3:
        other = next(rank for rank in range(size) if rank not in victims)
        faults.append(Fault(other, generator.choice(RECOVERY_POINTS), 1, 0))
    with ResilientRanks(size, preload=PRELOAD) as ranks:
        topology = Topology({"dp": dp, "tp": tp})
        ranks.start(train_in_session, (topology, 5, faults, {"copies": 2}))
        reports = ranks.wait(timeout_s=scaled_s(120.0))
    seen = {rank: report.result for rank, report in reports.items() if report.has_finished}
    assert set(seen) == set(range(size)) - set(victims), (faults, reports)
    assert_seen(seen, 5)
