"""The description of one group to open: axes, role, options and backend."""

from __future__ import annotations

from dataclasses import dataclass

from pcomm.core.groups.options import CommOptions, Rails

__all__ = ["GroupSpec"]


@dataclass(frozen=True)
class GroupSpec:
    """A group to open: its axes, role, options and backend.

    Args:
        axes: Axis names joined by `_`, with a view prefix if needed: `"dp_cp"`, `"expert.ep"`.
        role: Groups over the same ranks with different roles have communicators of their own.
        options: Wishes for the communicator.
        backend: `"gloo"` or `"nccl"` for this group alone, such as gloo for the control plane of
            a job on GPUs; empty for that of `open_groups`.
    """

    axes: str
    role: str = ""
    options: CommOptions = CommOptions()
    backend: str = ""

    def describe(self, rails: Rails) -> str:
        """One line that is the same on all ranks that can open this group together. Local."""
        parts = [f"group {self.axes}", f"role {self.role!r}", self.options.describe(rails)]
        if self.backend:
            parts.append(f"backend {self.backend}")
        return ", ".join(parts)
