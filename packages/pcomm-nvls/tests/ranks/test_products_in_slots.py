"""Row-parallel layers whose product is written where ranks read it, against the copying form."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from nvls_support.emulation import opened
from pcomm.core.collectives.instrumented import InstrumentedCollectives
from pcomm.core.layout import Layout
from pcomm.core.tensor_parallel import RowParallelLinear
from pcomm.core.testing import ranks
from pcomm.core.testing.on_ranks import default_collectives

WIDTH, INPUTS = 32, 24


class _Copying(InstrumentedCollectives):
    """The same collectives, which hand out no memory."""

    def empty_input(self, operation: Any, shape: Any, like: Any) -> None:
        return None


@contextmanager
def collectives_of(**options: Any) -> Iterator[Any]:
    with opened(1 << 13, **options) as workspace:
        from pcomm.nvls._nvls_collectives import NvlsCollectives

        yield NvlsCollectives(default_collectives(), workspace)


@contextmanager
def launches_of(collectives: Any) -> Iterator[list[tuple[str, bool, bool]]]:
    """Kernels, each with whether it has an entry barrier, and whether it copies no input."""
    found: list[tuple[str, bool, bool]] = []
    launcher = collectives.workspace.launcher
    run = launcher.run

    def noted(launch: Any) -> None:
        arguments = launch.arguments
        found.append(
            (
                launch.kernel.__name__.removesuffix("_kernel"),
                arguments.get("ENTRY", False),
                arguments.get("IN_PLACE", False),
            )
        )
        run(launch)

    with mock.patch.object(launcher, "run", noted):
        yield found


def layer_of(collectives: Any, dtype: torch.dtype, **options: Any) -> RowParallelLinear:
    torch.manual_seed(0)
    layout = Layout.even(INPUTS, collectives.size)
    return RowParallelLinear(layout, WIDTH, collectives, bias=True, dtype=dtype, **options)


def input_of(rows: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, INPUTS // 2, generator=generator).to(dtype)


# Lamport up to 1,024 bytes, two shots or one up to 8,192, torch.distributed above.
@ranks(2)
@pytest.mark.parametrize("scatters", [False, True], ids=["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_in_slots_are_the_copied_ones_bit_for_bit(
    rank: int, dtype: torch.dtype, scatters: bool
) -> None:
    with collectives_of() as made, torch.no_grad():
        writing = layer_of(made, dtype, sequence_parallel=scatters)
        copying = layer_of(_Copying(made), dtype, sequence_parallel=scatters)
        case, kept = random.Random(f"{dtype} {scatters}"), []
        row_bytes = WIDTH * dtype.itemsize
        message = row_bytes // 2 if scatters else row_bytes
        edges = [1024 // message, 1024 // message + 2, 8192 // row_bytes, 8192 // row_bytes + 2]
        for step, rows in enumerate([*edges, *(2 * case.randrange(1, 70) for _ in range(5))]):
            rows += rows % 2
            x = input_of(rows, dtype, 2 * step + rank)
            with launches_of(made) as told:
                first = writing(x)
            told_first = list(told)
            with launches_of(made) as told:
                second = copying(x)
            assert torch.equal(first, second), (step, rows)
            # As many launches; what takes a barrier copies no input.
            assert [name for name, *_ in told_first] == [name for name, *_ in told]
            for name, entry, in_place in told_first:
                assert in_place == ("lamport" not in name), (name, rows)
                assert not entry
            assert not any(in_place for *_, in_place in told)
            kept.append((first, first.clone()))
            # A result is no memory of the workspace: no later operation has changed it.
            begin, end = made.workspace.own_range
            assert not begin <= first.data_ptr() < end
        assert all(torch.equal(one, copy) for one, copy in kept)


@ranks(2)
def test_one_rank_may_copy_what_the_other_one_writes_there(rank: int) -> None:
    with collectives_of() as made, torch.no_grad():
        layer = layer_of(made, torch.float32)
        copying = layer_of(_Copying(made), torch.float32)
        for step in range(8):
            x = input_of(40, torch.float32, step + rank)
            expected = copying(x)
            # Other strides, or the product of something else: that rank alone does not ask.
            given = torch.cat([x, x], 1)[:, : INPUTS // 2] if rank == step % 2 else x
            with launches_of(made) as told:
                assert torch.equal(layer(given), expected)
            assert [in_place for *_, in_place in told] == [rank != step % 2]


@ranks(2)
def test_where_ranks_would_have_to_meet_first_the_operation_copies(rank: int) -> None:
    """With one slot, and after a graph: its barrier comes before its copy, and not too late."""
    with torch.no_grad():
        with collectives_of(slots=1) as made:
            layer = layer_of(made, torch.float32)
            plain = layer_of(default_collectives(), torch.float32)
            x = input_of(40, torch.float32, rank)
            with launches_of(made) as told:
                for _ in range(3):
                    assert torch.equal(layer(x), plain(x))
            assert [rest for _, *rest in told] == [[False, True], [True, False], [True, False]]
        with collectives_of() as made:
            layer = layer_of(made, torch.float32)
            rotation = made.workspace.turns.rotation
            rotation._was_captured = True
            with launches_of(made) as told:
                for _ in range(2):
                    assert torch.equal(layer(x), plain(x))
                with made.sequence():
                    for step in range(4):
                        x = input_of(40, torch.float32, 2 * step + rank)
                        assert torch.equal(layer(x), plain(x))
                assert torch.equal(layer(x), plain(x))
            copied, written = [True, False], [False, True]
            assert [rest for _, *rest in told] == [copied] * 3 + [written] * 3 + [copied]


@ranks(2)
def test_a_product_that_fails_leaves_the_memory_to_the_next_one(rank: int) -> None:
    with collectives_of() as made, torch.no_grad():
        layer = layer_of(made, torch.float32)
        x = input_of(40, torch.float32, rank)
        with (
            mock.patch.object(torch, "mm", side_effect=MemoryError("none is left")),
            pytest.raises(MemoryError) as caught,
        ):
            layer(x)
        # The traceback still holds the tensor, so the next product is copied; then it is free.
        expected = layer_of(default_collectives(), torch.float32)(x)
        with launches_of(made) as told:
            assert torch.equal(layer(x), expected)
            del caught
            assert torch.equal(layer(x), expected)
        assert [in_place for *_, in_place in told] == [False, True]
