"""What the ranks agree on before a `GradSync` is made: plan, arguments, groups, parameters."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from pcomm.core.groups.agreement import agree_in_group
from pcomm.core.groups.groups import Groups
from pcomm.core.tensor_parallel.param_layout import ParamLayout, param_layouts_of
from pcomm.ntp.planning.plan import Plan
from pcomm.ntp.sync import errors
from pcomm.ntp.sync.grad_groups import ALL, Strategy, group_names
from pcomm.ntp.sync.strategies import SumPlan
from pcomm.ntp.sync.synced_params import SyncedParam, synced_params

__all__ = ["agreed_params"]


def agreed_params(
    plan: Plan,
    model: nn.Module,
    groups: Groups,
    *,
    rank: int,
    strategy: Strategy,
    param_layouts: Mapping[str, ParamLayout] | None,
    bucket_bytes: int,
    reduce_dtype: torch.dtype | None,
) -> tuple[list[SyncedParam], SumPlan]:
    """The parameters of this rank that train, and the groups of their sums. Collective.

    Arguments and errors are those of `GradSync`, which calls it on all used ranks.
    """
    if plan.place(rank).is_idle:
        raise errors.idle_rank(rank)
    everyone = groups[ALL]
    lines = [*plan.agreed_lines(), f"strategy: {strategy}", f"bucket_bytes: {bucket_bytes}"]
    agree_in_group(everyone, "GradSync: plan", lines)
    error: Exception | None = None
    names: dict[tuple[int, ...], str] = {}
    params: list[SyncedParam] = []
    try:
        if not bucket_bytes > 0:
            raise errors.bad_argument("bucket_bytes", bucket_bytes, "a size of at least 1 byte")
        names = group_names(plan, strategy)
        for ranks, name in names.items():
            if rank in ranks:
                _check_group(groups, name, ranks, rank)
        layouts = param_layouts_of(model) if param_layouts is None else param_layouts
        params = synced_params(plan, model, rank, layouts, reduce_dtype)
    except Exception as problem:
        error = problem
    agree_in_group(everyone, "GradSync: model", [], error=error)
    sums = SumPlan(plan, rank, names, lambda ranks: groups[names[ranks]])
    # Each stage has parameters of its own.
    stage = sums.open_group(sums.replicated)
    agree_in_group(stage, "GradSync: parameters", [one.agreed for one in params])
    return params, sums


def _check_group(groups: Groups, name: str, ranks: tuple[int, ...], rank: int) -> None:
    if name not in groups:
        raise errors.other_group(name, ranks, "no such group is open")
    group = groups[name]
    if group.ranks != ranks or group.ranks[group.rank] != rank:
        found = f"an open group of {list(group.ranks)}, in which this is {group.rank}"
        raise errors.other_group(name, ranks, found)
