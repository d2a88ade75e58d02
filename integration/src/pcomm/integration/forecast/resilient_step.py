"""A step of a resilient run, counted on one process: its plan, its owners, and what may be lost."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from pcomm.core import GroupSpec, Topology
from pcomm.integration.config.sections import Resolved
from pcomm.integration.config.units import units_of_model
from pcomm.integration.data.batches import TrainBatches
from pcomm.integration.forecast.counted_step import CountedStep, StepCounter
from pcomm.integration.forecast.lone_rank import lone_world
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

__all__ = ["ResilientStep", "count_resilient_step"]

_SUMS = "sums of gradients"


@dataclass(frozen=True)
class ResilientStep:
    """A step on rank 0 while all ranks are there, and what the run survives.

    Args:
        step: The counted step, with the weights that owners send.
        weight_bytes: Least bytes that the rank sends of them, as one of `step.sent()`.
        survival: What may be lost at once of ranks and hosts.
        num_hosts: Hosts of the ranks.
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
    parallel, counter = config.parallel, StepCounter()
    topology = Topology({"dp": parallel.dp, "cp": parallel.cp, "tp": parallel.tp})
    units = units_of_model(config.model, config.data.vocabulary)
    made = plan(topology, Failures(), units, Policy(drops_replicas=True))
    world = lone_world(topology.world_size)
    specs: tuple[str | GroupSpec, ...] = ("tp", *group_specs(made, ()), *grad_groups(made))
    opened = counter.open_groups(topology, specs)
    groups = opened.relabelled(group_names(made, world.rank, PLANNED_NAMES))
    hosts = {rank: str(rank // ranks_per_host) for rank in topology.ranks}
    with counter.counting():
        model = build_model(config, groups, world.device, form=made.form(0))
        kinds = ParameterKinds.of(model)
        optimizer = make_optimizer(model.named_parameters(), kinds, config.train)
        sync = GradSync(made, model, opened, rank=world.rank)
        owned = OwnedOptimizer(
            made,
            opened,
            world.rank,
            model,
            optimizer,
            copies=parallel.copies if parallel.data == "shard" else None,
            hosts=hosts,
        )
        replicas = PlannedReplicas(model, sync, made, world.rank)
        trainer = Trainer(
            model,
            groups,
            config,
            batches,
            plan=made,
            replicas=replicas,
            optimizer=optimizer,
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
        states = [s for state in optimizer.state.values() for s in state.values()]
        # Of parts that are no views of the weights.
        states += [part for group in optimizer.param_groups for part in group["params"]]
        step = counter.counted(list(model.parameters()), states)
    return ResilientStep(step, weight_bytes, owned.survival, len(set(hosts.values())))
