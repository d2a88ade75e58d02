"""How the packages combine into one parallel model: read this to see how each is used.

- topology: pure integers, which rank has which coordinate (`pcomm.core.topology`)
- groups: communicators with roles, opened together (`pcomm.core.groups`)
- model: layers that get their collectives as an argument (`pcomm.core.tensor_parallel`)
- sequences: shared by context-parallel ranks as each batch's plan says (`pcomm.gdn_cp.plan`)
- gradients: summed over replicas while backward still runs (`train.data_parallel`)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from pcomm.core.groups import Groups, GroupSpec, open_groups
from pcomm.core.topology import Topology
from pcomm.core.world import World
from pcomm.gdn_cp.plan import Plan
from pcomm.integration.config import Config, ParallelConfig
from pcomm.integration.models.initialisation import initialise
from pcomm.integration.models.language_model import LanguageModel

__all__ = ["EVERYONE", "Parallel", "build_model", "open_run_groups", "topology_of"]

EVERYONE = "dp_cp_tp"
"""The group of all ranks."""


def topology_of(parallel: ParallelConfig) -> Topology:
    """The ranks of a run; neighbours share a tensor-parallel group. Local."""
    return Topology({"dp": parallel.dp, "cp": parallel.cp, "tp": parallel.tp})


def open_run_groups(config: Config, world: World) -> Groups:
    """Every group that a run uses. Collective over all ranks.

    Gradients have a communicator of their own, so that their sum overlaps what layers exchange.
    So have the control plane and checkpoints: neither waits behind the other nor behind training,
    and they stay on gloo where training is on NCCL.
    """
    backend = "nccl" if world.device.type == "cuda" else "gloo"
    return open_groups(
        topology_of(config.parallel),
        [
            "tp",
            "cp",
            ("dp_cp", "gradients"),
            EVERYONE,
            GroupSpec(EVERYONE, "control", backend="gloo"),
            GroupSpec(EVERYONE, "checkpoint", backend="gloo"),
        ],
        backend=backend,
    )


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

    def plan(self, cu_seqlens: Sequence[int], *, verify: bool = False) -> Plan:
        """How the context-parallel ranks share sequences; see `LanguageModel.plan`."""
        return self.model.plan(
            cu_seqlens, self.groups["cp"], mode=self.sizes.cp_mode, verify=verify
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
    model = LanguageModel(
        config.model,
        config.data.vocabulary,
        tp.collectives,
        sequence_parallel=config.parallel.sequence,
        device=device,
        dtype=dtype,
    )
    initialise(model, config.model, seed=config.train.seed, tp_rank=tp.rank)
    return Parallel(model, groups, device, config.parallel)


def split_for_decay(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters that decay (matrices) and those that do not (norms)."""
    parameters = list(model.parameters())
    return [p for p in parameters if p.dim() >= 2], [p for p in parameters if p.dim() < 2]
