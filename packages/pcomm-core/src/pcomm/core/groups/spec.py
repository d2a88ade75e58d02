"""The description of one group to open: axes or ranks, role, options and backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pcomm.core.control.rank_sets import spelled
from pcomm.core.groups.options import CommOptions, Rails

__all__ = ["GroupSpec"]


@dataclass(frozen=True)
class GroupSpec:
    """A group to open: its axes or its ranks, role, options and backend.

    Args:
        axes: Axis names joined by `_`, with a view prefix if needed: `"dp_cp"`, `"expert.ep"`. For
            a group of explicit ranks, its name.
        role: Groups over the same ranks with different roles have communicators of their own.
        options: Wishes for the communicator.
        backend: `"gloo"` or `"nccl"` for this group alone, such as gloo for the control plane of
            a job on GPUs; empty for that of `open_groups`.
        ranks: Global ranks of a group of explicit ranks (`of_ranks`), kept ascending; None for one
            that runs along axes.
    """

    axes: str
    role: str = ""
    options: CommOptions = CommOptions()
    backend: str = ""
    ranks: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.ranks is not None:
            object.__setattr__(self, "ranks", tuple(sorted(self.ranks)))

    @classmethod
    def of_ranks(
        cls,
        ranks: Sequence[int],
        name: str,
        role: str = "",
        *,
        options: CommOptions | None = None,
        backend: str = "",
    ) -> GroupSpec:
        """A group of explicit ranks, for sets that no axes describe. Local; nothing is checked yet.

        Every rank that calls `open_groups` lists it, members or not, since all agree on the list.
        A rank that does not belong makes no communicator for it and has no such key. Several may
        share ranks, and one rank alone is the identity.

        Args:
            ranks: Global ranks, in any order, each once.
            name: Key of the group, `groups[name]`, or `groups[name, role]`; not that of axes.
            role: Purpose of its communicator.
            options: Wishes for the communicator.
            backend: `"gloo"` or `"nccl"`; empty for that of `open_groups`.
        """
        return cls(name, role, options or CommOptions(), backend, tuple(ranks))

    def describe(self, rails: Rails) -> str:
        """One line that is the same on all ranks that can open this group together. Local."""
        of_ranks = "" if self.ranks is None else f" of ranks {spelled(self.ranks)}"
        parts = [f"group {self.axes}{of_ranks}", f"role {self.role!r}"]
        parts.append(self.options.describe(rails))
        if self.backend:
            parts.append(f"backend {self.backend}")
        return ", ".join(parts)
