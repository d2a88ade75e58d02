"""Costs against algorithms played out chunk by chunk, and fair shares by their definition."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcomm.core.errors import ConfigError, TopologyError
from pcomm.core.simulate.engine import Port, Ports, fair_rates
from pcomm.core.simulate.program import Cluster, Load, Rail, SimulatedCommunicator, Task, loads

SIZES = st.integers(2, 9)


def ring(size: int, rounds: int, chunk: float) -> tuple[int, list[Load]]:
    """A ring by hand: each round everyone hands one chunk to the next."""
    sent, received = [0.0] * size, [0.0] * size
    for _ in range(rounds):
        for rank in range(size):
            sent[rank] += chunk
            received[(rank + 1) % size] += chunk
    return rounds, list(map(Load, sent, received))


def approx(answer: tuple[int, list[Load]]) -> tuple[int, list[object]]:
    return answer[0], [pytest.approx(load) for load in answer[1]]


@given(SIZES, st.integers(1, 1000))
def test_ring_costs_are_those_of_a_ring_played_out(size: int, b: int) -> None:
    every = [float(b)] * size
    assert loads("all_gather", "ring", every) == approx(ring(size, size - 1, b))
    assert loads("reduce_scatter", "ring", every) == approx(ring(size, size - 1, b / size))
    assert loads("all_reduce", "ring", every) == approx(ring(size, 2 * (size - 1), b / size))


def test_a_ring_waits_for_its_largest_shard() -> None:
    assert loads("all_gather", "ring", [1.0, 5.0, 3.0]) == (2, [Load(10.0, 10.0)] * 3)


def test_a_broadcast_goes_from_neighbour_to_neighbour_and_stops_before_the_source() -> None:
    middle = [Load(7.0, 7.0), Load(0.0, 7.0), Load(7.0, 0.0), Load(7.0, 7.0)]
    assert loads("broadcast", "ring", [7.0] * 4, 2) == (3, middle)
    assert loads("broadcast", "ring", [7.0] * 2, 0) == (1, [Load(7.0, 0.0), Load(0.0, 7.0)])


@given(st.lists(st.integers(0, 100), min_size=2, max_size=7))
def test_direct_costs_are_those_of_one_message_a_pair(shards: list[int]) -> None:
    size = len(shards)
    sent, received = [0.0] * size, [0.0] * size
    for a in range(size):
        for b in range(size):
            if a != b:
                sent[a] += shards[a]
                received[b] += shards[a]
    assert loads("all_gather", "direct", shards) == (1, list(map(Load, sent, received)))
    # An all-to-all cuts each rank's part in equal pieces.
    pieces = [Load(s / size, r / size) for s, r in zip(sent, received, strict=True)]
    assert loads("all_to_all", "direct", shards) == approx((1, pieces))
    assert loads("all_to_all", "ring", shards) == approx((size - 1, pieces))


@given(SIZES, st.integers(1, 1000), st.sampled_from(["ring", "direct", "in_network"]), st.data())
def test_what_is_sent_arrives(size: int, b: int, algorithm: str, data: st.DataObject) -> None:
    source = data.draw(st.integers(0, size - 1))
    for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"):
        _, every = loads(kind, algorithm, [float(b)] * size, source)
        sent = sum(load.sent_bytes for load in every)
        received = sum(load.received_bytes for load in every)
        if algorithm != "in_network" or kind == "all_to_all":
            assert sent == pytest.approx(received)
        assert received > 0


def test_a_switch_that_reduces_turns_the_two_directions_apart() -> None:
    whole, size = 64.0, 8
    _, reduce_loads = loads("reduce_scatter", "in_network", [whole] * size)
    _, gather_loads = loads("all_gather", "in_network", [whole / size] * size)
    assert reduce_loads[0] == Load(56.0, 8.0)
    assert gather_loads[0] == Load(8.0, 56.0)


def test_alone_nothing_moves() -> None:
    assert loads("all_reduce", "ring", [5.0]) == (0, [Load(0.0, 0.0)])


ROWS = st.lists(
    st.dictionaries(st.integers(0, 5), st.floats(0.05, 1.0), min_size=1, max_size=6),
    min_size=1,
    max_size=6,
)


@given(ROWS)
def test_rates_are_max_min_fair(ports: list[dict[int, float]]) -> None:
    rates = fair_rates(ports)
    assert set(rates) == {t for uses in ports for t in uses}
    filled = [sum(share * rates[t] for t, share in uses.items()) for uses in ports]
    assert max(filled) <= 1 + 1e-9
    for transfer, rate in rates.items():
        # The definition: some port is full, and nobody on it is faster.
        assert any(
            transfer in uses and full >= 1 - 1e-9 and rate >= max(rates[t] for t in uses) - 1e-9
            for uses, full in zip(ports, filled, strict=True)
        )


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30))
def test_rates_of_the_changed_are_those_of_a_fresh_start(picks: list[int]) -> None:
    """Starting and stopping transfers leaves every rate as if all had been computed at once."""
    ports, running, rates = Ports(), {}, {}
    for turn, pick in enumerate(picks):
        if running and pick == 0:
            gone = next(iter(running))
            changed = ports.stop(gone)
            del running[gone], rates[gone]
        else:
            use = {Port("r", (turn + k) % 4, "send"): 1.0 / (k + 1) for k in range(pick or 1)}
            ports.start(turn, use)
            running[turn] = use
            changed = {turn}
        rates |= ports.rates(changed)
        rows: dict[Port, dict[int, float]] = {}
        for transfer, use in running.items():
            for port, share in use.items():
                rows.setdefault(port, {})[transfer] = share
        assert rates == pytest.approx(fair_rates(rows.values()))


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: Task("a", "compute", "sleep"), ConfigError, "kind 'sleep'"),
        (lambda: Task("a", "compute", "compute", seconds=-1.0), ConfigError, "seconds=-1.0"),
        (lambda: Task("a", "compute", "compute", num_bytes=1), ConfigError, "num_bytes=1"),
        (lambda: Task("a", "dp", "all_gather", seconds=1), ConfigError, "seconds=1"),
        (lambda: Task("a", "dp", "all_gather", num_bytes=float("nan")), ConfigError, "nan"),
        (lambda: Rail("a", 0.0), ConfigError, "bytes_per_s=0.0"),
        (lambda: Rail("a", 1.0, -1.0), ConfigError, "latency_s=-1.0"),
        (lambda: SimulatedCommunicator("dp", "a", ((0, 1), (1, 2))), TopologyError, "disjoint"),
        (
            lambda: SimulatedCommunicator("dp", "a", ((),)),
            TopologyError,
            "every group has a member",
        ),
        (lambda: SimulatedCommunicator("dp", "a", ((0,),), "rings"), ConfigError, "mean 'ring'"),
        (lambda: Cluster([Rail("a", 1), Rail("a", 2)], []), ConfigError, "name of its own"),
        (
            lambda: Cluster([Rail("nic0", 1)], [SimulatedCommunicator("dp", "nic1", ((0,),))]),
            ConfigError,
            "mean 'nic0'",
        ),
    ],
)
def test_what_cannot_be_is_refused(make: object, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make()
