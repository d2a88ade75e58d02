"""The groups of a run whose tensor-parallel groups have different sizes.

Every such group is one of explicit ranks, which all ranks list under a name of its own. A rank
then finds the one it belongs to under the name that it has in a uniform run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pcomm.core import GroupSpec
from pcomm.ntp import Plan

__all__ = ["group_names", "group_specs", "numbered", "used_ranks"]

_ALL = "run.all"


def used_ranks(plan: Plan) -> tuple[int, ...]:
    """Global ranks that have work, ascending. Local."""
    unused = plan.topology.failed.union(plan.idle_ranks)
    return tuple(rank for rank in plan.topology.ranks if rank not in unused)


def group_specs(plan: Plan, roles: Sequence[str]) -> tuple[GroupSpec, ...]:
    """Groups along tp and cp, those of ranks with tokens of the same rows, and that of all. Local.

    Args:
        plan: The plan of the run.
        roles: Further roles of the group of all ranks, whose communicators are on the host.
    """
    members: dict[str, list[int]] = defaultdict(list)
    for rank in used_ranks(plan):
        for name in _names(plan, rank).values():
            members[name].append(rank)
    specs = [GroupSpec.of_ranks(members[name], name) for name in sorted(members)]
    return (*specs, *(GroupSpec.of_ranks(members[_ALL], _ALL, r, backend="gloo") for r in roles))


def numbered(specs: Sequence[GroupSpec], ranks: Sequence[int]) -> list[GroupSpec]:
    """`specs` for processes of which process i is the rank `ranks[i]`. Local."""
    process = {rank: i for i, rank in enumerate(ranks)}
    return [replace(s, ranks=tuple(process[r] for r in s.ranks or ())) for s in specs]


def group_names(plan: Plan, rank: int, names: Mapping[str, str]) -> dict[str, str]:
    """Name in a uniform run by the one in `group_specs`, for the groups of `rank`. Local.

    Args:
        plan: The plan of the run.
        rank: Global rank of this process.
        names: Name in a uniform run of the groups `tp`, `cp`, `rows` and `all`.
    """
    return {name: names[kind] for kind, name in _names(plan, rank).items()}


def _names(plan: Plan, rank: int) -> dict[str, str]:
    """Names of the groups that `rank` belongs to, by kind."""
    place, cp = plan.place(rank), plan.topology.coordinates(rank)["cp"]
    return {
        "tp": f"run.tp.{place.replica}.{cp}",
        # Ranks of cp hold the same heads, so their place in tp is counted without failed ranks.
        "cp": f"run.cp.{place.replica}.{place.index}",
        "rows": f"run.rows.{place.replica}",
        "all": _ALL,
    }
