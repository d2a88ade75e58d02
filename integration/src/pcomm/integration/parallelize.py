"""How the packages combine into one parallel model: read this to see how each is used.

- topology: pure integers, which rank has which coordinate (`pcomm.core.topology`)
- groups: communicators with roles, opened together (`pcomm.core.groups`)
- model: layers that get their collectives as an argument (`pcomm.core.tensor_parallel`)
- gradients: summed over replicas while backward still runs (`train.data_parallel`)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from pcomm.core.groups import Groups, GroupSpec, open_groups
from pcomm.core.topology import Topology
from pcomm.core.world import World
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

    The control plane and checkpoints have communicators of their own, so that neither waits
    behind the other nor behind training; they stay on gloo where training is on NCCL.
    """
    backend = "nccl" if world.device.type == "cuda" else "gloo"
    return open_groups(
        topology_of(config.parallel),
        [
            "tp",
            "dp_cp",
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
    """

    model: LanguageModel
    groups: Groups
    device: torch.device

    @property
    def dp_rank(self) -> int:
        """Which replica this rank belongs to."""
        return self.groups["dp_cp"].rank

    @property
    def dp_size(self) -> int:
        """Number of replicas."""
        return self.groups["dp_cp"].size

    @property
    def tp_rank(self) -> int:
        """This rank's place within its replica."""
        return self.groups["tp"].rank


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
    return Parallel(model, groups, device)


def split_for_decay(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters that decay (matrices) and those that do not (norms)."""
    parameters = list(model.parameters())
    return [p for p in parameters if p.dim() >= 2], [p for p in parameters if p.dim() < 2]
