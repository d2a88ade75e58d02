"""What a plan is made from, as JSON, strictly read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction

from pcomm.core.errors import ConfigError, PcommError
from pcomm.core.topology import Topology
from pcomm.ntp.planning.degrees import Policy
from pcomm.ntp.planning.failures import Failures
from pcomm.ntp.planning.units import Units

__all__ = ["VERSION", "PlanSource", "not_a_plan"]

VERSION = 3
"""Version of the JSON, and of what ranks compare."""


@dataclass(frozen=True)
class PlanSource:
    """What a plan was made from.

    Args:
        topology: The topology; its own failed ranks do not count.
        failures: Failed ranks, by number.
        units: Units by name or pattern.
        policy: The policy.
        speeds: Speed of each slow rank.
        digest: `NtpPlan.digest` of the plan that was made.
    """

    topology: Topology
    failures: Failures
    units: Mapping[str, Units]
    policy: Policy
    speeds: Mapping[int, Fraction]
    digest: str

    def to_json(self) -> str:
        """JSON text that `from_json` reads."""
        topology = self.topology
        return json.dumps(
            {
                "version": VERSION,
                "axes": dict(topology.axes),
                "order": topology.order,
                "offset": topology.offset,
                "failed": list(self.failures.global_ranks),
                "speeds": {rank: str(speed) for rank, speed in self.speeds.items()},
                "policy": asdict(self.policy),
                "units": {name: asdict(units) for name, units in self.units.items()},
                "digest": self.digest,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> PlanSource:
        """What the plan of `text` was made from.

        Raises:
            ConfigError: Text of another form or version.
        """
        try:
            found = json.loads(text, parse_float=_no_integer, parse_constant=_no_integer)
            if found["version"] != VERSION:
                raise not_a_plan(f"version {found['version']}, this is version {VERSION}")
            return cls(
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
