"""The host's time for a plan of 100,800 ranks, which every rank makes when some have failed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from core_bench.rows import Row, row
from core_bench.runner import time_cases
from pcomm.core.topology import Topology
from pcomm.ntp.planning.failures import Failures
from pcomm.ntp.planning.plan import NtpPlan, plan
from pcomm.ntp.planning.units import Units
from pcomm.ntp.sync.grad_groups import grad_groups

_TOPOLOGY = Topology({"pp": 4, "dp": 350, "tp": 72})
_FAILED_SHARE = 0.004


def large_job() -> tuple[Topology, Failures, dict[str, Units]]:
    """Topology, failures and units of a model of 128 heads, with 0.4 % of the ranks failed."""
    ranks = _TOPOLOGY.ranks
    gone = random.Random(0).sample(ranks, round(_FAILED_SHARE * len(ranks)))
    units = {
        "*.qkv.weight": Units.gqa(q=128, kv=128, dim=128),
        "*.fc1.weight": Units.gated(53248),
        "*.fc2.weight": Units.columns(53248),
        "embedding.weight": Units.vocab(128256),
        "*.norm.weight": Units.replicated(),
    }
    return _TOPOLOGY, Failures.from_global_ranks(sorted(gone)), units


def host_rows(rounds: int) -> list[Row]:
    """Processor milliseconds of one rank. Local.

    Args:
        rounds: Number of rounds, at least 7.
    """
    topology, failures, units = large_job()
    text = plan(topology, failures, units).to_json()
    cases: dict[str, Callable[[], object]] = {
        "plan": lambda: plan(topology, failures, units),
        "plan from its JSON": lambda: NtpPlan.from_json(text),
        "plan, and its groups for gradients": lambda: grad_groups(plan(topology, failures, units)),
    }
    found = time_cases(cases, rounds=rounds, clock=time.thread_time)
    place = f"{len(topology.ranks)} ranks, {len(failures.ranks(topology))} failed"
    return [
        row("ntp host", f"{case} @ {place}", timing.median_us / 1e3, "ms of one rank", rounds)
        for case, timing in found.items()
    ]
