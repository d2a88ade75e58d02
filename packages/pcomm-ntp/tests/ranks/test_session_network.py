"""Sessions whose network fails: hosts of ranks, and that of the store, in network namespaces."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import pytest

from core_bench.rated_network import obstacle
from ntp_support.broken_hosts import Hosts, hosts_of
from ntp_support.resilient_training import PRELOAD, Fault, train_in_session, train_on_hosts
from ntp_support.seen_training import assert_seen
from ntp_support.session_events import hold_for, hold_for_failure
from pcomm.core import Topology
from pcomm.core.errors import FencedError, PeerError
from pcomm.core.process import RankPlace, RankReport, ResilientRanks
from pcomm.core.testing.programs import scaled_s, wait_until
from pcomm.ntp import Failures, StoreLostError
from pcomm.ntp.session import Session, Timeouts

STORE = 3
"""Number of the host with the store; below it those of ranks."""


def limits(dead_after_s: float = 1.0) -> Timeouts:
    """Limits that are waited out, as short as a busy machine allows; not that of operations.

    On a busy machine one may take any time although all ranks are well.
    """
    return Timeouts(
        heartbeat_s=0.1,
        dead_after_s=scaled_s(dead_after_s),
        agree_s=scaled_s(1.0),
        operation_s=3600.0,
    )


@pytest.fixture(scope="module", autouse=True)
def _can_make_hosts() -> None:
    if reason := obstacle():
        pytest.skip(f"no network namespaces here: {reason}")


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with hosts_of(STORE + 1, store_on=STORE) as found:
        yield found


def wait_for(hosts: Hosts, key: str, count: int, ranks: ResilientRanks) -> None:
    """Wait for so many ranks, of which none may end before."""

    def came() -> bool:
        ended = ranks.place(0).store().add("pcomm/ended/count", 0)
        assert not ended, ranks.wait(timeout_s=scaled_s(1.0))
        return bool(hosts.store.add(key, 0) == count)

    wait_until(came, f"{count} ranks that are {key}")


def test_a_store_whose_host_has_no_network_ends_every_rank(hosts: Hosts) -> None:
    timeouts = {"timeouts": Timeouts(agree_s=3.0)}
    with ResilientRanks(2, preload=PRELOAD) as ranks:
        topology = Topology({"dp": 1, "tp": 2})
        # Rank 0 asks the store in each step, and hangs in it.
        hold = partial(hold_for, key="go", step=1)
        ranks.start(train_on_hosts, (hosts.places(), topology, 10**6, (), timeouts, hold))
        wait_for(hosts, "held", 2, ranks)
        hosts.store.set("go", "1")
        # Until then they call the store themselves, whose error would be torch's.
        wait_for(hosts, "released", 2, ranks)
        hosts.disconnect(STORE)
        reports = ranks.wait(timeout_s=scaled_s(60.0))
    assert all(isinstance(report.error, StoreLostError) for report in reports.values()), reports


def test_a_newcomer_that_reaches_no_rank_is_refused_and_the_others_go_on(hosts: Hosts) -> None:
    options = {
        "failures": Failures.from_global_ranks([2]),
        "timeouts": Timeouts(heartbeat_s=0.1, dead_after_s=scaled_s(0.5)),
    }
    hosts.cut(2, 0, 1)
    hold = partial(hold_for, key="go", step=1)
    with ResilientRanks(3, preload=PRELOAD) as ranks:
        topology = Topology({"dp": 1, "tp": 3})
        ranks.start(train_on_hosts, (hosts.places(), topology, 3, (), options, hold))
        refused = ranks.wait([2], timeout_s=scaled_s(60.0))[2]
        hosts.store.set("go", "1")
        reports = ranks.wait([0, 1], timeout_s=scaled_s(60.0))
    assert isinstance(refused.error, PeerError), refused
    # One that had not begun yet is not named.
    assert re.search(r"from 10.77.0.3:\d+ to rank ([01]) at 10.77.0.[12]:", refused.error.found)
    seen = {rank: report.result for rank, report in reports.items()}
    assert_seen(seen, 3)
    assert all(own.generations == [(0, 1)] for own in seen.values())


def test_a_link_between_two_ranks_that_is_cut_costs_one_of_them(hosts: Hosts) -> None:
    hold = partial(hold_for, key="go", step=1)
    with ResilientRanks(3, preload=PRELOAD) as ranks:
        topology = Topology({"dp": 3, "tp": 1})
        options = {"timeouts": limits()}
        # Rank 0 reaches both, and has an error as a connection that breaks would give it: the
        # operation between the others, of which no packet arrives, need not come to its limit.
        faults = (Fault(0, "forward", 1, 0),)
        ranks.start(train_on_hosts, (hosts.places(), topology, 3, faults, options, hold))
        wait_for(hosts, "held", 3, ranks)
        hosts.cut(1, 2)
        hosts.store.set("go", "1")
        reports = ranks.wait(timeout_s=scaled_s(120.0))
    assert isinstance(reports[2].error, FencedError), reports
    assert re.search(
        "rank (1 does not reach rank 2|2 does not reach rank 1)", reports[2].error.found
    )
    assert_went_on(reports, [0, 1], (0, 1, 2))


def assert_went_on(
    reports: Mapping[int, RankReport], left: Sequence[int], whole: tuple[int, ...]
) -> None:
    """Three steps, each applied once, by all and then by those that are left."""
    seen = {rank: reports[rank].result for rank in left}
    assert all(reports[rank].has_finished for rank in left), reports
    assert_seen(seen, 3)
    for own in seen.values():
        # On a busy machine an operation may be late, and its generation begin anew.
        assert sorted(set(own.generations)) == sorted({tuple(left), whole}), own.reasons
        assert sorted(own.gone) == sorted(set(whole) - set(left))


# How the network of host 1 fails, by the host of the store: on a third one, or beside ranks 0, 1.
LINKS = {
    "down": (2, Hosts.take_down),
    "down, the store is beside the others": (0, Hosts.take_down),
    "loses all packets": (2, Hosts.disconnect),
}


@pytest.mark.parametrize(("store_on", "fail"), LINKS.values(), ids=LINKS)
def test_a_host_whose_link_fails_is_left_and_its_ranks_end(store_on, fail) -> None:
    hold = partial(hold_for_failure, step=1)
    with hosts_of(3, store_on=store_on) as hosts, ResilientRanks(4, preload=PRELOAD) as ranks:
        topology, options = Topology({"dp": 2, "tp": 2}), {"timeouts": limits()}
        ranks.start(train_on_hosts, (hosts.places(2), topology, 3, (), options, hold))
        wait_for(hosts, "held", 4, ranks)
        fail(hosts, 1)
        reports = ranks.wait(timeout_s=scaled_s(120.0))
    assert_went_on(reports, [0, 1], (0, 1, 2, 3))
    # A launcher makes an exit code of it, which is not that of success.
    assert all(isinstance(reports[rank].error, StoreLostError) for rank in (2, 3)), reports


def _hold_and_notice(session: Session, place: RankPlace) -> None:
    """Hold as `hold_for`; then none tries its connections before both hosts have had an error.

    A rank that is late leaves its operations by the flag of the others, and tries none.
    """
    if session.step == 1 and session.generation == 0:
        store, member = place.store(), session._membership
        try_connections = member.try_connections

        def try_together() -> None:
            store.set(f"noticed/{place.rank // 2}", "")
            while not store.check(["noticed/0", "noticed/1"]) and session.failure is None:
                time.sleep(0.005)
            try_connections()

        member.try_connections = try_together  # type: ignore[method-assign]
    hold_for(session, place, key="go", step=1)


def test_of_two_hosts_that_reach_the_store_and_not_each_other_one_goes_on() -> None:
    # Of all limits only that of silence is waited out; the kernel tells of the cut.
    limit_s = 3600.0
    timeouts = replace(limits(), leave_s=limit_s, agree_s=limit_s)
    with hosts_of(3, store_on=2) as hosts, ResilientRanks(4, preload=PRELOAD) as ranks:
        topology, options = Topology({"dp": 2, "tp": 2}), {"timeouts": timeouts}
        places = hosts.places(2)
        ranks.start(train_on_hosts, (places, topology, 3, (), options, _hold_and_notice))
        wait_for(hosts, "held", 4, ranks)
        hosts.end_unacknowledged(0, 1)
        hosts.cut(1, 0)
        hosts.store.set("go", "1")
        reports = ranks.wait(timeout_s=scaled_s(120.0))
    assert_went_on(reports, [0, 1], (0, 1, 2, 3))
    for rank in (2, 3):
        error = reports[rank].error
        assert isinstance(error, FencedError), reports[rank]
        # Either of the two may have told it.
        pair = f"rank {rank} does not reach rank [01]|rank [01] does not reach rank {rank}"
        assert re.search(pair, error.found), error.found


def test_a_slow_host_is_waited_for_and_none_is_excluded(hosts: Hosts) -> None:
    hold = partial(hold_for, key="go", step=1)
    with ResilientRanks(3, preload=PRELOAD) as ranks:
        topology = Topology({"dp": 3, "tp": 1})
        options = {"timeouts": Timeouts(heartbeat_s=0.1, dead_after_s=scaled_s(5.0))}
        ranks.start(train_on_hosts, (hosts.places(), topology, 3, (), options, hold))
        wait_for(hosts, "held", 3, ranks)
        # A packet of 1500 bytes takes 23 ms, each way.
        hosts.slow_down(1, "512kbit")
        hosts.store.set("go", "1")
        reports = ranks.wait(timeout_s=scaled_s(120.0))
    seen = {rank: report.result for rank, report in reports.items()}
    assert all(report.has_finished for report in reports.values()), reports
    assert_seen(seen, 3)
    assert all(own.generations == [(0, 1, 2)] for own in seen.values())


def test_hosts_whose_names_are_loopback_connect_by_the_route_to_the_store(hosts: Hosts) -> None:
    places = hosts.places(is_named=False)
    with ResilientRanks(2, preload=PRELOAD) as ranks:
        options = {"timeouts": Timeouts(agree_s=scaled_s(5.0))}
        ranks.start(train_on_hosts, (places, Topology({"dp": 2, "tp": 1}), 2, (), options))
        reports = ranks.wait(timeout_s=scaled_s(60.0))
    assert all(report.has_finished for report in reports.values()), reports
    seen = {rank: report.result for rank, report in reports.items()}
    assert_seen(seen, 2)
    assert all(own.generations == [(0, 1)] for own in seen.values())


def _train_while_clocks_jump(place: RankPlace, *args: object) -> object:
    """Train on a rank whose time of day is another one at each look."""
    chance = random.Random(place.rank)
    time.time = lambda: chance.uniform(0.0, 4e9)
    time.time_ns = lambda: int(1e9 * time.time())
    return train_in_session(place, *args)


def _jump(session: Session, place: RankPlace) -> None:
    del session, place
    assert abs(time.time() - time.time()) > 0


def test_clocks_that_jump_change_nothing() -> None:
    # A rank would be silent for years, or its limits be over at once.
    options = {"timeouts": limits(dead_after_s=2.0)}
    with ResilientRanks(2, preload=PRELOAD) as ranks:
        topology = Topology({"dp": 2, "tp": 1})
        ranks.start(_train_while_clocks_jump, (topology, 4, (), options, _jump))
        reports = ranks.wait(timeout_s=scaled_s(60.0))
    assert all(report.has_finished for report in reports.values()), reports
    seen = {rank: report.result for rank, report in reports.items()}
    assert_seen(seen, 4)
    assert all(set(own.generations) == {(0, 1)} for own in seen.values())
