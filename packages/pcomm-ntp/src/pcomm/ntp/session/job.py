"""What a session is given once, the same on all ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata

import torch

from pcomm.core import Groups, Topology
from pcomm.core.errors import UnsupportedError
from pcomm.ntp.planning.failures import Failures
from pcomm.ntp.planning.plan import Plan, plan
from pcomm.ntp.planning.policy import Policy
from pcomm.ntp.planning.units import Units
from pcomm.ntp.session.meeting import Patience
from pcomm.ntp.session.opening import Spec
from pcomm.ntp.session.training_state import Built
from pcomm.ntp.sync.grad_groups import Strategy

__all__ = ["Build", "Job", "Restore", "along_dp"]

Build = Callable[[Plan, Groups, int], Built]
Restore = Callable[[Plan, torch.nn.Module, torch.optim.Optimizer], int]


@dataclass(frozen=True)
class Job:
    """A training job that outlives its ranks.

    Args:
        topology: Axes and sizes of the whole job, without failures.
        units: Units of parameters, by name or pattern.
        build: Function that makes model and optimizer of a rank for a plan and its groups.
        policy: Rounding of degrees, and the limit on memory.
        failures: Ranks that are gone from the start.
        groups: Groups that the model needs beside `tp`; a function of the plan, or a list.
        strategy: Strategy by which gradients are summed.
        backend: `"gloo"` or `"nccl"`.
        restore: Function that loads a checkpoint; None where there is none.
        has_end: True if the program has a function for the end of the job.
        facts: Facts that must be the same on all ranks, such as a digest of the configuration.
        patience: Time limits.
        device: Device of tensors between ranks.
    """

    topology: Topology
    units: Mapping[str, Units]
    build: Build
    policy: Policy
    failures: Failures
    groups: Sequence[Spec] | Callable[[Plan], Sequence[Spec]]
    strategy: Strategy
    backend: str
    restore: Restore | None
    has_end: bool
    facts: Mapping[str, str]
    patience: Patience
    device: torch.device

    @property
    def first_ranks(self) -> tuple[int, ...]:
        """Ranks with which the job starts."""
        gone = self.topology.failed | self.failures.ranks(self.topology)
        return tuple(rank for rank in self.topology.ranks if rank not in gone)

    def plan(self, ranks: tuple[int, ...], speeds: Mapping[int, float]) -> Plan:
        """The plan for the ranks that are there."""
        whole = Topology(self.topology.axes, self.topology.order, offset=self.topology.offset)
        return self._plan(whole, ranks, speeds)

    def last_plan(self, ranks: tuple[int, ...], speeds: Mapping[int, float]) -> Plan:
        """The plan of ranks that cannot go on, but may hold all units, for the end of the job.

        As many tensor-parallel groups as the job has replicas, each a replica with `cp` of 1.

        Raises:
            UnsupportedError: There are pipeline stages or slow ranks, or `tp` is not the fastest
                axis.
        """
        made = self._plan(_along_dp(self.topology, speeds), ranks, speeds)
        degrees = made.degrees
        best = sorted(range(len(degrees)), key=lambda one: degrees[one], reverse=True)
        kept = best[: self.topology.axes["dp"]]
        return replace(
            made, degrees=tuple(own if i in kept else (0,) for i, own in enumerate(degrees))
        )

    def _plan(self, whole: Topology, ranks: tuple[int, ...], speeds: Mapping[int, float]) -> Plan:
        gone = Failures.from_global_ranks(sorted(set(whole.ranks).difference(ranks)))
        given = {"speeds": dict(speeds)} if speeds else {}
        policy = replace(self.policy, drops_replicas=True)
        return plan(whole, gone, self.units, policy, **given)

    def groups_of(self, made: Plan) -> tuple[Spec, ...]:
        """The groups of the caller for a plan."""
        return tuple(self.groups(made) if callable(self.groups) else self.groups)

    def all_facts(self) -> dict[str, str]:
        """Facts that a process shares with those of its job, by name."""
        units = {name: str(own) for name, own in self.units.items()}
        digest = hashlib.blake2b(json.dumps(units, sort_keys=True).encode(), digest_size=8)
        return {
            "pcomm-core": metadata.version("pcomm-core"),
            "pcomm-ntp": metadata.version("pcomm-ntp"),
            "torch": torch.__version__,
            "topology": self.topology.describe(),
            "units": digest.hexdigest(),
            "policy": str(self.policy),
            "strategy": self.strategy,
            **{name: str(fact) for name, fact in self.facts.items()},
        }


def along_dp(made: Plan) -> Plan:
    """A plan by which each rank holds what it does by `made`, with all axes but `tp` in `dp`.

    Raises:
        UnsupportedError: There are pipeline stages or slow ranks, or `tp` is not the fastest axis.
    """
    topology = _along_dp(made.topology, made.rank_speeds)
    firsts = topology.ranks[:: topology.axes["tp"]]
    degrees = tuple(made.degrees[made.topology.coordinates(rank)["dp"]] for rank in firsts)
    return Plan(topology.with_failed(made.topology.failed), made.units, made.policy, degrees)


def _along_dp(topology: Topology, speeds: object) -> Topology:
    """The same ranks and tensor-parallel groups, each of these at another place of `dp`."""
    size = topology.axes["tp"]
    # What the groups along cp of a replica hold depends on the slow ranks of all of them.
    if topology.order[0] != "tp" or topology.axes.get("pp", 1) > 1 or speeds:
        raise UnsupportedError(
            f"Session: the end of a job of {topology.describe()}",
            found="pipeline stages, slow ranks, or tp not as the fastest axis",
            why="A tensor-parallel group is no replica of its own then.",
            fix="Start the job again from its last checkpoint.",
        )
    axes = dict.fromkeys(topology.axes, 1) | {"tp": size, "dp": topology.world_size // size}
    return Topology(axes, topology.order, offset=topology.offset)
