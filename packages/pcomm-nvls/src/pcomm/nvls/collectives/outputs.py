"""Whether a result may be written where the caller wants it."""

from __future__ import annotations

from torch import Tensor

from pcomm.core.errors import ConfigError
from pcomm.nvls.workspace.workspace import Workspace

__all__ = ["check_outside"]


def check_outside(operation: str, out: Tensor, workspace: Workspace) -> None:
    """Refuse an `out` in the memory of the workspace, which other ranks still read. Local.

    Raises:
        ConfigError: It lies there.
    """
    if workspace.memory is None:
        return
    offset = out.data_ptr() - workspace.memory.buffer_ptrs[workspace.group.rank]
    if 0 <= offset < workspace.regions.num_bytes:
        raise ConfigError(
            f"{operation}: out at byte {offset} of the workspace",
            found="memory that other ranks read during the operation",
            why="A rank may be done before another one has read what it passed.",
            fix="Pass an out of other memory, or none.",
        )
