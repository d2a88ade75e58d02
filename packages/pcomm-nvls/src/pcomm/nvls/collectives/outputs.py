"""Results where the caller wants them: whether that is allowed, and how they get there."""

from __future__ import annotations

from torch import Tensor
from torch.autograd.graph import increment_version

from pcomm.core.errors import ConfigError
from pcomm.nvls.workspace.workspace import Workspace

__all__ = ["check_outside", "deliver"]


def check_outside(operation: str, out: Tensor | None, workspace: Workspace) -> None:
    """Refuse an `out` in the memory of the workspace, which other ranks still read. Local.

    Raises:
        ConfigError: It lies there.
    """
    if out is None or workspace.memory is None:
        return
    offset = out.data_ptr() - workspace.memory.buffer_ptrs[workspace.group.rank]
    if 0 <= offset < workspace.regions.num_bytes:
        raise ConfigError(
            f"{operation}: out at byte {offset} of the workspace",
            found="memory that other ranks read during the operation",
            why="A rank may be done before another one has read what it passed.",
            fix="Pass an out of other memory, or none.",
        )


def deliver(result: Tensor, out: Tensor | None) -> Tensor:
    """What a kernel or the reference has written, in `out` where that is given. Local.

    Autograd sees that `out` has changed, so a backward that needs what was there raises.

    Args:
        result: Result; `out` itself where a kernel has written there.
        out: Tensor of the caller for the result, or None.
    """
    if out is None:
        return result
    if result is out:
        increment_version(out)
    else:
        out.detach().copy_(result.detach())
    return out
