"""A step of a resilient run, counted on one process: its plan, its owners, and what may be lost."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from pcomm.core import GroupSpec, Topology
from pcomm.integration.config.sections import Resolved
from pcomm.integration.config.units import units_of_model
from pcomm.integration.data.batches import TrainBatches
from pcomm.integration.forecast.counted_step import CountedStep, StepCounter
from pcomm.integration.parallelize import PLANNED_NAMES, build_model
from pcomm.integration.replicas import PlannedReplicas, group_names, group_specs
from pcomm.integration.train.optimizers import ParameterKinds, make_optimizer
from pcomm.integration.train.trainer import Trainer
from pcomm.ntp import (
    Failures,
    GradSync,
    Policy,
    grad_groups,
    plan,
)
from pcomm.ntp.planning import Survival
from pcomm.ntp.sync import OwnedOptimizer

__all__ = ["ResilientStep", "count_resilient_step", "state_bytes"]

_SUMS = "sums of gradients"


@dataclass(frozen=True)
class ResilientStep:
    """A step on rank 0 while all ranks are there, and what the run survives.

    Args:
        step: The counted step, with the weights that owners send.
        weight_bytes: Least bytes that the rank sends of them, as one of `step.sent()`.
        survival: What may be lost at once of ranks and hosts.
        num_hosts: Number of hosts on which the ranks are.
    """

    step: CountedStep
    weight_bytes: int
    survival: Survival
    num_hosts: int

    def sent(self) -> dict[str, int]:
        """Least bytes that the rank sends in the step, by what they are for."""
        found: Counter[str] = Counter()
        for key, count in self.step.sent().items():
            # Of layers `run.tp.0.0`, of gradients and weights `ntp.0`.
            found[key.split(".")[1] if key.startswith("run.") else _SUMS] += count
        found[_SUMS] -= self.weight_bytes
        return {**found, "weights of owners": self.weight_bytes}


def count_resilient_step(
    config: Resolved, batches: TrainBatches, ranks_per_host: int
) -> ResilientStep:
    """The second step of a resilient run, on rank 0, as `count_step` counts that of others. Local.

    A few numbers are left out, by which the ranks of a session agree on each step.

    Args:
        config: Configuration of `validate_resilient`.
        batches: The batches of the run; their documents decide what attention computes.
        ranks_per_host: Ranks on one host, of which neighbours share one.

    Raises:
        PcommError: What a rank of the real run raises when it builds the model.
    """
    counter = StepCounter()
    with counter.counting():
        rank = _LoneRank(config, counter, ranks_per_host)
        model, made, owned = rank.model, rank.plan, rank.owned
        sync = GradSync(made, model, rank.opened, rank=0)
        replicas = PlannedReplicas(model, sync, made, 0)
        trainer = Trainer(
            model,
            rank.groups,
            config,
            batches,
            plan=made,
            replicas=replicas,
            optimizer=owned.optimizer,
            compares=False,
        )
        for index in range(2):
            counter.begin()
            trainer.accumulate(index)
            norm = replicas.finish()
            trainer.set_learning_rate(index)
            if config.train.clip_norm != "none":
                replicas.clip(config.train.clip_norm, norm)
            owned.step()
            before = counter.sent_bytes
            owned.gather_weights()
            weight_bytes = counter.sent_bytes - before
        states = [s for state in owned.optimizer.state.values() for s in state.values()]
        # Of parts that are no views of the weights.
        states += rank.parts
        step = counter.counted(list(model.parameters()), states)
    return ResilientStep(step, weight_bytes, owned.survival, rank.num_hosts)


def state_bytes(config: Resolved) -> tuple[int, int, int]:
    """Bytes of the weights, gradients and optimizer of rank 0 between two steps. Local.

    Counted without a step, in a second: what activations take comes to it.

    Args:
        config: Configuration of `validate_resilient`, with AdamW.
    """
    counter = StepCounter()
    with counter.counting():
        rank = _LoneRank(config, counter, 1)
    weights = {p.untyped_storage()._cdata: p.nbytes for p in rank.model.parameters()}
    copied = [p for p in rank.parts if p.untyped_storage()._cdata not in weights]
    averages = 2 * sum(part.nbytes for part in rank.parts)
    own = sum(weights.values())
    return own, own, averages + sum(part.nbytes for part in copied)


class _LoneRank:
    """Rank 0 of a resilient run whose other ranks are not there.

    Args:
        config: Configuration of `validate_resilient`.
        counter: Counts what is sent.
        ranks_per_host: Ranks on one host, of which neighbours share one.
    """

    def __init__(self, config: Resolved, counter: StepCounter, ranks_per_host: int) -> None:
        parallel = config.parallel
        topology = Topology({"dp": parallel.dp, "cp": parallel.cp, "tp": parallel.tp})
        units = units_of_model(config.model, config.data.vocabulary)
        self.plan = plan(topology, Failures(), units, Policy(drops_replicas=True))
        specs: list[str | tuple[str, str] | GroupSpec] = ["tp"]
        specs += [*group_specs(self.plan, ()), *grad_groups(self.plan)]
        self.opened = counter.open_groups(topology, specs)
        self.groups = self.opened.relabelled(group_names(self.plan, 0, PLANNED_NAMES))
        self.model = build_model(config, self.groups, torch.device("cpu"), form=self.plan.form(0))
        kinds = ParameterKinds.of(self.model)
        hosts = {rank: str(rank // ranks_per_host) for rank in topology.ranks}
        self.num_hosts = len(set(hosts.values()))
        self.owned = OwnedOptimizer(
            self.plan,
            self.opened,
            0,
            self.model,
            make_optimizer(self.model.named_parameters(), kinds, config.train),
            copies=parallel.copies if parallel.data == "shard" else None,
            hosts=hosts,
        )

    @property
    def parts(self) -> list[Tensor]:
        """What the optimizer has of each parameter."""
        groups = self.owned.optimizer.param_groups
        return [part for group in groups for part in group["params"]]
