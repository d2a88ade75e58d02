"""Sums of tagged gradients between threads: plans by their degrees, and a comparison of bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pcomm.core.collectives.spy import CallRecord, SpyCollectives
from pcomm.core.groups.groups import Groups
from pcomm.core.testing.poison import poisoned_memory
from pcomm.core.topology import Topology
from pcomm.ntp.planning.failures import Coord, Failures
from pcomm.ntp.planning.plan import Plan, plan
from pcomm.ntp.sync.grad_groups import Strategy, grad_groups
from pcomm.ntp.sync.grad_sync import GradSync
from pcomm.ntp.testing.tagged_model import TaggedModel, tagged_units, whole_shapes
from pcomm.ntp.testing.virtual_groups import run_on_virtual_groups

__all__ = [
    "assert_same_bits",
    "calls_of",
    "gradients_of",
    "on_tagged_ranks",
    "plan_of_degrees",
    "shards_of",
]


def plan_of_degrees(degrees: Sequence[int], **axes: int) -> Plan:
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
    made: Plan,
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
