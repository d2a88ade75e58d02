"""Replicas that die whole and spares that take their places, against one process that trains on."""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import signal
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest

from ntp_support.resilient_training import ANY, PRELOAD, STEP_POINTS, Fault, train_in_session
from ntp_support.seen_training import Seen, assert_seen
from ntp_support.session_events import from_the_start, hold_for_joins, hold_for_returns
from pcomm.core import Topology
from pcomm.core.errors import FencedError, PeerError
from pcomm.core.process import RankReport, ResilientRanks
from pcomm.core.testing.programs import scaled_s
from pcomm.ntp.session import Timeouts

TWO_BY_TWO = Topology({"dp": 2, "tp": 2})


def seen_by_rank(reports: Mapping[int, RankReport]) -> dict[int, Seen]:
    """What the processes that finished saw, by the rank that they had; not of idle spares."""
    results = [report.result for report in reports.values() if report.has_finished]
    had = [own for own in results if own.rank >= 0]
    found = {own.rank: own for own in had}
    assert len(found) == len(had), "two processes had a rank"
    return found


def kill(*ranks: int, point: str = "backward", step: int = 1) -> list[Fault]:
    return [Fault(rank, point, step) for rank in ranks]


@pytest.mark.parametrize(
    ("axes", "spares", "faults", "left"),
    [
        pytest.param((2, 1, 1), 1, kill(0), 2, id="a replica of one rank"),
        # The first spare dies in its first generation, before it has the state.
        pytest.param((2, 1, 2), 2, [*kill(1), Fault(4, "build", 0)], 4, id="a spare that dies"),
        pytest.param((2, 1, 2), 2, kill(2, 3, point="reduction"), 4, id="a whole replica"),
        pytest.param((2, 1, 2), 1, kill(2, 3), 3, id="fewer spares than ranks that die"),
        pytest.param((2, 2, 1), 1, kill(2, point="optimizer"), 4, id="a part of a replica, cp"),
        pytest.param((2, 1, 2), 0, [*kill(2), Fault(3, "build", 1)], 2, id="in the recovery"),
        pytest.param((2, 1, 2), 0, kill(0, 1, point="checkpoint", step=3), 2, id="the last step"),
        pytest.param(
            (3, 1, 1), 1, [*kill(1, point="ready"), *kill(0, step=2)], 2, id="one after the other"
        ),
    ],
)
def test_the_others_go_on_with_spares(axes, spares, faults, left) -> None:
    topology = Topology(dict(zip(("dp", "cp", "tp"), axes, strict=True)))
    hold = partial(hold_for_joins, counts={0: spares} if spares else {})
    with ResilientRanks(topology.world_size + spares, preload=PRELOAD) as ranks:
        ranks.start(train_in_session, (topology, 4, faults, None, hold))
        reports = ranks.wait(timeout_s=scaled_s(60.0))
    seen = seen_by_rank(reports)
    assert_seen(seen, 4)
    assert len(seen) == left, reports
    full = min(topology.world_size, topology.world_size - len(faults) + spares)
    assert left == full
    if spares >= len(faults):
        # No generation was without them.
        assert {len(own) for own in seen[min(seen)].generations} == {topology.world_size}


@pytest.mark.parametrize("restore", [None, from_the_start])
def test_spares_go_on_from_the_checkpoint_when_no_rank_is_left(restore) -> None:
    faults = [*kill(0, step=2), *kill(1, step=2)]
    topology = Topology({"dp": 2, "tp": 1})
    hold = partial(hold_for_joins, counts={0: 1, 2: 1})
    # A rank that is left alone for a moment trains with the spare.
    with ResilientRanks(3, preload=PRELOAD) as ranks:
        ranks.start(train_in_session, (topology, 4, faults, {"restore": restore}, hold))
        spare = ranks.wait(timeout_s=scaled_s(60.0))[2]
    if spare.has_finished:
        assert_seen(seen_by_rank({2: spare}), 4)
    else:
        assert restore is None
        assert isinstance(spare.error, PeerError), spare


