"""A small split model trained by `GradSync` and AdamW, and the same on one process, whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pcomm.core.collectives.identity import IdentityCollectives
from pcomm.core.collectives.protocol import Collectives
from pcomm.core.groups.open_groups import Groups
from pcomm.core.groups.spec import GroupSpec
from pcomm.core.layout import Layout
from pcomm.core.tensor_parallel import (
    ColumnParallelLinear,
    ParamLayout,
    RowParallelLinear,
    VocabularyParallelEmbedding,
    param_layouts_of,
    take_shard,
    vocabulary_parallel_cross_entropy,
)
from pcomm.ntp.planning.hosts import Hosts
from pcomm.ntp.planning.owners import Owners
from pcomm.ntp.planning.plan import NtpPlan
from pcomm.ntp.planning.units import Units
from pcomm.ntp.sync.grad_groups import Strategy, grad_groups, group_names, tensor_groups
from pcomm.ntp.sync.grad_sync import GradSync
from pcomm.ntp.sync.owned_params import OwnedParams, unit_sizes

__all__ = [
    "StepState",
    "assert_training",
    "train",
    "train_dense",
    "training_specs",
    "training_units",
]

_WIDTH, _VOCABULARY, _HIDDEN = 6, 13, 11
# Clips the first steps and not the last ones.
_MAX_NORM, _TOKENS = 0.6, 24


def training_units() -> dict[str, Units]:
    """Units of the small model."""
    return {
        "embedding.weight": Units.vocab(_VOCABULARY),
        "fc1.*": Units.gated(_HIDDEN),
        "fc2.weight": Units.columns(_HIDDEN),
    }


def training_specs(plan: NtpPlan, strategy: Strategy) -> list[GroupSpec]:
    """The groups of `GradSync`, and the tensor-parallel ones."""
    groups = tensor_groups(plan, 0)
    return [
        *(GroupSpec.of_ranks(one.ranks, f"tensor{number}") for number, one in enumerate(groups)),
        *grad_groups(plan, strategy),
    ]


@dataclass(frozen=True)
class StepState:
    """What a rank has after a step.

    Args:
        norm: Norm before clipping.
        tensors: Parameters and both moments of each, by name.
    """

    norm: Tensor
    tensors: dict[str, tuple[Tensor, Tensor, Tensor]]


class SmallModel(nn.Module):
    """Embedding, norm, gated layer, and a head that shares the embedding's weight."""

    def __init__(self, layout: Callable[[str], Layout], collectives: Collectives) -> None:
        super().__init__()
        self.vocabulary, self.collectives = layout("embedding.weight"), collectives
        dtype = torch.float64
        self.embedding = VocabularyParallelEmbedding(
            self.vocabulary, _WIDTH, collectives, dtype=dtype
        )
        self.norm = nn.LayerNorm(_WIDTH, dtype=dtype)
        self.fc1 = ColumnParallelLinear(
            _WIDTH, layout("fc1.weight"), collectives, bias=True, dtype=dtype
        )
        self.fc2 = RowParallelLinear(
            layout("fc2.weight"), _WIDTH, collectives, bias=True, dtype=dtype
        )
        self.head = ColumnParallelLinear(_WIDTH, self.vocabulary, collectives, dtype=dtype)
        self.head.weight = self.embedding.weight
        place = collectives.rank
        generator = torch.Generator().manual_seed(7)
        layouts = param_layouts_of(self)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                whole = torch.randn(
                    layouts[name].logical_shape(parameter.shape), generator=generator, dtype=dtype
                )
                parameter.copy_(_own(whole / 3, layouts[name], place))

    def forward(self, ids_T: Tensor, targets_T: Tensor) -> Tensor:
        """Mean nats per token."""
        x_TD = self.embedding(ids_T)
        gate_Tf, up_Tf = self.fc1(self.norm(x_TD)).chunk(2, -1)
        x_TD = x_TD + self.fc2(F.silu(gate_Tf) * up_Tf)
        logits_Tv = self.head(x_TD)
        return vocabulary_parallel_cross_entropy(
            logits_Tv, targets_T, self.vocabulary, self.collectives
        ).mean()


