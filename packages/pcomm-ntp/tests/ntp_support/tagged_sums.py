"""Gradients that tell parameter, row and column, and their sums between threads, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ntp_support.virtual_groups import run_on_virtual_groups
from pcomm.core.collectives.instrumented import CallRecord, SpyCollectives
from pcomm.core.groups.open_groups import Groups
from pcomm.core.tensor_parallel.split import ParamLayout, take_shard
from pcomm.core.testing.assertions import poisoned_memory
from pcomm.core.topology import Topology
from pcomm.ntp.planning.failures import Coord, Failures
from pcomm.ntp.planning.plan import NtpPlan, plan
from pcomm.ntp.planning.units import Units
from pcomm.ntp.sync.grad_groups import Strategy, grad_groups
from pcomm.ntp.sync.grad_sync import GradSync

__all__ = [
    "TaggedModel",
    "assert_same_bits",
    "calls_of",
    "gradients_of",
    "on_tagged_ranks",
    "plan_of_degrees",
    "shards_of",
    "summed_gradients",
    "tagged_units",
    "tags",
    "whole_shapes",
]


# Name of a parameter, its shape, the dimension along which it is split.
_PARAMS: Mapping[str, tuple[tuple[int, ...], int]] = {
    "embedding.weight": ((22, 5), 0),
    "0.norm": ((5,), 0),
    "0.partial_norm": ((5,), 0),
    "0.qkv.weight": ((5 * 8, 5), 0),
    "0.qkv.bias": ((5 * 8,), 0),
    "0.out.weight": ((5, 5 * 4), 1),
    "0.out.bias": ((5,), 0),
    "0.gdn.weight": ((7 * 10, 3), 0),
    "0.fc1.weight": ((2 * 22, 5), 0),
    "0.fc2.weight": ((5, 22), 1),
    "0.frozen": ((4,), 0),
    "router": ((3, 5), 0),
}


def tagged_units() -> dict[str, Units]:
    """Units of the model's split parameters, by pattern: none of them divides by 4."""
    return {
        "embedding.weight": Units.vocab(22),
        "*.qkv.*": Units.gqa(q=10, kv=5, dim=2),
        "*.out.weight": Units.columns(20, block=4),
        "*.gdn.weight": Units.fused(7, sections=(2, 2, 4, 1, 1)),
        "*.fc1.weight": Units.gated(22, block=2),
        "*.fc2.weight": Units.columns(22, block=2),
        "router": Units.replicated(),
    }


def whole_shapes() -> dict[str, tuple[int, ...]]:
    """Shape of each whole parameter that trains."""
    return {name: shape for name, (shape, _) in _PARAMS.items() if name != "0.frozen"}


