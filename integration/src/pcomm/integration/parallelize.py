"""How the packages combine into one parallel model: five steps, read from top to bottom.

Where ranks are missing, a plan of pcomm-ntp says who holds what: see `planned_groups` for step 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Literal

import torch
from torch import nn

from pcomm.core import Group, Groups, GroupSpec, Topology, open_groups
from pcomm.core.process import World
from pcomm.core.tensor_parallel import ParamLayout, param_layouts_of
from pcomm.fsdp import ReshardPolicy, Roles, Scope, Sharded, fully_shard
from pcomm.gdn_cp import Plan, StrategyName, make_plan
from pcomm.integration.config.nonuniform import plan_of
from pcomm.integration.config.sections import Resolved, ResolvedParallel
from pcomm.integration.models.experts import Experts
from pcomm.integration.models.initialisation import initialise
from pcomm.integration.models.language_model import Block, LanguageModel
from pcomm.integration.precision import precision_of, scope_in_fp32
from pcomm.integration.replicas import (
    DataParallel,
    PlannedReplicas,
    RunPlace,
    ShardedReplicas,
    group_names,
    group_specs,
    numbered,
    used_ranks,
)
from pcomm.ntp import GradSync, NtpPlan, grad_groups

__all__ = ["ALL_RANKS", "PLANNED_NAMES", "SAME_ROWS", "build_model", "open_run_groups", "place_of"]
__all__ += ["plan_sequences", "shard_parameters", "share_gradients", "splitting_groups"]
__all__ += ["topology_of"]

ALL_RANKS, SAME_ROWS = "dp_cp_tp", "cp_tp"
"""Keys of the group of all ranks, and of those that hold tokens of the same rows."""

_ROLES = ("control", "checkpoint")
PLANNED_NAMES = {"tp": "tp", "cp": "cp", "rows": SAME_ROWS, "all": ALL_RANKS}
"""Keys of the groups of a planned run by their kinds in `planned_groups`."""


def topology_of(parallel: ResolvedParallel) -> Topology:
    """Step 1: which rank has which coordinates; neighbours share a tensor-parallel group. Local.

    Integers, no torch. The ranks are seen in two more ways: the dense parameters have `outer`
    replicas of `inner` ranks each; the experts of a layer are spread over `ep` neighbours, and the
    ranks that hold the same experts are `outer` x `inner` again.
    """
    topology = Topology({"dp": parallel.dp, "cp": parallel.cp, "tp": parallel.tp})
    inner, outer = parallel.shard_ranks, parallel.dp * parallel.cp // parallel.shard_ranks
    topology = topology.view("data", {"outer": outer, "inner": inner, "tp": parallel.tp})
    holders = topology.world_size // parallel.ep
    # Replicas of shards are for dense parameters; an expert has few replicas to spare.
    inner = 1 if parallel.data == "replicate" else holders
    return topology.view("expert", {"outer": holders // inner, "inner": inner, "ep": parallel.ep})


def open_run_groups(
    config: Resolved, world: World, *, open_with: Callable[..., Groups] = open_groups
) -> Groups:
    """Step 2: every group that a run uses. Collective over all ranks.

    Gathers, sums of gradients, what layers exchange, control and checkpoints have communicators of
    their own, so that none queues behind another. A group of one rank has no communicator.

    Args:
        config: The validated configuration.
        world: All processes.
        open_with: The function that opens the groups; another one opens them without communication.
    """
    backend = "nccl" if world.device.type == "cuda" else "gloo"
    if (plan := plan_of(config)) is not None:
        # Processes are numbered without the failed ranks, and groups run along no axes.
        ranks = used_ranks(plan)
        specs = numbered((*group_specs(plan, _ROLES), *grad_groups(plan)), ranks)
        flat = open_with(Topology({"process": world.size}), specs, backend=backend)
        names = group_names(plan, ranks[world.rank], PLANNED_NAMES)
        return flat.relabelled(names, dict(enumerate(ranks)))
    wanted: list[str | tuple[str, str] | GroupSpec] = ["tp", "cp", ALL_RANKS]
    wanted += _keys_of_roles("data")
    if config.model.experts:
        wanted += ["expert.ep", SAME_ROWS, *_keys_of_roles("expert")]
    wanted += [GroupSpec(ALL_RANKS, role, backend="gloo") for role in _ROLES]
    return open_with(topology_of(config.parallel), wanted, backend=backend)


def _keys_of_roles(view: str) -> list[tuple[str, str]]:
    return [(f"{view}.inner", "gather"), (f"{view}.inner", "reduce"), (f"{view}.outer", "reduce")]


def place_of(config: Resolved, groups: Groups, plan: NtpPlan | None = None) -> RunPlace:
    """Where this rank stands, and which rows of a batch its replica takes. Local.

    Args:
        config: The validated configuration.
        groups: The groups of the run.
        plan: Plan of the ranks in use; None for that of the configuration, if it has one.
    """
    everyone, plan = groups[ALL_RANKS], plan or plan_of(config)
    if plan is None:
        return RunPlace.uniform(config, topology_of(config.parallel), everyone)
    return RunPlace.planned(config, plan, everyone)


def splitting_groups(groups: Groups) -> dict[str, Group]:
    """The group that splits the parameters of each scope of `ParamLayout`. Local."""
    keys = {"dense": "tp", "expert": "expert.ep"}
    return {scope: groups[key] for scope, key in keys.items() if key in groups}


def build_model(
    config: Resolved,
    groups: Groups,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    form: tuple[Fraction, ...] = (),
) -> LanguageModel:
    """Step 3: this rank's part of the model, with its first weights, on `device`. Local.

    Each layer is given its collectives. Parameters are of `dtype`; training keeps them in fp32. The
    weights of `model.from` are read afterwards. With `form`, the speeds of the tensor-parallel
    ranks, shares are proportional to these.
    """
    splitting = splitting_groups(groups)
    model = LanguageModel(
        config.model,
        config.data.vocabulary,
        groups["tp"].collectives,
        sequence_parallel=config.parallel.sequence,
        device=device,
        dtype=dtype,
        experts=splitting["expert"].collectives if "expert" in splitting else None,
        recompute=config.train.recompute,
        narrow_residual=config.train.residual == "compute",
        form=form,
    )
    if "expert" not in splitting:
        # Every rank has all experts, and the gradients of those tokens that it routes.
        for module in model.modules():
            if isinstance(module, Experts):
                module.param_layouts = dict.fromkeys(
                    module.param_layouts, ParamLayout(has_partial_gradient=True)
                )
    if not config.model.from_:
        ranks = {scope: group.rank for scope, group in splitting.items()}
        initialise(model, config.model, seed=config.train.seed, ranks=ranks)
    return model


def share_gradients(
    model: LanguageModel, config: Resolved, groups: Groups, plan: NtpPlan | None = None
) -> DataParallel:
    """Step 4: data parallelism, of shards or of uneven replicas. Collective over all ranks.

    Args:
        model: This rank's part of the model.
        config: The validated configuration.
        groups: The groups of the run.
        plan: Plan of the ranks in use; None for that of the configuration, if it has one.
    """
    plan = plan or plan_of(config)
    if plan is None:
        layouts = param_layouts_of(model)
        ranks = {scope: group.rank for scope, group in splitting_groups(groups).items()}
        sharded = shard_parameters(model, config, groups)
        return ShardedReplicas(model, sharded, layouts, ranks, groups["tp"].collectives)
    rank = place_of(config, groups, plan).rank
    return PlannedReplicas(model, GradSync(plan, model, groups, rank=rank), plan, rank)


def shard_parameters(model: LanguageModel, config: Resolved, groups: Groups) -> Sharded:
    """Step 4 of uniform replicas: parameters become shards, in place. Collective over all ranks.

    With `data = "replicate"` a shard is the whole parameter, and gradients are summed over replicas
    while backward runs. A loss is divided by the targets of the global batch: there is no divisor.
    """
    dtype, dense = config.train.dtype, Roles(*(groups[key] for key in _keys_of_roles("data")))
    units: list[type[nn.Module] | nn.Module] = [Block]
    stage = config.parallel.zero
    if config.parallel.data == "replicate":
        # Gradients add up until the last micro-batch, in which that of the head is the first.
        stage, units = 1, units if config.model.tie_embeddings else [Block, model.head]
    scopes = scope_in_fp32(model, dense, dtype, stage)
    if config.model.experts:
        layouts, roles = param_layouts_of(model), [groups[key] for key in _keys_of_roles("expert")]
        scopes["expert"] = Scope(
            lambda name, _: layouts[name].scope == "expert",
            Roles(*roles),
            divisor=1,
            spread=groups["expert.ep"],
            precision=precision_of(dtype, Roles(*roles)),
        )
    return fully_shard(
        model,
        dense,
        units=units,
        scopes=scopes,
        reshard=(ReshardPolicy.zero1, ReshardPolicy.zero2, ReshardPolicy.zero3)[stage - 1](),
        precision=precision_of(dtype, dense),
        divisor=1,
        entry_points=("forward", "token_losses"),
    )


def plan_sequences(
    model: LanguageModel,
    cu_seqlens: Sequence[int],
    group: Group | tuple[int, int] = (0, 1),
    *,
    strategy: Literal["auto"] | StrategyName = "auto",
    verify: bool = False,
) -> Plan:
    """Step 5: how the mixers share the sequences of one batch with the context-parallel `group`.

    Local; collective with `verify`. `cu_seqlens` are the offsets of the sequences in the tokens of
    all ranks, of which each rank holds one range between the layers. See `make_plan`.
    """
    # Shares of tensor-parallel ranks cannot be re-sharded, which leaves strategy `docs` out. Ranks
    # with different numbers of heads may find different strategies cheapest, and `docs` is the one
    # that all of them have to take together.
    without_docs = model.has_stream_shares or (strategy == "auto" and model.has_uneven_shards)
    return make_plan(
        cu_seqlens,
        group,
        model.specs,
        layout="contiguous",
        strategy=strategy,
        hidden_dim=None if without_docs else model.config.width,
        element_bytes=model.element_bytes,
        verify=verify,
    )
