"""A plan as text: the lines that ranks compare, and JSON of what it was made from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from pcomm.core.errors import ConfigError, PcommError
from pcomm.core.topology import Topology
from pcomm.ntp.planning.failures import Failures
from pcomm.ntp.planning.policy import Policy
from pcomm.ntp.planning.units import Units

if TYPE_CHECKING:
    from pcomm.ntp.planning.plan import Plan

__all__ = ["PlanSource", "agreed_lines", "not_a_plan", "read_source", "written"]

_VERSION = 3


@dataclass(frozen=True)
class PlanSource:
    """What a plan was made from.

    Args:
        topology: The topology without failed ranks.
        failures: Failed ranks.
        units: Units by name or pattern.
        policy: The policy.
        speeds: Speed of each slow rank.
        digest: `Plan.digest` of the plan that was made.
    """

    topology: Topology
    failures: Failures
    units: Mapping[str, Units]
    policy: Policy
    speeds: Mapping[int, Fraction]
    digest: str


def agreed_lines(plan: Plan) -> list[str]:
    """Facts that all ranks must share, one field a line."""
    topology = plan.topology
    reduced = {
        f"degrees of dp={replica}": own
        for replica, own in enumerate(plan.degrees)
        if min(own) < topology.axes["tp"]
    }
    return [
        f"version: {_VERSION}",
        f"topology: {Topology(topology.axes, topology.order).describe()}",
        f"offset: {topology.offset}",
        f"failed: {sorted(topology.failed)}",
        *(f"speed of rank {rank}: {speed}" for rank, speed in plan.rank_speeds),
        *(f"policy.{key}: {value}" for key, value in asdict(plan.policy).items()),
        *(f"units of {name}: {units}" for name, units in plan.units),
        *(f"{name}: {own}" for name, own in reduced.items()),
    ]


def written(plan: Plan) -> str:
    """JSON text that `read_source` reads."""
    topology = plan.topology
    return json.dumps(
        {
            "version": _VERSION,
            "axes": dict(topology.axes),
            "order": topology.order,
            "offset": topology.offset,
            "failed": sorted(topology.failed),
            "speeds": {rank: str(speed) for rank, speed in plan.rank_speeds},
            "policy": asdict(plan.policy),
            "units": {name: asdict(units) for name, units in plan.units},
            "digest": plan.digest(),
        }
    )


def read_source(text: str) -> PlanSource:
    """What the plan of `text` was made from.

    Raises:
        ConfigError: Text of another form or version.
    """
    try:
        found = json.loads(text, parse_float=_no_integer, parse_constant=_no_integer)
        if found["version"] != _VERSION:
            raise not_a_plan(f"version {found['version']}, this is version {_VERSION}")
        return PlanSource(
            Topology(found["axes"], found["order"], offset=found["offset"]),
            Failures.from_global_ranks(found["failed"]),
            {
                name: Units(one["kind"], one["count"], tuple(one["sections"]), one["work"])
                for name, one in found["units"].items()
            },
            Policy(**found["policy"]),
            {int(rank): Fraction(speed) for rank, speed in found["speeds"].items()},
            str(found["digest"]),
        )
    except PcommError:
        raise
    except (
        TypeError,
        KeyError,
        AttributeError,
        ValueError,
        ZeroDivisionError,
        RecursionError,
    ) as error:
        raise not_a_plan(f"{type(error).__name__}: {error}") from error


def _no_integer(text: str) -> int:
    # Floats would get past comparisons, and fail or differ later.
    raise ValueError(f"{text}, where a plan has whole numbers alone")


def not_a_plan(found: str) -> ConfigError:
    """The error of a text from which no plan, or another plan, is made."""
    return ConfigError(
        "Plan.from_json",
        found=found,
        why="The text has what a plan was made from, and the digest shows that it is the same.",
        fix="Write it again by Plan.to_json with this version.",
    )
