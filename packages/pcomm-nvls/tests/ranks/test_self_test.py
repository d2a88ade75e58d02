"""The self-test: right kernels pass it on all ranks, and each kind of wrong ones is told on all."""

from __future__ import annotations

import ctypes
from typing import Any
from unittest import mock

from nvls_support.emulation import opened
from pcomm import nvls
from pcomm.core.doctor.report import Finding
from pcomm.core.testing import ranks

DTYPES, ALGORITHMS = ("fp32", "bf16", "fp16"), ("lamport", "multimem", "p2p")
SUMS = [f"nvls.all_reduce.{dtype}.{algorithm}" for dtype in DTYPES for algorithm in ALGORITHMS]
GATHERS = [f"nvls.all_gather.{algorithm}" for algorithm in ALGORITHMS]


# In a deterministic workspace, whose sums have two kernels: the first call and the one behind the
# last, the bit of the third 4 bytes that is wrong, and what is then told of which finding.
FAULTS = [
    (0, 1, 30, "nvls.all_reduce.fp32.lamport", "rank 1: element 2 is "),
    (3, 4, 0, "nvls.all_reduce.fp32.p2p", "rank 1: repeated calls returned other bits"),
    (4, 6, 0, "nvls.all_reduce.bf16.lamport", "rank 1: the bits are not those of the sum in rank"),
    (13, 14, 7, "nvls.all_gather.multimem", "rank 1: word 2 came from rank 0"),
]


@ranks(2)
def test_what_is_right_passes_and_what_is_wrong_on_one_rank_is_told_on_all(rank: int) -> None:
    with opened(1 << 14) as workspace:
        report = nvls.self_test(workspace, repetitions=2)
        assert [finding.name for finding in report.findings] == SUMS + GATHERS
        assert {finding.status for finding in report.findings} == {"ok"}, report.as_text()
        assert "in rank order" in report.named("nvls.all_reduce.bf16.p2p").value
        assert "rounded right" in report.named("nvls.all_reduce.fp32.multimem").value
        assert workspace.num_launches == 2 * len(SUMS) + len(GATHERS)
    plain = nvls.Workspace.run

    def run(self: nvls.Workspace, launch: Any, repeat: Any = None) -> None:
        call = self.num_launches
        plain(self, launch, repeat)
        for start, end, bit, _, _ in FAULTS:
            if rank == 1 and start <= call < end:
                ctypes.c_uint32.from_address(launch.arguments["out"] + 8).value ^= 1 << bit

    with (
        opened(1 << 14, deterministic=True) as workspace,
        mock.patch.object(nvls.Workspace, "run", run),
    ):
        report = nvls.self_test(workspace, repetitions=2)
    broken = {f.name: f.reason for f in report.findings if f.status == "broken"}
    assert [*broken] == [name for _, _, _, name, _ in FAULTS], report.as_text()
    for _, _, _, name, words in FAULTS:
        assert broken[name].startswith(words), broken[name]
    finding = report.named("nvls.all_reduce.fp32.multimem")
    assert finding.status == "missing"
    assert "order of the ranks" in finding.reason


def test_ranks_that_all_pass_with_other_bits_are_wrong() -> None:
    from pcomm.nvls._self_test import _together

    finding = Finding("sum", "ok", "fine")
    same, other = ("ok", "", "1"), ("ok", "", "2")
    assert _together(finding, (4, 5), [same, same]) is finding
    found = _together(finding, (4, 5), [same, other])
    assert (found.status, found.reason) == ("broken", "the bits are not the same on all ranks")
    broken = ("broken", "it is 3", "2")
    assert _together(finding, (4, 5), [same, broken]).reason == "rank 5: it is 3"
