"""Sessions whose ranks are killed, stopped, and come back, against one process that is not."""

from __future__ import annotations

import pytest

from pcomm.core import Topology
from pcomm.core.process import RankReport, ResilientRanks
from pcomm.core.testing.patience import scaled_s
from pcomm.ntp.testing.resilient_training import Fault, check_seen, train_in_session

TOPOLOGY = Topology({"dp": 2, "tp": 2})


def trained(until: int, *faults: Fault, topology: Topology = TOPOLOGY) -> dict[int, RankReport]:
    """The reports of all ranks of a job with faults, of which some ranks finish."""
    with ResilientRanks(topology.world_size, imports_main=False) as ranks:
        ranks.start(train_in_session, (topology, until, faults))
        reports = ranks.wait(timeout_s=scaled_s(60.0))
    gone = {fault.rank for fault in faults}
    for rank, report in reports.items():
        assert report.has_finished or rank in gone, (
            f"rank {rank}: {report.reason}\n{report.traceback}"
        )
    finished = {rank: report.result for rank, report in reports.items() if report.has_finished}
    check_seen(finished, until)
    return reports


def test_without_a_failure_training_is_that_of_one_process() -> None:
    trained(3)


@pytest.mark.parametrize(
    "point", ["forward", "backward", "reduction", "ready", "optimizer", "checkpoint"]
)
def test_a_killed_rank_is_left_behind(point: str) -> None:
    reports = trained(4, Fault(1, point, 2))
    assert [rank for rank, report in reports.items() if report.has_finished] == [0, 2, 3]
