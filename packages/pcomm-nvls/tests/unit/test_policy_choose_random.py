"""The choice of an algorithm at random, against a plain search through conditions."""

from __future__ import annotations

import copy
import pickle

import torch
from hypothesis import given
from hypothesis import strategies as st

from pcomm.nvls.policy.choose import CollectiveRequest, GroupInfo, choose
from pcomm.nvls.policy.table import OPERATIONS, Band, Table, Threshold

GATHERS = {"all_gather_into_tensor", "all_gather_coalesced", "all_gather_v", "gather_to_rank"}
KERNELS = ("lamport", "multimem", "p2p")
SIZES = st.one_of(st.integers(0, 40), st.integers(0, 40).map(lambda n: 16 * n))
FACTS = st.builds(
    GroupInfo,
    architecture=st.sampled_from(["sm_90", "sm_90", "sm_90", "sm_80"]),
    world_size=st.integers(1, 9),
    multicast=st.booleans(),
    peers=st.booleans(),
    slot_bytes=st.one_of(st.integers(0, 5000), st.just(1 << 40)),
    lamport_bytes=st.one_of(st.integers(0, 1000), st.just(1 << 40)),
)
QUESTIONS = st.builds(
    CollectiveRequest,
    operation=st.sampled_from(list(OPERATIONS)),
    num_bytes=SIZES,
    dtype=st.sampled_from(
        [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8]
    ),
    dim=st.sampled_from([0, -1, 1]),
    row_bytes=st.one_of(st.none(), SIZES),
    deterministic=st.booleans(),
    algorithm=st.sampled_from(["auto", *KERNELS, "dist"]),
)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """One band, for sm_90 alone; its rows have 1, 2, 3 ... blocks, and those of `dist` none."""
    largest: dict[str, int] = {}
    rows = []
    for i, name in enumerate(draw(st.lists(st.sampled_from([*KERNELS, "dist"]), max_size=6))):
        # Mostly sizes that messages have, so that both sides of a threshold are met.
        largest[name] = largest.get(name, 0) + draw(st.integers(1, 12)) * draw(
            st.sampled_from([16, 16, 16, 9])
        )
        blocks, warps = (0, 0) if name == "dist" else (i + 1, 4)
        rows.append(Threshold(name, largest[name], blocks, warps, "drawn"))
    world_sizes = (2, draw(st.integers(2, 9)))
    return Table((Band(("sm_90",), tuple(OPERATIONS), world_sizes, tuple(rows)),))


def runs(facts: GroupInfo, question: CollectiveRequest, name: str) -> bool:
    """Whether an algorithm can run, from the words of the decision: nothing but conditions."""
    segments = 1 if question.operation.startswith("all_reduce") else facts.world_size
    # Types whose numbers have one zero: without a sign or with it.
    times = 1 if question.dtype in {torch.bfloat16, torch.float16, torch.float32} else 2
    if name == "lamport":
        has_room = times * question.num_bytes <= facts.lamport_bytes
    else:
        has_room = segments * question.num_bytes <= facts.slot_bytes
    without = {
        "lamport": set(OPERATIONS)
        - {"all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"},
        "multimem": {"gather_to_rank"},
        "p2p": set(),
    }
    is_sum = question.operation not in GATHERS
    last_too = question.operation in {
        "all_gather_into_tensor",
        "gather_to_rank",
        "reduce_scatter_tensor",
    }
    aligned = question.num_bytes % 16 == 0 and (question.row_bytes or 0) % 16 == 0
    return (
        (facts.multicast if name == "multimem" else facts.peers)
        and question.operation not in without[name]
        and question.dim in ({0, -1} if last_too else {0})
        and not (is_sum and question.dtype in {torch.float64, torch.int8})
        and not (is_sum and question.deterministic and name == "multimem")
        and aligned
        and has_room
    )


def expected(facts: GroupInfo, question: CollectiveRequest, table: Table) -> tuple[str, int]:
    """Algorithm and blocks, by a search through conditions."""
    rows = table.rows(facts.architecture, question.operation, facts.world_size)
    small = [row for row in rows if question.num_bytes <= row.max_bytes]
    if question.algorithm != "auto":
        own = [row for row in rows if row.algorithm == question.algorithm != "dist"]
        if not own or not runs(facts, question, question.algorithm):
            return "dist", 0
        fitting = [row for row in own if row in small] or own[-1:]
        return question.algorithm, fitting[0].num_blocks
    for row in small:
        useless = row.algorithm == "multimem" and facts.world_size == 2
        if row.algorithm == "dist" or (not useless and runs(facts, question, row.algorithm)):
            return row.algorithm, row.num_blocks
    return "dist", 0


@given(FACTS, QUESTIONS, tables())
def test_every_call_has_the_choice_that_a_plain_search_finds(facts, question, table):
    choice = choose(facts, question, table)
    assert (choice.algorithm, choice.num_blocks) == expected(facts, question, table)
    assert set(choice.losses) <= set(choice.reasons)
    names = [reason.split(":")[0] for reason in choice.reasons]
    assert len(set(names)) == len(names)
    assert choice.algorithm not in names
    if choice.because == "no other algorithm is left":
        assert set(names) == set(KERNELS)


@given(FACTS, QUESTIONS, tables())
def test_later_rows_are_for_larger_messages(facts, question, table):
    rows = table.rows(facts.architecture, question.operation, facts.world_size)

    def place(num_bytes: int) -> int:
        asked = question._replace(num_bytes=num_bytes, algorithm="auto")
        choice = choose(facts, asked, table)
        if choice.because.startswith("no other") or facts.world_size == 1:
            return len(rows)
        key = (choice.algorithm, choice.num_blocks)
        at = [i for i, row in enumerate(rows) if (row.algorithm, row.num_blocks) == key]
        # Several rows of dist look alike.
        return next(i for i in at if rows[i].max_bytes >= num_bytes)

    places = [place(num_bytes) for num_bytes in range(0, 2000, 16)]
    assert places == sorted(places)


@given(FACTS, QUESTIONS, tables())
def test_ranks_choose_alike_from_equal_arguments(facts, question, table):
    before = copy.deepcopy((facts, question, table))
    here = choose(facts, question, table)
    again = choose(*pickle.loads(pickle.dumps((facts, question, table))))
    assert here == again
    assert (facts, question, table) == before