class TaggedModel(nn.Module):
    """The shards of one rank, each used once by `loss`.

    `head` is the embedding's weight under a second name. `0.frozen` does not train, and
    `0.partial_norm` has a partial gradient.

    Args:
        plan: Plan whose layouts the shards have.
        rank: Global rank.
        dtype: Data type of the parameters.
    """

    def __init__(self, plan: NtpPlan, rank: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.place = plan.place(rank)
        self.param_layouts: dict[str, ParamLayout] = {}
        self._flat: dict[str, nn.Parameter] = {}
        for name, (shape, dim) in _PARAMS.items():
            found = plan.units_of(name)
            layout = None
            if found is not None and found[1].is_split:
                layout = plan.layout(found[0], self.place.replica, self.place.stage)
            partial = name == "0.partial_norm"
            self.param_layouts[name] = ParamLayout(layout, dim, partial)
            parameter = nn.Parameter(self.own(name, torch.ones(shape, dtype=dtype)).clone())
            parameter.requires_grad_(name != "0.frozen")
            self._flat[name] = parameter
        for name, parameter in self._flat.items():
            module: nn.Module = self
            *folders, last = name.split(".")
            for folder in folders:
                if folder not in dict(module.named_children()):
                    module.add_module(folder, nn.Module())
                module = module.get_submodule(folder)
            module.register_parameter(last, parameter)
        self.head = nn.Module()
        self.head.weight = self._flat["embedding.weight"]

    def own(self, name: str, whole: Tensor) -> Tensor:
        """This rank's shard of a whole tensor of parameter `name`."""
        param_layout = self.param_layouts[name]
        if param_layout.layout is None:
            return whole
        return take_shard(whole, param_layout.layout, self.place.index, dim=param_layout.dim)

    def loss(self, upstream: Mapping[str, Tensor]) -> Tensor:
        """A number whose gradient is, for each parameter named, this rank's shard of `upstream`."""
        terms = []
        for name, whole in upstream.items():
            gradient = self.own(name, whole)
            if name == "0.partial_norm":
                gradient = _part(gradient, self.place.index, self.place.degree)
            if name == "embedding.weight":
                # Half by either of its names; powers of two are exact.
                terms.append((self.get_parameter("head.weight") * gradient / 2).sum())
                gradient = gradient / 2
            terms.append((self._flat[name] * gradient).sum())
        return torch.stack([term.double() for term in terms]).sum()


def _part(gradient: Tensor, index: int, degree: int) -> Tensor:
    """What one of `degree` ranks adds to a gradient: some of its elements."""
    mine = torch.arange(gradient.numel()) % degree == index
    return gradient * mine.to(gradient.dtype)


def tags(replica: int, *, seed: int | None = None) -> dict[str, Tensor]:
    """A whole gradient for each parameter that trains, as one replica's batch gives it.

    Integers that tell the parameter, the row, the column and the replica; random numbers with a
    seed.
    """
    found = {}
    for number, (name, shape) in enumerate(whole_shapes().items(), 1):
        size = torch.Size(shape).numel()
        if seed is None:
            places = torch.arange(size, dtype=torch.float64)
            # Even, since one parameter's comes in two halves.
            tag = 2 * (number * 100_000 + places * 10 + replica + 1)
        else:
            generator = torch.Generator().manual_seed(seed * 1000 + number * 10 + replica)
            tag = torch.randn(size, dtype=torch.float64, generator=generator)
        found[name] = tag.view(shape)
    return found


def summed_gradients(weights: Mapping[int, float], *, seed: int | None = None) -> dict[str, Tensor]:
    """The weighted sum of `tags` over replicas, whole: what every rank has to have its shard of."""
    total: dict[str, Tensor] = {}
    for replica, weight in weights.items():
        for name, tag in tags(replica, seed=seed).items():
            total[name] = total[name] + weight * tag if name in total else weight * tag
    return total


def plan_of_degrees(degrees: Sequence[int], **axes: int) -> NtpPlan:
    """A plan of the tagged model whose replicas have these degrees: their first ranks have failed.

    Args:
        degrees: Degree of each replica; the largest one is the full degree.
        axes: Sizes of other axes. Groups at their first coordinates are damaged.
    """
    full = max(degrees)
    topology = Topology({"dp": len(degrees), **axes, "tp": full})
    rest = dict.fromkeys(axes, 0)
    gone = [
        Coord(dp=dp, tp=tp, **rest) for dp, own in enumerate(degrees) for tp in range(full - own)
    ]
    return plan(topology, Failures.at(*gone), tagged_units())


def on_tagged_ranks(
    made: NtpPlan,
    task: Callable[[GradSync, TaggedModel, Groups], Any],
    strategy: Strategy = "interval",
    *,
    dtype: torch.dtype = torch.float64,
    change: Callable[[TaggedModel], object] = lambda model: None,
    **options: Any,
) -> dict[int, Any]:
    """What `task` returns on each used rank, with a model and a GradSync that is closed after.

    Args:
        made: Plan of the job.
        task: Task of a rank.
        strategy: Strategy of the sums.
        dtype: Data type of the model.
        change: Changes the model before its GradSync is made.
        options: Other arguments of `GradSync`.
    """

    def run(rank: int, groups: Groups) -> Any:
        if made.place(rank).is_idle:
            return None
        model = TaggedModel(made, rank, dtype)
        change(model)
        sync = GradSync(made, model, groups, rank=rank, strategy=strategy, **options)
        return task(sync, model, groups)

    with poisoned_memory():
        return run_on_virtual_groups(made.topology, grad_groups(made, strategy), run)


def calls_of(groups: Groups) -> list[CallRecord]:
    """All operations of a rank so far; each group is there under two keys."""
    spies = {id(group): group.collectives for group in groups.values()}
    return [c for spy in spies.values() if isinstance(spy, SpyCollectives) for c in spy.calls]


def gradients_of(model: TaggedModel) -> dict[str, Tensor]:
    """Copies of the gradients of a rank."""
    named = {name: model.get_parameter(name).grad for name in whole_shapes()}
    return {name: gradient.clone() for name, gradient in named.items() if gradient is not None}


def shards_of(model: TaggedModel, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A rank's shards of whole tensors."""
    return {name: model.own(name, one) for name, one in whole.items()}


def assert_same_bits(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """The same names, and equal tensors under each."""
    assert found.keys() == expected.keys()
    wrong = [name for name in found if not torch.equal(found[name], expected[name])]
    assert wrong == []
