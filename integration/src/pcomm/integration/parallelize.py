"""How the packages combine into one parallel model: read this to see how each is used.

- topology: pure integers, which rank has which coordinate (`pcomm.core.topology`)
- groups: communicators with roles, opened together (`pcomm.core.groups.groups`)
- model: layers that get their collectives as an argument (`pcomm.core.tensor_parallel`)
- experts: another view of the same ranks, with one exchange each way (`models.moe`)
- sequences: shared by context-parallel ranks as each batch's plan says (`pcomm.gdn_cp.plan`)
- gradients: summed over replicas while backward still runs (`train.data_parallel`)
- shards: parameters, gradients and optimizer spread over the same ranks (`train.shards`)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn

from pcomm.core import Group, Groups, GroupSpec, Topology, open_groups
from pcomm.core.process import World
from pcomm.core.tensor_parallel import param_layouts_of
from pcomm.fsdp import Roles
from pcomm.gdn_cp import Plan
from pcomm.integration.config import Config, ParallelConfig
from pcomm.integration.models.initialisation import initialise
from pcomm.integration.models.language_model import LanguageModel
from pcomm.integration.models.moe.balance import Balance, rows_of_tokens

__all__ = ["EVERYONE", "Parallel", "Scope", "build_model", "open_run_groups", "topology_of"]

EVERYONE = "dp_cp_tp"
"""The group of all ranks."""


SAME_ROWS = "cp_tp"
"""The group of ranks that hold parts of the same rows of tokens."""


def topology_of(parallel: ParallelConfig) -> Topology:
    """The ranks of a run; neighbours share a tensor-parallel group. Local.

    For experts the same ranks are seen as `ep` that share the experts of a layer, again neighbours,
    times `edp` that hold the same ones. An expert is never split (`etp` is 1), so all ranks of dp,
    cp and tp take part, each with tokens of its own.
    """
    topology = Topology({"dp": parallel.dp, "cp": parallel.cp, "tp": parallel.tp})
    if parallel.data == "hybrid":
        within = parallel.shard_ranks
        outer = parallel.dp * parallel.cp // within
        topology = topology.view("data", {"outer": outer, "inner": within, "tp": parallel.tp})
    replicas = topology.world_size // parallel.ep
    return topology.view("expert", {"edp": replicas, "ep": parallel.ep, "etp": 1})


def open_run_groups(config: Config, world: World) -> Groups:
    """Every group that a run uses. Collective over all ranks.

    Gradients have a communicator of their own, so that their sum overlaps what layers exchange;
    so have gathers of sharded parameters, which do not queue behind them.
    So have the control plane and checkpoints: neither waits behind the other nor behind training,
    and they stay on gloo where training is on NCCL. Only a model with experts has groups for them.
    """
    backend = "nccl" if world.device.type == "cuda" else "gloo"
    experts, data = config.model.experts, config.parallel.data
    for_experts: list[str | tuple[str, str]] = [
        "expert.ep",
        ("expert.edp", "gradients"),
        SAME_ROWS,
    ]
    for_shards: list[str | tuple[str, str]] = [("dp_cp", "gather")]
    if data == "hybrid":
        for_shards = [("data.inner", "gather"), ("data.inner", "reduce"), ("data.outer", "reduce")]
    if experts:
        for_shards.append(("expert.edp", "gather"))
    return open_groups(
        topology_of(config.parallel),
        [
            "tp",
            "cp",
            ("dp_cp", "gradients"),
            *(for_experts if experts else []),
            *(for_shards if data != "replicate" else []),
            EVERYONE,
            GroupSpec(EVERYONE, "control", backend="gloo"),
            GroupSpec(EVERYONE, "checkpoint", backend="gloo"),
        ],
        backend=backend,
    )


_GROUPS_OF_SCOPE: Mapping[str, tuple[str, tuple[str, str]]] = MappingProxyType(
    {
        "dense": ("tp", ("dp_cp", "gradients")),
        "expert": ("expert.ep", ("expert.edp", "gradients")),
    }
)
"""The group that splits the parameters of a scope, and the one that sums their gradients."""


@dataclass(frozen=True)
class Scope:
    """The parameters that share groups; a model with experts has two scopes, others one.

    Args:
        name: As in `ParamLayout.scope`: `"dense"` or `"expert"`.
        split: The ranks over which the parameters are split, where they are.
        replicas: The ranks that hold the same parts of them. Each token's loss is divided by the
            number of targets in the global batch, so gradients are *summed* over them, for experts
            as for the rest, with no further divisor.
        parameters: By name.
    """

    name: str
    split: Group
    replicas: Group
    parameters: Mapping[str, nn.Parameter]


@dataclass(frozen=True)
class Parallel:
    """One rank's part of a model, and the groups it belongs to.

    Args:
        model: Its parameters.
        groups: Where it communicates.
        device: Where it computes.
        sizes: How many ranks there are along each axis.
    """

    model: LanguageModel
    groups: Groups
    device: torch.device
    sizes: ParallelConfig

    @property
    def dp_rank(self) -> int:
        """Which replica this rank belongs to."""
        return topology_of(self.sizes).coordinates(self.groups[EVERYONE].rank)["dp"]

    @property
    def dp_size(self) -> int:
        """Number of replicas, which share no sequence."""
        return self.sizes.dp

    @property
    def cp_rank(self) -> int:
        """This rank's place among those that share a sequence."""
        return self.groups["cp"].rank

    @property
    def tp_rank(self) -> int:
        """This rank's place among those that share every layer."""
        return self.groups["tp"].rank

    @property
    def scopes(self) -> tuple[Scope, ...]:
        """All parameters, each in one scope, with the groups that split and reduce them."""
        groups, placements = self.groups, param_layouts_of(self.model)
        found = {name: dict[str, nn.Parameter]() for name in _GROUPS_OF_SCOPE}
        for name, parameter in self.model.named_parameters():
            found[placements[name].scope][name] = parameter
        return tuple(
            Scope(name, groups[split], groups[replicas], MappingProxyType(found[name]))
            for name, (split, replicas) in _GROUPS_OF_SCOPE.items()
            if found[name]
        )

    def roles(self, scope: str) -> Roles:
        """Who gathers the parameters of a scope, where they are sharded, and sums gradients.

        Replicas of shards are for dense parameters; an expert has few replicas to spare.
        """
        groups = self.groups
        if scope == "expert":
            return Roles(groups["expert.edp", "gather"], groups["expert.edp", "gradients"])
        if self.sizes.data == "hybrid":
            inner = groups["data.inner", "gather"], groups["data.inner", "reduce"]
            return Roles(*inner, groups["data.outer", "reduce"])
        return Roles(groups["dp_cp", "gather"], groups["dp_cp", "gradients"])

    @property
    def ranks(self) -> dict[str, int]:
        """This rank's place among those that split the parameters of each scope."""
        return {scope.name: scope.split.rank for scope in self.scopes}

    def balance(self, plan: Plan, *, row_tokens: int, rows_in_batch: int) -> Balance | None:
        """What `token_losses` needs to balance experts; None where nothing has to be balanced.

        Args:
            plan: Of the micro-batch.
            row_tokens: Tokens in a row.
            rows_in_batch: Rows of the global batch of a step.
        """
        config = self.model.config
        if not (config.experts and config.balance_loss):
            return None
        return Balance(
            rows_of_tokens(plan, row_tokens, self.groups["tp"].collectives, self.device),
            num_rows=plan.tokens.num_tokens // row_tokens,
            row_tokens=row_tokens,
            rows_in_batch=rows_in_batch,
            coefficient=config.balance_loss,
            collectives=self.groups[SAME_ROWS].collectives,
        )

    def plan(self, cu_seqlens: Sequence[int], *, verify: bool = False) -> Plan:
        """How the context-parallel ranks share sequences; see `LanguageModel.plan`."""
        return self.model.plan(
            cu_seqlens, self.groups["cp"], strategy=self.sizes.cp_strategy, verify=verify
        )


def build_model(
    config: Config, groups: Groups, device: torch.device, *, dtype: torch.dtype = torch.float32
) -> Parallel:
    """This rank's part of the model of `config`, with its first weights. Local.

    Args:
        config: Validated, with every size filled in.
        groups: From `open_run_groups`.
        device: Where to compute.
        dtype: Of the parameters; training keeps them in fp32 and casts while it computes.
    """
    tp = groups["tp"]
    ep = groups["expert.ep"] if config.model.experts else None
    model = LanguageModel(
        config.model,
        config.data.vocabulary,
        tp.collectives,
        sequence_parallel=config.parallel.sequence,
        device=device,
        dtype=dtype,
        experts=ep.collectives if ep else None,
    )
    parallel = Parallel(model, groups, device, config.parallel)
    initialise(model, config.model, seed=config.train.seed, ranks=parallel.ranks)
    return parallel


def names_that_decay(model: nn.Module) -> frozenset[str]:
    """Parameters that decay: matrices, and not norms or what there is one of for each head."""
    return frozenset(name for name, parameter in model.named_parameters() if parameter.dim() >= 2)
