"""What a session is given once, the same on all ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata

import torch

from pcomm.core import Groups, Topology
from pcomm.ntp.planning.failures import Failures
from pcomm.ntp.planning.plan import Plan, plan
from pcomm.ntp.planning.policy import Policy
from pcomm.ntp.planning.units import Units
from pcomm.ntp.session.meeting import Patience
from pcomm.ntp.session.opening import Spec
from pcomm.ntp.session.training_state import Built
from pcomm.ntp.sync.grad_groups import Strategy

__all__ = ["Build", "Job", "Restore"]

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
