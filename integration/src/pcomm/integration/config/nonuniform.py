"""Failed ranks: the plan, and whether the ranks that are left fit."""

from __future__ import annotations

from pcomm.core import Layout, Topology
from pcomm.core.errors import ConfigError, TopologyError, UnsupportedError
from pcomm.integration.config.model_rules import (
    mixer_units,
    must_share_heads,
    output_heads,
    split_dimensions,
)
from pcomm.integration.config.sections import (
    WHOLE_STAGE,
    ParallelConfig,
    Resolved,
    ResolvedModel,
    ResolvedParallel,
    given,
    values_of,
)
from pcomm.integration.config.units import units_of_model
from pcomm.ntp import Failures, NtpPlan, plan

__all__ = ["check_ranks_left", "plan_of", "plan_without_failed", "resolve_with_failed"]


def plan_of(config: Resolved) -> NtpPlan | None:
    """The plan of a run in which ranks have failed before its start; None without any. Local."""
    if not config.parallel.failed:
        return None
    return plan_without_failed(config.model, config.data.vocabulary, config.parallel)


def resolve_with_failed(parallel: ParallelConfig) -> ResolvedParallel:
    """`parallel` of a run with failed ranks, of which `dp` has to be a number.

    Raises:
        ConfigError: `dp` is "auto", or a key of sharding has a value of its own.
        UnsupportedError: Parameters are sharded, or experts are spread over ranks.
    """
    if parallel.dp == "auto":
        raise ConfigError(
            "parallel.dp",
            found=f"'auto' with parallel.failed = {list(parallel.failed)}",
            why="Failed ranks are named by their places in the grid, so its size has to be known.",
            fix="Set parallel.dp to the number of replicas, damaged ones included.",
        )
    if parallel.data != "replicate" or parallel.ep > 1:
        is_sharded = parallel.data != "replicate"
        raise UnsupportedError(
            "parallel.data" if is_sharded else "parallel.ep",
            found=f"the value {parallel.data if is_sharded else parallel.ep!r} with "
            f"parallel.failed = {list(parallel.failed)}",
            why="Ranks of replicas with different numbers of tp ranks hold different parts of the "
            "parameters, so no two of them can share a shard of one."
            if is_sharded
            else "The ranks that are left need not divide into groups that share the experts.",
            fix="Set parallel.data = 'replicate'; tp, cp and parallel.sequence work."
            if is_sharded
            else "Set parallel.ep = 1, so that each rank holds all experts.",
        )
    zero = given(parallel.zero, WHOLE_STAGE)
    if zero != WHOLE_STAGE or parallel.shard_ranks not in ("auto", 1):
        raise ConfigError(
            "parallel.zero" if parallel.shard_ranks in ("auto", 1) else "parallel.shard_ranks",
            found="a value of its own with parallel.failed",
            why="Every rank of tp holds its whole part of the parameters then.",
            fix="Leave the key away.",
        )
    resolved = {"dp": parallel.dp, "shard_ranks": 1, "zero": zero}
    return ResolvedParallel(**{**values_of(parallel), **resolved})


def plan_without_failed(
    model: ResolvedModel, vocabulary: int, parallel: ResolvedParallel
) -> NtpPlan:
    """Degree and units of every rank that is left. Local; the same on all ranks.

    Raises:
        ConfigError: A failed rank is not named by coordinates or number, or ranks of tp would have
            no unit of a dimension.
        TopologyError: A failed rank is not in the grid, or none is left of a group of tp.
    """
    for key, size, part in split_dimensions(model, vocabulary):
        # No shared expert has no columns.
        if 0 < size < parallel.tp:
            raise ConfigError(
                key,
                found=f"the value {size}, and parallel.tp is {parallel.tp}",
                why=f"Each rank of tp holds at least one of the {part}.",
                fix=f"Set {key} to {parallel.tp} or more, or parallel.tp to {size} or less.",
            )
    topology = Topology({"dp": parallel.dp, "cp": parallel.cp, "tp": parallel.tp})
    try:
        failures = Failures.parse(*parallel.failed)
        return plan(topology, failures, units_of_model(model, vocabulary))
    except (ConfigError, TopologyError) as error:
        # It names a function of pcomm-ntp, and the user has written a key.
        raise type(error)(
            f"parallel.failed = {list(parallel.failed)}",
            found=f"{error.asked}: {error.found}",
            why=error.why,
            fix=error.fix,
        ) from error


def check_ranks_left(
    plan: NtpPlan, model: ResolvedModel, parallel: ResolvedParallel, world_size: int
) -> None:
    """Refuse another number of processes than ranks that are left and have work.

    Raises:
        ConfigError: Ranks would be idle, or ranks of cp cannot share heads evenly.
        TopologyError: `world_size` is another number.
    """
    topology = plan.topology
    if plan.idle_ranks:
        places = (topology.coordinates(rank) for rank in plan.idle_ranks)
        idle = [",".join(f"{axis}={at[axis]}" for axis in topology.axes) for at in places]
        raise ConfigError(
            "parallel.failed",
            found=f"ranks that are left and would be idle: {idle}",
            why="The ranks of cp of a replica exchange heads, so their groups of tp are of one "
            "size, that of the smallest.",
            fix="Add them to parallel.failed, and start as many processes fewer.",
        )
    left = topology.world_size - len(topology.failed)
    if world_size != left:
        raise TopologyError(
            "parallel",
            found=f"dp {parallel.dp}, tp {parallel.tp}, cp {parallel.cp} without "
            f"{len(topology.failed)} failed ranks, for {world_size} ranks",
            why="Each rank that is left is one process: dp x tp x cp less the failed ones.",
            fix=f"Start {left} ranks, or change parallel.failed.",
        )
    if parallel.cp_strategy == "heads":
        _check_heads(plan, model, parallel)


def _check_heads(plan: NtpPlan, model: ResolvedModel, parallel: ResolvedParallel) -> None:
    units = mixer_units(model)
    degrees = sorted({degree for own in plan.degrees for degree in own})
    for letter, key, size in output_heads(model):
        for degree in degrees:
            for count in Layout.cuts(units[letter], degree).sizes:
                heads = size // units[letter] * count
                must_share_heads(key, f"a rank of tp={degree}", heads, parallel.cp)
