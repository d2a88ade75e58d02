"""All ranks of the context-parallel group make the same plan, or all learn why they did not."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pcomm.core.errors import UnsupportedError
from pcomm.core.groups.agreement import agree_in_group
from pcomm.core.groups.group import Group

if TYPE_CHECKING:
    from pcomm.gdn_cp.plan import Plan

__all__ = ["agree_on_plan"]


def agree_on_plan(group: Group | None, asked: object, build: Callable[[], Plan]) -> Plan:
    """The plan that `build` makes, once every rank of `group` has made the same. Collective.

    Args:
        group: The ranks; None if what was passed as a group has none.
        asked: What was passed.
        build: Makes this rank's plan. Local.

    Raises:
        UnsupportedError: There is no group, and so no store to meet in.
        Exception: What `build` raised here.
        PeerError: What it raised on another rank.
        DivergenceError: The plans differ; names the first difference.
    """
    if group is None:
        raise UnsupportedError(
            "make_plan: verify=True",
            found=f"a group of type {type(asked).__name__}",
            why="The ranks compare their plans through the store that a group's ranks share.",
            fix="Pass a Group, a ProcessGroup or a DeviceMesh, or leave verify away.",
        )
    plan, error = None, None
    try:
        plan = build()
    except Exception as problem:  # raised below, once the other ranks know of it
        error = problem
    agree_in_group(group, "make_plan", _facts(plan), error=error)
    assert plan is not None
    return plan


def _facts(plan: Plan | None) -> list[str]:
    """What must be equal, one fact a line."""
    if plan is None:
        return []
    facts = [f"layout {plan.tokens.layout_name}"]
    facts += [
        f"{spec} {strategy}" for spec, strategy in zip(plan.specs, plan.strategies, strict=True)
    ]
    return facts + [f"cu_seqlens[{n}] = {o}" for n, o in enumerate(plan.tokens.cu_seqlens)]
