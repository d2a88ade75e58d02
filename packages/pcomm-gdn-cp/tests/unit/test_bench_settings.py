"""`pcomm bench gdn-cp`: the packs, what is refused, and the checks before anything is timed."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gdn_cp_bench.exchange_case import (
    WIDTHS,
    CaseTensors,
    ExchangeCase,
    column_order,
    fused_exchange,
    held_rows,
)
from gdn_cp_bench.forms import FORMS, build_form, obstacle
from gdn_cp_bench.measure import time_together
from gdn_cp_bench.settings import SPEC, Settings, random_lengths
from pcomm.core.collectives.autograd import differentiable
from pcomm.core.collectives.protocol import Collectives
from pcomm.core.testing.virtual import run_virtual
from pcomm.gdn_cp import make_plan

PACK = (0, 16, 24, 64)


@given(count=st.integers(1, 40), spare=st.integers(0, 60), unit=st.integers(1, 9))
def test_random_lengths_fill_the_pack_in_whole_units(count: int, spare: int, unit: int) -> None:
    lengths = random_lengths(count, (count + spare) * unit, unit)
    assert len(lengths) == count
    assert sum(lengths) == (count + spare) * unit
    assert all(length >= unit and length % unit == 0 for length in lengths)
    assert lengths == random_lengths(count, (count + spare) * unit, unit)


def test_the_committed_grid_has_equal_and_unequal_packs() -> None:
    packs = Settings().packs()
    assert [pack.num_sequences for pack in packs] == [1, 4, 4, 16, 16, 64, 64, 256, 256]
    for pack in packs:
        lengths = [b - a for a, b in pairwise(pack.cu_seqlens)]
        assert sum(lengths) == 8192
        assert (len(set(lengths)) > 1) == ("random" in pack.label)


def test_rows_of_a_rank_are_those_of_the_known_example_and_of_a_plan() -> None:
    # Transformer Engine's example, counted from 0: two ranks, one sequence of 8 tokens.
    assert [held_rows((0, 8), rank, 2).tolist() for rank in range(2)] == [
        [0, 1, 6, 7],
        [2, 3, 4, 5],
    ]
    for rank in range(4):
        plan = make_plan(PACK, (rank, 4), SPEC, strategy="heads")
        assert torch.equal(held_rows(PACK, rank, 4), plan.shard(torch.arange(64)))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_delivers_the_numbers_of_the_pack(form: str, size: int) -> None:
    def run(collectives: Collectives) -> str:
        case = build_form(form, CaseTensors(PACK, collectives.rank, size), collectives)
        assert case is not None
        return case.differs(case.run())

    assert run_virtual(run, size) == [""] * size


@pytest.mark.parametrize("mutant", ["columns", "rows", "gradient"])
def test_a_form_that_delivers_something_else_is_found(mutant: str) -> None:
    def run(collectives: Collectives) -> str:
        numbers = CaseTensors(PACK, collectives.rank, 2)
        offsets = (0, 24, 64) if mutant == "rows" else PACK
        columns = torch.arange(sum(WIDTHS)) if mutant == "columns" else column_order(2)

        def forward(x: Tensor, y: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
            parts, output = fused_exchange(
                x, y, torch.tensor(offsets), columns, differentiable(collectives)
            )
            if mutant == "gradient":
                q, *rest = parts
                parts = (torch.cat([q[:8].detach(), q[8:]]), *rest)
            return parts, output

        case = numbers.by_heads(forward)
        return case.differs(case.run())

    found = run_virtual(run, 2)
    assert all(found), found
    place = {"columns": 0, "rows": 0, "gradient": 5}[mutant]
    assert all(text.startswith(f"tensor {place} is off") for text in found)


def test_slow_forms_have_fewer_turns_and_all_start_together() -> None:
    order: list[str] = []

    class Counted(ExchangeCase):
        def run(self) -> tuple[Tensor, ...]:
            order.append(self.forward()[0])  # type: ignore[arg-type]
            return ()

    def case(name: str) -> ExchangeCase:
        return Counted((), lambda: (name,), (), tuple)  # type: ignore[return-value, arg-type]

    def run(collectives: Collectives) -> dict[str, int]:
        timings = time_together(
            {name: case(name) for name in ("slow", "fast")},
            collectives,
            rounds=5,
            seconds=4.0,
            first={"slow": 9.0, "fast": 0.01},
        )
        return {name: len(timing.rounds_us) for name, timing in timings.items()}

    (found,) = run_virtual(run, 1)
    assert found == {"slow": 3, "fast": 5}
    # One round of the fast one goes before and does not count.
    assert order == ["fast", *["slow", "fast"] * 3, "fast", "fast"]


def test_forms_that_handle_sequences_one_by_one_are_left_out_where_they_take_long() -> None:
    few, equal, random = (Settings().packs()[place] for place in (1, -2, -1))

    def run(group: Collectives) -> str:
        assert obstacle("heads", equal, group) == obstacle("loop", random, group) == ""
        assert obstacle("loop", few, group) == obstacle("state", few, group) == ""
        assert "fewer sequences" in obstacle("split loop", random, group)
        assert obstacle("loop", equal, group) == "timed with random lengths only"
        return obstacle("state", random, group)

    # 256 sequences leave 7 maps each of 8 x 64 x 128 fp32 numbers; and up to 3 tokens a segment.
    maps, tails = 256 * 7 * 8 * 64 * 128 * 4, 256 * 7 * 3 * 1024 * 4
    for found in run_virtual(run, 4):
        megabytes = re.fullmatch(r"each rank would gather (\d+) MB of maps", found)
        assert megabytes is not None, found
        assert maps / 1e6 < float(megabytes[1]) <= (maps + tails) / 1e6
