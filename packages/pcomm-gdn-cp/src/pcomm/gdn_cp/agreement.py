"""All ranks of a group make the same plan, or every rank raises why they did not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from pcomm.core.errors import UnsupportedError
from pcomm.core.groups.agreement import agree_in_group
from pcomm.core.groups.group import Group

__all__ = ["agree_on_plan"]


class _HasFacts(Protocol):
    def agreed_facts(self) -> list[str]: ...


_Planned = TypeVar("_Planned", bound=_HasFacts)


def agree_on_plan(group: Group | None, asked: object, build: Callable[[], _Planned]) -> _Planned:
    """The plan that `build` makes, once every rank of `group` has made the same. Collective.

    Args:
        group: The ranks; None if the caller's group has no store to compare plans through.
        asked: The caller's group, for the error.
        build: Makes this rank's plan. Local.

    Raises:
        UnsupportedError: There is no group, and so no store to meet in.
        Exception: The error of `build` on this rank.
        PeerError: `build` failed on another rank.
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
    agree_in_group(group, "make_plan", [] if plan is None else plan.agreed_facts(), error=error)
    assert plan is not None
    return plan