def test_a_stopped_rank_whose_place_a_spare_has_is_fenced() -> None:
    timeouts = Timeouts(heartbeat_s=0.1, dead_after_s=scaled_s(3.0))
    faults = [Fault(1, "backward", 1, signal.SIGSTOP)]
    hold = partial(hold_for_joins, counts={0: 1})
    with ResilientRanks(5, preload=PRELOAD) as ranks:
        options = {"timeouts": timeouts}
        ranks.start(train_in_session, (TWO_BY_TWO, 4, faults, options, hold))
        others = ranks.wait([0, 2, 3, 4], timeout_s=scaled_s(120.0))
        ranks.kill(1, signal.SIGCONT)
        stopped = ranks.wait([1], timeout_s=scaled_s(120.0))[1]
    assert isinstance(stopped.error, FencedError), stopped
    seen = seen_by_rank(others)
    assert sorted(seen) == [0, 1, 2, 3]
    assert_seen(seen, 4)


# -- campaigns ---------------------------------------------------------------------------------


def campaign(
    dp: int, tp: int, spares: int, faults: Sequence[Fault], period: int, kills: int
) -> None:
    """Train while ranks are killed, each of which comes back; nothing is lost or left behind."""
    # What other tests of this process keep for their next run, such as ranks, is not ours.
    shared, others = set(os.listdir("/dev/shm")), {one.pid for one in mp.active_children()}
    topology = Topology({"dp": dp, "tp": tp})
    until = period * (1 + max(one.step for one in faults if one.point in STEP_POINTS) // period)
    hold = partial(hold_for_returns, period=period, at=period - 2, spare=spares)
    size = topology.world_size + spares
    deaths: list[int] = []
    with ResilientRanks(size, preload=PRELOAD) as ranks:

        def bring_back(process: int) -> None:
            while (found := ranks.wait([process])[process]).reason == "killed by SIGKILL":
                deaths.append(process)
                ranks.join_again(process)
            assert found.has_finished or found.error is not None

        ranks.start(train_in_session, (topology, until, faults, None, hold))
        threads = [threading.Thread(target=bring_back, args=(one,)) for one in range(size)]
        for one in threads:
            one.start()
        for one in threads:
            one.join(scaled_s(300.0))
        assert not any(one.is_alive() for one in threads), ranks.wait(timeout_s=0.0)
        reports = ranks.wait(timeout_s=scaled_s(60.0))
        assert len(deaths) == ranks.place(0).store().add("struck", 0)
    seen = seen_by_rank(reports)
    assert sorted(seen) == list(topology.ranks), reports
    assert_seen(seen, until)
    # A rank that does not hear that a step counts does not come to the point behind the step.
    assert 0.8 * kills <= len(deaths) <= kills
    assert {one.pid for one in mp.active_children()} <= others
    assert set(os.listdir("/dev/shm")) <= shared


def random_faults(form: str, rounds: int, seed: int) -> dict[str, Any]:
    """Arguments of a `campaign` of one form."""
    draw = random.Random(seed)
    dp, tp, spares, period = {
        "single ranks": (3, 2, 0, 3),
        "whole replicas": (2, 2, 0, 3),
        "two replicas one after the other": (3, 1, 0, 4),
        "in a recovery": (2, 2, 0, 3),
        "with spares": (2, 2, 2, 3),
    }[form]
    faults: list[Fault] = []
    for first in range(0, rounds * period, period):
        struck, replica = len(faults), draw.randrange(dp)
        own = [replica * tp + index for index in range(tp)]
        # The last one is behind a step that counts, to which not all ranks come; see below.
        known = STEP_POINTS[:-1] if form == "in a recovery" else STEP_POINTS
        points = [draw.choice(known) for _ in range(3)]
        if form == "whole replicas":
            faults += [Fault(one, points[0], first, incarnation=ANY) for one in own]
        elif form == "two replicas one after the other":
            for turn, one in enumerate(draw.sample(range(dp), 2)):
                faults.append(Fault(one, points[turn], first + turn, incarnation=ANY))
        else:
            draw.shuffle(own)
            faults.append(Fault(own[0], points[0], first, incarnation=ANY))
            if form == "in a recovery":
                faults.append(Fault(own[1], "build", struck + 1, incarnation=ANY))
    counts = {"period": period, "kills": len(faults)}
    return {"dp": dp, "tp": tp, "spares": spares, "faults": faults, **counts}


FORMS = (
    "single ranks",
    "whole replicas",
    "two replicas one after the other",
    "in a recovery",
    "with spares",
)


@pytest.mark.parametrize("form", ["whole replicas", "with spares"])
def test_a_short_campaign(form: str) -> None:
    campaign(**random_faults(form, rounds=2, seed=3))


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("form", FORMS)
def test_a_long_campaign(form: str, seed: int) -> None:
    """Of each form 4 times 8 rounds with one or two kills: 256 kills in all."""
    campaign(**random_faults(form, rounds=8, seed=seed))
