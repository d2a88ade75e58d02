"""What the simulator predicts for a cluster of the shape of a plan."""

from __future__ import annotations

from fractions import Fraction

from pcomm.core.errors import ConfigError
from pcomm.ntp.planning.plan import Plan
from pcomm.ntp.simulate import Fleet, SimulatedRow, UnitWork, simulate

__all__ = ["predicted"]

# Schemes of the simulator, with what each is for a reader.
SCHEMES = {
    "drop": "drop damaged replicas",
    "drop packed": "drop them, packed at a restart",
    "paper": "one reduced degree, packed at a restart (arXiv 2504.06095)",
    "exact in place": "this plan's: any degree, in place",
    "exact sorted": "any degree, packed by damage at a restart",
}


def predicted(plan: Plan, share: float | None) -> list[tuple[str, SimulatedRow]]:
    """Words and a row for each scheme, with failed ranks at 60 random choices of places.

    Args:
        plan: The plan whose axes, units and number of failures are taken; slow ranks are not.
        share: Share of failed ranks instead of the plan's number of them, in 0 to 1.

    Raises:
        ConfigError: A share out of range, or no failed ranks.
    """
    topology = plan.topology
    if share is not None and not 0 < share <= 1:
        raise ConfigError(
            f"pcomm plan --simulate {share:g}",
            found=f"{share:g}, outside of 0 < share <= 1",
            why="It is the share of ranks that have failed.",
            fix="Use a number such as 0.004.",
        )
    failed = len(topology.failed) if share is None else round(share * topology.world_size)
    if failed == 0:
        raise ConfigError(
            "pcomm plan --simulate",
            found=f"no failed rank of {topology.world_size}",
            why="Schemes differ in what they do with failed ranks.",
            fix=f"Name failures, or give a share of at least {1 / topology.world_size:g}.",
        )
    full = topology.axes["tp"]
    fleet = Fleet(topology.world_size, full, topology.world_size // (full * topology.axes["dp"]))
    split = [units for _, units in plan.units if units.is_split and units.work]
    whole = sum(units.work for units in split)
    works = [UnitWork(units.count, float(Fraction(units.work, whole))) for units in split]
    rows = simulate(fleet, failed, list(SCHEMES), units=works)
    return [(SCHEMES[row.scheme], row) for row in rows]
