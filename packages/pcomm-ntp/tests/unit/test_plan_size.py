"""What a plan costs at 100,000 ranks, counted in calls of Python functions and not in time."""

import sys
from collections.abc import Callable

from pcomm.core import Topology
from pcomm.ntp import Failures, Policy, Units, plan
from pcomm.ntp.planning.hosts import Hosts
from pcomm.ntp.planning.owners import Owners, UnitSizes

UNITS = {
    "*.qkv.weight": Units.gqa(q=128, kv=128, dim=128),
    "*.fc1.weight": Units.gated(28672),
    "embedding": Units.vocab(128256),
    "*.norm.weight": Units.replicated(),
}


def calls_of(task: Callable[[], object]) -> int:
    """Python functions that `task` calls, resumed generators included."""
    found = 0

    def count(_: object, event: str, __: object) -> None:
        nonlocal found
        found += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        task()
    finally:
        sys.setprofile(before)
    return found


def planned(replicas: int, number: int, rounding: str) -> Callable[[], object]:
    """A plan of `replicas` x 8 x 72 ranks, of which `number` failed and 10 are slow."""
    topology = Topology({"pp": 8, "dp": replicas, "tp": 72})
    failed = range(5, 5 + 97 * number, 97)
    speeds = dict.fromkeys(range(50, 5050, 500), 0.5)
    policy = Policy("nice") if rounding == "nice" else Policy()

    def task() -> object:
        made = plan(topology, Failures.from_global_ranks(failed), UNITS, policy, speeds=speeds)
        return made.digest(), made.speeds, made.place(3), made.segments("embedding"), made.cost()

    return task


def test_a_plan_looks_at_failed_and_slow_ranks_and_not_at_all() -> None:
    for rounding, replicas in (("max", 175), ("nice", 70)):
        small, large = (calls_of(planned(n, 50, rounding)) for n in (18, replicas))
        # 100,800 ranks, or 40,320, against 10,368: a few calls for each replica and stage, none
        # for a rank.
        others = replicas - 18
        assert large - small < 20 * others * 8 < others * 8 * 72 / 3
        # A failure costs a few calls for each rank of its group.
        more = calls_of(planned(replicas, 400, rounding))
        assert more - large < 20 * 72 * (400 - 50)


def test_owners_of_four_times_the_ranks_cost_four_times_the_calls() -> None:
    sizes = {f"{n}.up": UnitSizes("*.fc1.weight", 28672, 3) for n in range(10)}
    sizes |= {f"{n}.norm": UnitSizes("", 8192, 1) for n in range(10)}

    def dealt(replicas: int) -> Callable[[], object]:
        topology = Topology({"dp": replicas, "tp": 1})
        hosts, alive = Hosts.of(topology, 2), topology.ranks[1:]
        whole = plan(topology, Failures(), UNITS)
        left = plan(topology, Failures.from_global_ranks([0]), UNITS, Policy(drops_replicas=True))

        def task() -> object:
            first = Owners.deal(whole, 1, sizes, hosts)
            second = Owners.deal(left, 1, sizes, hosts, before=first, alive=alive)
            return Owners.deal(whole, 1, sizes, hosts, before=second, alive=alive).senders

        return task

    small, large = (calls_of(dealt(replicas)) for replicas in (31, 124))
    assert large < 6 * small
