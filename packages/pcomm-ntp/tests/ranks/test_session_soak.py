"""Many kills at random points, and many recoveries in one process."""

from __future__ import annotations

import random
import signal

import pytest

from ntp_support.resilient_training import (
    PRELOAD,
    RECOVERY_POINTS,
    STEP_POINTS,
    Fault,
    train_in_session,
)
from ntp_support.seen_training import assert_seen
from pcomm.core import Topology
from pcomm.core.errors import FencedError
from pcomm.core.process import ResilientRanks
from pcomm.core.testing.programs import scaled_s
from pcomm.ntp.session import Timeouts

pytestmark = pytest.mark.soak

JOBS, KILLS = 67, 3


def random_faults(generator: random.Random) -> list[Fault]:
    """Kills of ranks of a job of two replicas of three ranks, of which both are left."""
    victims = generator.sample([0, 1, 2, 3, 4, 5], KILLS)
    while {0, 1, 2} <= set(victims) or {3, 4, 5} <= set(victims):
        victims = generator.sample([0, 1, 2, 3, 4, 5], KILLS)
    faults: list[Fault] = []
    for number, victim in enumerate(victims):
        # One that strikes in a recovery is of the replica that is hit already: of two replicas
        # that are hit at once no rank may have the state.
        is_near = bool(faults) and faults[-1].rank // 3 == victim // 3
        point = generator.choice(STEP_POINTS + RECOVERY_POINTS if is_near else STEP_POINTS)
        faults.append(Fault(victim, point, number if point in RECOVERY_POINTS else 1 + 2 * number))
    return faults


@pytest.mark.parametrize("seed", range(JOBS))
def test_kills_at_random_points(seed: int) -> None:
    """Three kills in each of 67 jobs: 201 kills in all."""
    faults = random_faults(random.Random(seed))
    with ResilientRanks(6, preload=PRELOAD) as ranks:
        ranks.start(train_in_session, (Topology({"dp": 2, "tp": 3}), 7, faults))
        reports = ranks.wait(timeout_s=scaled_s(120.0))
    left = {rank for rank, report in reports.items() if report.has_finished}
    assert left == set(range(6)) - {fault.rank for fault in faults}, (faults, reports)
    assert_seen({rank: reports[rank].result for rank in left}, 7)


@pytest.mark.parametrize("point", [*STEP_POINTS, *RECOVERY_POINTS])
def test_a_rank_that_is_stopped_at_any_point_is_fenced(point: str) -> None:
    """One is stopped, at two points while the others recover from an error of a connection."""
    timeouts = Timeouts(heartbeat_s=0.1, dead_after_s=3.0)
    faults = (Fault(0, "forward", 1, 0), Fault(3, point, 1, signal.SIGSTOP))
    with ResilientRanks(4, preload=PRELOAD) as ranks:
        topology = Topology({"dp": 2, "tp": 2})
        ranks.start(train_in_session, (topology, 4, faults, {"timeouts": timeouts}))
        others = ranks.wait([0, 1, 2], timeout_s=scaled_s(120.0))
        ranks.kill(3, signal.SIGCONT)
        stopped = ranks.wait([3], timeout_s=scaled_s(120.0))[3]
    assert isinstance(stopped.error, FencedError), stopped
    assert_seen({rank: report.result for rank, report in others.items()}, 4)


def test_twenty_recoveries_leave_nothing_behind() -> None:
    faults = [Fault(step % 2, "backward", step, 0) for step in range(1, 26)]
    with ResilientRanks(2, preload=PRELOAD) as ranks:
        ranks.start(train_in_session, (Topology({"dp": 2, "tp": 1}), 27, faults, None, None, True))
        reports = ranks.wait(timeout_s=scaled_s(120.0))
    seen = {rank: report.result for rank, report in reports.items()}
    assert_seen(seen, 27)
    for own in seen.values():
        assert len(own.generations) == 26
        names = ("threads", "open files", "process groups", "tensors")
        for name, counts in zip(names, zip(*own.living, strict=True), strict=True):
            # The first attempts at steps 0 and 5, and then up to step 25.
            assert max(counts[3:]) <= max(counts[:3]), (name, counts)
