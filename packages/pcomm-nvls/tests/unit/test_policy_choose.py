"""The choice of an algorithm: by hand, and at every threshold of the package's table."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from pcomm.core.errors import ConfigError
from pcomm.nvls.policy.choose import Choice, CollectiveRequest, GroupInfo, choose
from pcomm.nvls.policy.table import OPERATIONS, Band, Table, Threshold

KIB, MIB = 1024, 1024 * 1024
SHIPPED = Table()
H100 = GroupInfo("sm_90", 8, multicast=True, peers=True, slot_bytes=1 << 40, lamport_bytes=1 << 40)
REDUCE = CollectiveRequest("all_reduce", 4096, torch.bfloat16)
GATHER = CollectiveRequest("all_gather_into_tensor", 4096, torch.uint8)
KERNELS = ("lamport", "multimem", "p2p")


def algorithm(facts: GroupInfo, question: CollectiveRequest) -> str:
    return choose(facts, question, SHIPPED).algorithm


# -- the package's table ------------------------------------------------------------------------

PLACES = [
    (architecture, operation, band.world_sizes[1], row)
    for band in SHIPPED.bands
    for architecture, operation in product(band.architectures, band.operations)
    for row in band.rows
]


def test_both_sides_of_every_threshold_of_the_package() -> None:
    assert len(PLACES) > 300
    for architecture, operation, world_size, row in PLACES:
        rows = SHIPPED.rows(architecture, operation, world_size)
        question = CollectiveRequest(operation, row.max_bytes, torch.bfloat16)
        own = replace(H100, architecture=architecture, world_size=world_size)
        able = [one for one in rows if one.algorithm in OPERATIONS[operation].algorithms]
        if world_size == 2:
            able = [one for one in able if one.algorithm != "multimem"]
        if row not in able:
            continue
        # Without multicast if the row would be hidden by larger ones of multimem.
        if row.algorithm == "p2p" and architecture != "emulated":
            own = replace(own, multicast=False)
            able = [one for one in able if one.algorithm != "multimem"]
        at, above = (
            choose(own, question._replace(num_bytes=row.max_bytes + more), SHIPPED)
            for more in (0, 16)
        )
        assert (at.algorithm, at.num_blocks, at.num_warps) == (
            row.algorithm,
            row.num_blocks,
            row.num_warps,
        )
        following = next((one for one in able if one.max_bytes > row.max_bytes), None)
        assert above.algorithm == (following.algorithm if following else "dist")
        assert above.num_blocks == (following.num_blocks if following else 0)


def test_the_package_has_rows_for_each_operation_up_to_72_ranks() -> None:
    for architecture in ("sm_90", "sm_100", "sm_103", "emulated"):
        for operation, world_size in product(OPERATIONS, range(2, 73)):
            rows = SHIPPED.rows(architecture, operation, world_size)
            assert {row.algorithm for row in rows} == set(KERNELS)
            few = range(2, 5) if architecture == "emulated" else range(4, 17)
            assert all(row.num_blocks in few for row in rows)
        assert SHIPPED.rows(architecture, "all_reduce", 73) == ()


@pytest.mark.parametrize(
    ("world_size", "operation", "num_bytes", "name"),
    [
        # Single tokens and small batches of a hidden size of 8192, then chunks of a prompt.
        (8, "all_reduce", 16 * KIB, "lamport"),
        (8, "all_reduce", MIB, "multimem"),
        (8, "all_reduce", 512 * MIB, "multimem"),
        (8, "all_reduce", 512 * MIB + 16, "dist"),
        (8, "all_gather_into_tensor", 128 * KIB, "lamport"),
        (8, "all_gather_into_tensor", 8 * MIB, "multimem"),
        (8, "all_gather_into_tensor", 64 * MIB, "dist"),
        (8, "reduce_scatter_tensor", 8 * MIB, "multimem"),
        (8, "reduce_scatter_tensor", 32 * MIB, "dist"),
        (2, "all_reduce", 16 * KIB, "lamport"),
        (2, "all_reduce", MIB, "p2p"),
        (72, "all_reduce", 16 * KIB, "multimem"),
        (6, "reduce_scatter_v", 16 * KIB, "multimem"),
        (6, "gather_to_rank", MIB, "p2p"),
        (1, "all_reduce", 16 * KIB, "dist"),
    ],
)
def test_by_hand(world_size: int, operation: str, num_bytes: int, name: str) -> None:
    question = CollectiveRequest(operation, num_bytes, torch.bfloat16)
    assert algorithm(replace(H100, world_size=world_size), question) == name


# -- reasons, one at a time ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "question", "reason"),
    [
        ({"peers": False}, REDUCE, "the group has no pointers to peers"),
        ({"peers": False, "peers_reason": "rank 3: no P2P"}, REDUCE, "peers (rank 3: no P2P)"),
        ({}, REDUCE._replace(num_bytes=4088), "the message is no multiple of 16 bytes"),
        ({}, REDUCE._replace(row_bytes=24), "a row is no multiple of 16 bytes"),
        ({}, REDUCE._replace(dtype=torch.float64), "kernels do not add torch.float64"),
        ({}, REDUCE._replace(dim=-1), "all_reduce has kernels for dimension 0, not for -1"),
        ({}, GATHER._replace(dim=1), "kernels for dimension 0 and -1, not for 1"),
        ({"lamport_bytes": 4095}, REDUCE, "sends more than lamport_bytes of the workspace, 4095"),
        ({"lamport_bytes": 8191}, GATHER, "sends more than lamport_bytes of the workspace, 8191"),
        ({"architecture": "sm_80"}, REDUCE, "all_reduce between 8 ranks of sm_80"),
    ],
)
def test_what_lamport_cannot_do_is_told(facts, question, reason):
    choice = choose(replace(H100, **facts), question, SHIPPED)
    (told,) = [line for line in choice.reasons if line.startswith("lamport: ")]
    assert reason in told
    assert told in choice.losses
    assert choice.algorithm != "lamport"


def test_sums_in_the_order_of_the_ranks_are_no_matter_of_the_switch() -> None:
    large = REDUCE._replace(num_bytes=MIB)
    assert algorithm(H100, large) == "multimem"
    choice = choose(H100, large._replace(deterministic=True), SHIPPED)
    assert choice.algorithm == "p2p"
    assert "multimem: the switch does not add in the order of the ranks" in choice.reasons
    assert choice.losses == ()
    assert algorithm(H100, REDUCE._replace(deterministic=True)) == "lamport"
    named = large._replace(deterministic=True, algorithm="multimem")
    assert algorithm(H100, named) == "dist"
    # A gather adds nothing.
    copied = GATHER._replace(num_bytes=MIB, deterministic=True)
    assert algorithm(H100, copied) == "multimem"


def test_a_table_may_prefer_dist_between_others() -> None:
    rows = (Threshold("dist", 64, 0, 0, "by hand"), Threshold("p2p", 128, 4, 8, "by hand"))
    table = Table((Band(("sm_90",), ("all_reduce",), (8, 8), rows),))
    found = {n: choose(H100, REDUCE._replace(num_bytes=n), table) for n in (64, 80, 128, 144)}
    assert [choice.algorithm for choice in found.values()] == ["dist", "p2p", "p2p", "dist"]
    assert found[64] == Choice("dist", 0, 0, "it is preferred up to 64 bytes (by hand)")
    assert found[80].reasons == ("dist: it is preferred up to 64 bytes",)
    assert found[144].reasons == (
        "p2p: it is preferred up to 128 bytes",
        "lamport: the table has no row of it for all_reduce between 8 ranks of sm_90",
        "multimem: the table has no row of it for all_reduce between 8 ranks of sm_90",
    )
    assert found[144].losses == ()


def test_one_rank_lacks_nothing() -> None:
    alone = GroupInfo("sm_80", 1, multicast=False, peers=False, slot_bytes=0)
    assert choose(alone, REDUCE, SHIPPED) == Choice("dist", 0, 0, "one rank has nothing to move")


@pytest.mark.parametrize(
    ("question", "fix"),
    [
        (REDUCE._replace(operation="allreduce"), "'all_reduce'"),
        (REDUCE._replace(algorithm="multimen"), "'multimem'"),
        (REDUCE._replace(algorithm=None), "'auto'"),
        (REDUCE._replace(num_bytes=-16), "from 0 on"),
        (REDUCE._replace(row_bytes=-16), "from 0 on"),
    ],
)
def test_mistakes_are_errors(question: CollectiveRequest, fix: str) -> None:
    with pytest.raises(ConfigError) as problem:
        choose(H100, question, SHIPPED)
    assert fix in problem.value.fix
