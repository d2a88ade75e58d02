"""Whether the operations are right under Triton's interpreter, between processes on this machine.

There are no times: an interpreter's would say nothing of a GPU's.
"""

from __future__ import annotations

from pcomm.core.process.local_ranks import LocalRanks

__all__ = ["check_emulated"]


def check_emulated(world: int) -> str:
    """Run the self-test on emulated ranks. Local; some seconds.

    Args:
        world: Number of processes.

    Returns:
        One line: how many findings there are, and which of them are bad.
    """
    with LocalRanks(world, imports_main=False) as ranks:
        found = ranks.run(_self_test)[0]
    bad = [f"{name}: {status}" for name, status in found if status == "broken"]
    told = "all right" if not bad else "; ".join(bad)
    return f"emulated, {world} ranks: {len(found)} findings, {told}"


def _self_test() -> list[tuple[str, str]]:
    """On a rank: name and status of each finding."""
    from pcomm.nvls.testing.emulation import emulate

    emulate()
    import torch.distributed as dist

    from pcomm.core.groups.group import Group
    from pcomm.nvls._self_test import self_test
    from pcomm.nvls.workspace.workspace import Workspace

    assert dist.group.WORLD is not None
    group = Group.from_process_group("world", dist.group.WORLD)
    with Workspace(group, 1 << 14) as workspace:
        report = self_test(workspace, repetitions=2)
    return [(finding.name, finding.status) for finding in report.findings]
