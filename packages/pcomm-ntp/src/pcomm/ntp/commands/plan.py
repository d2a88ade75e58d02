"""`pcomm plan`: what a job does after failures, and what that costs, before it happens."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from fractions import Fraction
from typing import Any, get_args

from pcomm.ntp.commands.cluster_options import (
    add_cluster_options,
    failures_of,
    speeds_of,
    topology_of,
)
from pcomm.ntp.commands.units_options import add_units_options, units_of_options
from pcomm.ntp.planning.plan import Plan, plan
from pcomm.ntp.planning.policy import Policy, Rounding

__all__ = ["PlanCommand", "command"]


class PlanCommand:
    """Plans a job with failed and slow ranks; starts nothing, and needs no torch."""

    name = "plan"
    help = "Show the tensor-parallel degrees after failures, their cost, and what else is possible."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Options for the ranks, for the units, and for what is printed."""
        add_cluster_options(parser)
        add_units_options(parser)
        parser.add_argument(
            "--policy",
            choices=get_args(Rounding),
            default="max",
            help="use every surviving rank, or the fewest that are as fast (%(default)s)",
        )
        parser.add_argument(
            "--simulate",
            nargs="?",
            type=float,
            const=True,
            metavar="SHARE",
            help="predict the throughput of other schemes, too, for as many failures at random "
            "places, or for a share of all ranks",
        )
        parser.add_argument(
            "--json", action="store_true", help="print one JSON object, which has the plan itself"
        )

    def run(self, arguments: argparse.Namespace) -> int:
        """Print the plan, its cost, and predictions."""
        topology = topology_of(arguments)
        made = plan(
            topology,
            failures_of(arguments),
            units_of_options(arguments),
            Policy(arguments.policy),
            speeds=speeds_of(arguments.speeds, topology),
        )
        rows: list[Any] = []
        if arguments.simulate is not None:
            # Imported late: the simulator needs NumPy, and a plan does not.
            from pcomm.ntp.commands.prediction import predicted

            # Without a share it is True: as many failures as were named.
            share = None if arguments.simulate is True else arguments.simulate
            rows = predicted(made, share)
        if arguments.json:
            found = [{"scheme": words, **asdict(row)} for words, row in rows]
            print(json.dumps(_document(made) | {"simulated": found}, default=_number))
            return 0
        print(made.explain())
        cost = made.cost()
        idle = f", {len(made.idle_ranks)} surviving ranks idle" if made.idle_ranks else ""
        print(f"at most {cost.most_segments} groups sum the gradients of a parameter{idle}")
        if rows:
            row = rows[0][1]
            print(
                f"\nsimulated: {row.fleet}, {row.failed:g} failed, mean of {row.placements} random "
                "choices of places\nthroughput over that of the ranks that are left (ideal 1), "
                "predicted and not measured:"
            )
            for words, row in rows:
                print(f"  {row.ratio:.4f}  {words}")
        return 0


def _document(made: Plan) -> dict[str, Any]:
    """The plan, which `Plan.from_json` reads again, and what was derived from it."""
    return {
        "plan": json.loads(made.to_json()),
        "degrees": made.degrees,
        "idle_ranks": made.idle_ranks,
        "replica_speeds": made.speeds,
        "cost": asdict(made.cost()),
        "swaps": [str(swap) for swap in made.packing.swaps],
    }


def _number(value: object) -> float:
    if isinstance(value, Fraction):
        return float(value)
    raise TypeError(f"{type(value).__name__} in a plan")


command = PlanCommand()
