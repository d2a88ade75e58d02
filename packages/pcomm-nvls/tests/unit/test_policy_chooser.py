"""Choices of a workspace: kept, logged once, refused where that was asked for, and explained."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from pcomm.core.control.control import Control
from pcomm.core.errors import DivergenceError, UnsupportedError
from pcomm.nvls.policy import choose as chooser_module
from pcomm.nvls.policy.choose import Chooser, CollectiveRequest, GroupInfo, choose
from pcomm.nvls.policy.table import ALGORITHMS, Band, Table, Threshold

SHIPPED = Table()
FACTS = GroupInfo(
    "emulated", 4, multicast=True, peers=True, slot_bytes=1 << 20, lamport_bytes=1 << 20
)
WITHOUT = replace(FACTS, multicast=False, multicast_reason="rank 2: CONFIDENTIAL")
SMALL = CollectiveRequest("all_reduce", 512, torch.bfloat16)
MIDDLE, LARGE, HUGE = (SMALL._replace(num_bytes=n) for n in (4096, 8192, 16384))


def with_rows(architecture: str, *rows: Threshold) -> Table:
    """The table of the package with other rows for all-reduces."""
    return Table((Band((architecture,), ("all_reduce",), (2, 8), rows), *SHIPPED.bands))


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> list[CollectiveRequest]:
    """The questions that were not found in a dictionary."""
    asked: list[CollectiveRequest] = []

    def counted(facts: GroupInfo, question: CollectiveRequest, table: Table) -> object:
        asked.append(question)
        return choose(facts, question, table)

    monkeypatch.setattr(chooser_module, "choose", counted)
    return asked


def test_a_question_is_answered_once(questions: list[CollectiveRequest]) -> None:
    chooser, other = Chooser(FACTS), Chooser(WITHOUT)
    for _ in range(3):
        for question in (SMALL, MIDDLE, LARGE, HUGE):
            assert chooser.choose(question) == choose(FACTS, question, SHIPPED)
            assert other.choose(question) == choose(WITHOUT, question, SHIPPED)
    assert len(questions) == 8
    # Each part of a question counts.
    changes = {"operation": "all_gather_v", "num_bytes": 528, "dtype": torch.float16, "dim": -1}
    changes |= {"row_bytes": 16, "deterministic": True, "algorithm": "p2p"}
    for key, value in changes.items():
        other.choose(SMALL._replace(**{key: value}))
    assert len(questions) == 15


def test_as_many_choices_are_kept_as_there_is_room_for(questions: list[CollectiveRequest]) -> None:
    chooser = Chooser(FACTS)
    for _ in range(2):
        for size in range(4096):
            chooser.choose(SMALL._replace(num_bytes=size))
    assert len(questions) == 4096
    chooser.choose(SMALL._replace(num_bytes=4096))
    chooser.choose(SMALL._replace(num_bytes=4096))
    assert len(questions) == 4097
    chooser.choose(SMALL._replace(num_bytes=0))
    assert len(questions) == 4098


def test_a_reason_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pcomm.nvls")
    chooser = Chooser(WITHOUT)
    for size in range(0, 40000, 16):
        chooser.choose(SMALL._replace(num_bytes=size))
        chooser.choose(SMALL._replace(num_bytes=size, operation="reduce_scatter_tensor"))
    told = [
        (record.levelname, record.getMessage().split(" (first")[0]) for record in caplog.records
    ]
    assert told == [
        ("INFO", "not lamport: it is preferred up to 1024 bytes"),
        ("WARNING", "not multimem: the group has no multicast address (rank 2: CONFIDENTIAL)"),
        ("INFO", "not multimem: it is preferred up to 4096 bytes"),
        ("INFO", "not p2p: it is preferred up to 8192 bytes"),
    ]
    assert {record.name for record in caplog.records} == {"pcomm.nvls"}
    assert "all_reduce takes p2p" in caplog.records[1].getMessage()
    # Another workspace has reasons of its own.
    Chooser(WITHOUT).choose(MIDDLE)
    assert len(caplog.records) == 6
    # All ranks of a group have the same, of which one warns.
    assert {record.levelname for record in caplog.records[4:]} == {"INFO", "WARNING"}
    Chooser(WITHOUT, warns=False).choose(MIDDLE)
    assert {record.levelname for record in caplog.records[6:]} == {"INFO"}
    assert len(caplog.records) == 8


def test_one_rank_loses_nothing_whatever_it_asks_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pcomm.nvls")
    alone = Chooser(replace(WITHOUT, world_size=1, peers=False))
    for algorithm in ("auto", *ALGORITHMS):
        choice = alone.choose(SMALL._replace(algorithm=algorithm), strict=True)
        assert choice.because == "one rank has nothing to move"
        assert choice.reasons == ()
    assert not caplog.records


def test_strict_refuses_dist_and_nothing_else() -> None:
    chooser = Chooser(replace(WITHOUT, peers=False))
    for _ in range(2):
        with pytest.raises(UnsupportedError) as problem:
            chooser.choose(SMALL, strict=True)
        for reason in chooser.choose(SMALL).reasons:
            assert reason in problem.value.found
        assert "rank 2: CONFIDENTIAL" in problem.value.found
        assert "all_reduce of 512 bytes" in problem.value.asked
        assert "strict=True" in problem.value.asked
        assert chooser.choose(SMALL).algorithm == "dist"
    able = Chooser(FACTS)
    assert [able.choose(one, strict=True).algorithm for one in (SMALL, MIDDLE, LARGE)] == [
        "lamport",
        "multimem",
        "p2p",
    ]
    with pytest.raises(UnsupportedError, match="p2p: it is preferred up to 8192 bytes"):
        able.choose(HUGE, strict=True)
    preferred = with_rows("emulated", Threshold("dist", 1024, 0, 0, "by hand"))
    with pytest.raises(UnsupportedError, match=r"dist: it is preferred up to 1024 bytes \(by hand"):
        Chooser(FACTS, preferred).choose(SMALL, strict=True)
    # Behind the size of the table is a slot for which that size is too large as well.
    small = Chooser(replace(FACTS, slot_bytes=8192))
    with pytest.raises(UnsupportedError, match=r"p2p: it needs more than a slot .*, 8192 bytes"):
        small.choose(HUGE, strict=True)
    # What is asked for is no fallback.
    assert able.choose(SMALL._replace(algorithm="dist"), strict=True).algorithm == "dist"


def test_a_named_algorithm_that_cannot_run_is_an_error() -> None:
    chooser = Chooser(WITHOUT)
    for strict in (False, True):
        with pytest.raises(UnsupportedError) as problem:
            chooser.choose(SMALL._replace(algorithm="multimem"), strict=strict)
        assert problem.value.found == (
            "multimem: the group has no multicast address (rank 2: CONFIDENTIAL)"
        )
        assert "algo='multimem'" in problem.value.asked
        assert chooser.choose(SMALL._replace(algorithm="p2p"), strict=strict).algorithm == "p2p"


def test_an_explanation_has_the_algorithm_and_every_reason() -> None:
    question = LARGE._replace(deterministic=True, dtype=torch.float32)
    text = Chooser(FACTS).explain(question)
    assert text.splitlines() == [
        "all_reduce of 8192 bytes (the whole tensor) of float32, deterministic on 4 ranks of "
        "emulated: p2p, 4 blocks of 4 warps",
        "  p2p: it is preferred up to 8192 bytes (none: small, so that tests reach both sides)",
        "  not lamport: it is preferred up to 1024 bytes",
        "  not multimem: the switch does not add in the order of the ranks",
    ]
    question = CollectiveRequest("all_gather_into_tensor", 40, torch.int8, dim=-1)
    assert Chooser(WITHOUT).explain(question).splitlines() == [
        "all_gather_into_tensor of 40 bytes (the input of one rank) of int8, dimension -1 on 4 "
        "ranks of emulated: dist",
        "  dist: no other algorithm is left",
        "  not lamport: the message is no multiple of 16 bytes",
        "  not multimem: the group has no multicast address (rank 2: CONFIDENTIAL)",
        "  not p2p: the message is no multiple of 16 bytes",
    ]


# -- agreement of the ranks -----------------------------------------------------------------------


def agreed(*choosers: Chooser) -> list[Exception | None]:
    """What each rank gets from an agreement about its lines; ranks are threads."""
    store = dist.HashStore()

    def agree(rank: int) -> Exception | None:
        control = Control(store, range(len(choosers)), rank, timeout_s=60)
        own = choosers[rank]
        try:
            control.agree("workspace", own.facts.agreed_lines(own.table))
        except DivergenceError as problem:
            return problem
        return None

    with ThreadPoolExecutor(len(choosers)) as threads:
        return list(threads.map(agree, range(len(choosers))))


def test_ranks_with_the_same_facts_and_rows_agree() -> None:
    # The reasons of the vote and the order of bands count for no choice.
    told = Chooser(replace(FACTS, peers_reason="seen"), Table(SHIPPED.bands[::-1]))
    assert agreed(Chooser(FACTS), Chooser(FACTS, Table()), told) == [None] * 3


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"architecture": "sm_90"}, "architecture sm_90"),
        ({"world_size": 3}, "world size 3"),
        ({"multicast": False}, "multicast False"),
        ({"peers": False}, "peers False"),
        ({"slot_bytes": 64}, "slot bytes 64"),
        ({"lamport_bytes": 64}, "lamport bytes 64"),
    ],
)
def test_another_fact_on_one_rank_is_an_error_on_all(change: dict, line: str) -> None:
    for problem in agreed(Chooser(FACTS), Chooser(replace(FACTS, **change)), Chooser(FACTS)):
        assert isinstance(problem, DivergenceError)
        assert line in problem.found


def test_another_table_on_one_rank_is_an_error_that_names_the_rows() -> None:
    here = with_rows("emulated", Threshold("p2p", 64, 4, 8, "by hand"))
    for problem in agreed(Chooser(FACTS), Chooser(FACTS, here)):
        assert isinstance(problem, DivergenceError)
        assert "rank 1 has 'all_reduce: p2p<=64:4x8'" in problem.found
        assert "rank 0 has 'all_reduce: lamport<=1024:2x4 " in problem.found


def test_an_operation_without_a_kernel_is_said_to_have_none_at_every_size() -> None:
    question = CollectiveRequest(
        "reduce_scatter_add_rmsnorm_all_gather", 512, torch.bfloat16, row_bytes=512
    )
    for num_bytes in (512, 1 << 18):
        choice = choose(FACTS, question._replace(num_bytes=num_bytes), SHIPPED)
        assert f"lamport: {question.operation} has no such kernel" in choice.reasons