def train(
    plan: NtpPlan,
    rank: int,
    groups: Groups,
    *,
    strategy: Strategy = "interval",
    steps: int = 5,
    copies: int | None = None,
    after: Callable[[OwnedParams], None] | None = None,
) -> list[StepState]:
    """Train the shards of one rank, with two micro-batches of unequal size a step. Collective.

    Args:
        plan: Plan of the job.
        rank: Global rank.
        groups: Groups of `training_specs`.
        strategy: Strategy of the sums.
        steps: Number of steps.
        copies: Number of owners of each unit's optimizer state; None for all ranks that hold it.
        after: Function called with what the rank owns, after the last step.
    """
    place = plan.place(rank)
    mine = next(
        group
        for group in groups.values()
        if group.name.startswith("tensor") and rank in group.ranks
    )

    def layout(name: str) -> Layout:
        found = plan.units_of(name)
        assert found is not None
        return plan.layout(found[0], place.replica)

    model = SmallModel(layout, mine.collectives)
    # Fused kernels read and write without a look at strides.
    optimizer = _optimizer(model, fused=copies is not None)
    owned = None
    if copies is not None:
        sizes = unit_sizes(plan, model, optimizer, param_layouts_of(model))
        owners = Owners.deal(plan, rank, sizes, Hosts.of(plan.topology, copies))
        owned = OwnedParams(plan, rank, model, optimizer, param_layouts_of(model), owners)
    names = group_names(plan, strategy)
    shares = plan.token_shares(_TOKENS)
    first = sum(shares[: place.replica])
    sync = GradSync(plan, model, groups, rank=rank, strategy=strategy, bucket_bytes=256)
    states = []
    for step in range(steps):
        ids_T, targets_T = (x[first : first + shares[place.replica]] for x in _batch(step))
        for turn, part in enumerate((slice(0, 2), slice(2, None))):
            weight = len(ids_T[part]) / _TOKENS
            with sync.accumulate(is_last=turn == 1, weight=weight):
                model(ids_T[part], targets_T[part]).backward()
        sync.finish()
        norm = sync.clip_grad_norm_(_MAX_NORM)
        if owned is None:
            optimizer.step()
        else:
            owned.step()
            owned.gather_weights(lambda ranks: groups[names[ranks]])
        sync.zero_grad()
        moments = None
        if owned is not None:
            moments = dict(owned.gather_state(lambda ranks: groups[names[ranks]]))
        states.append(_state(norm, model, optimizer, moments))
    if after is not None and owned is not None:
        after(owned)
    sync.close()
    return states


def train_dense(steps: int = 5) -> list[StepState]:
    """The same training of the whole model, by one process and torch alone."""
    units = training_units()

    def layout(name: str) -> Layout:
        return units["fc1.*" if name.startswith("fc1") else name].layout(1)

    model = SmallModel(layout, IdentityCollectives())
    optimizer = _optimizer(model)
    states = []
    for step in range(steps):
        model(*_batch(step)).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), _MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        states.append(_state(norm, model, optimizer))
    return states


def assert_training(
    plan: NtpPlan, rank: int, found: list[StepState], dense: list[StepState], *, atol: float
) -> None:
    """Every parameter, both moments and the norm are those of the whole model, at every step."""
    place = plan.place(rank)
    assert len(found) == len(dense) > 0
    norms = [float(one.norm) for one in dense]
    assert min(norms) < _MAX_NORM < max(norms), norms
    for own, whole in zip(found, dense, strict=True):
        torch.testing.assert_close(own.norm, whole.norm, rtol=0, atol=atol)
        assert own.tensors.keys() == whole.tensors.keys()
        for name, tensors in own.tensors.items():
            units = plan.units_of(name)
            param_layout = ParamLayout()
            if units is not None:
                layout = plan.layout(units[0], place.replica)
                param_layout = ParamLayout(layout, 1 if name == "fc2.weight" else 0)
            for one, other in zip(tensors, whole.tensors[name], strict=True):
                expected = _own(other, param_layout, place.index)
                torch.testing.assert_close(one, expected, rtol=0, atol=atol)


def _optimizer(model: nn.Module, *, fused: bool = False) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1, fused=fused)


def _batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids_T = torch.randint(_VOCABULARY, (_TOKENS + 1,), generator=generator)
    return ids_T[:-1], ids_T[1:]


def _state(
    norm: Tensor,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    moments: Mapping[str, Tensor] | None = None,
) -> StepState:
    tensors: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    state: Mapping[Tensor, dict[str, Tensor]] = optimizer.state
    for name, parameter in model.named_parameters():
        if moments is None:
            own = state[parameter]
        else:
            own = {key: moments[f"optimizer.{key}.{name}"] for key in ("exp_avg", "exp_avg_sq")}
        kept = parameter.detach(), own["exp_avg"], own["exp_avg_sq"]
        tensors[name] = kept[0].clone(), kept[1].clone(), kept[2].clone()
    return StepState(norm, tensors)


def _own(whole: Tensor, param_layout: ParamLayout, place: int) -> Tensor:
    if param_layout.layout is None:
        return whole
    return take_shard(whole, param_layout.layout, place, dim=param_layout.dim)
