"""Chunks of a pack, against a loop over its tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gdn_cp_bench.slow_decay import offsets
from pcomm.core.errors import ConfigError, LayoutError
from pcomm.core.testing.assertions import assert_equal
from pcomm.gdn_cp.ops.chunks import ChunkLayout, from_chunks, to_chunks
from pcomm.gdn_cp.pack_offsets import PackOffsets

packs = st.tuples(st.lists(st.integers(0, 20), max_size=12), st.integers(1, 7))


def places(lengths: list[int], chunk: int) -> list[list[tuple[int, int] | None]]:
    """For each chunk, what is in its places: sequence and position. Written by steps."""
    longest_first = sorted(range(len(lengths)), key=lambda n: -lengths[n] // chunk)
    found = []
    for start in range(0, max(lengths, default=0), chunk):
        for n in longest_first:
            if lengths[n] > start:
                positions = range(start, start + chunk)
                found.append([(n, p) if p < lengths[n] else None for p in positions])
    return found


@given(packs)
@settings(max_examples=40, deadline=None)
def test_tokens_go_where_the_loop_puts_them_and_come_back(pack: tuple[list[int], int]) -> None:
    lengths, chunk = pack
    cu_seqlens = offsets(lengths)
    layout = ChunkLayout.of(cu_seqlens, chunk)
    x_THD = torch.arange(1, sum(lengths) * 6 + 1).view(-1, 2, 3)
    chunks = to_chunks(x_THD, layout)
    expected = places(lengths, chunk)
    assert chunks.shape == (len(expected), 2, chunk, 3)
    assert chunks.is_contiguous()
    for found_HCD, inside in zip(chunks, expected, strict=True):
        for place, token in enumerate(inside):
            wanted = x_THD[cu_seqlens[token[0]] + token[1]] if token else torch.zeros(2, 3)
            assert_equal(found_HCD[:, place], wanted.to(x_THD))
    assert_equal(from_chunks(chunks, layout), x_THD)
    strided_THD = torch.cat([x_THD, x_THD], -1)[..., :3]
    assert_equal(to_chunks(strided_THD, layout), chunks)
    assert_equal(to_chunks(x_THD[..., 0], layout), chunks[..., 0])
    assert_equal(from_chunks(chunks[..., 0], layout), x_THD[..., 0])


@given(packs)
@settings(max_examples=40, deadline=None)
def test_sequences_with_a_chunk_at_a_step_are_a_prefix_of_the_order(
    pack: tuple[list[int], int],
) -> None:
    lengths, chunk = pack
    layout = ChunkLayout.of(offsets(lengths), chunk)
    assert layout.lengths == tuple(lengths)
    assert sum(layout.step_sizes) == layout.num_chunks == sum(layout.chunk_counts)
    for step, size in enumerate(layout.step_sizes):
        with_chunk = {n for n, count in enumerate(layout.chunk_counts) if count > step}
        assert set(layout.order[:size]) == with_chunk
    order_N, rank_N = layout.indices(torch.device("cpu"))[4:]
    assert tuple(order_N.tolist()) == layout.order
    assert_equal(order_N[rank_N], torch.arange(len(lengths)))


@pytest.mark.parametrize("lengths", [(8,), (3, 0, 5, 9)], ids=["plain", "packed"])
def test_gradients_are_the_inverse_movement_and_padding_has_none(lengths: tuple[int, ...]) -> None:
    layout = ChunkLayout.of(offsets(lengths), 4)
    x_THD = torch.randn(sum(lengths), 2, 3, requires_grad=True)
    chunks = to_chunks(x_THD, layout)
    arriving = torch.randn(chunks.shape)
    (grad,) = torch.autograd.grad(chunks, x_THD, arriving)
    assert_equal(grad, from_chunks(arriving, layout))
    leaf = chunks.detach().requires_grad_()
    (grad,) = torch.autograd.grad(from_chunks(leaf, layout), leaf, x_THD.detach())
    assert_equal(grad, chunks)


def test_layouts_and_indices_are_made_once_and_also_serve_training_after_inference() -> None:
    with torch.inference_mode():
        pack = PackOffsets.of([0, 3, 11])
        first = ChunkLayout.of(pack, 5)
        indices = first.indices(torch.device("cpu"))
    assert ChunkLayout.of(pack, 5) is first
    assert first.indices(torch.device("cpu")) is indices
    # Each device has its own, and each size of chunks.
    assert all(x.device.type == "meta" for x in first.indices(torch.device("meta")))
    assert all(x.device.type == "cpu" for x in first.indices(torch.device("cpu")))
    assert ChunkLayout.of(pack, 4) == ChunkLayout((0, 3, 11), 4)
    # Plain integers have no memory, and nothing at module level has one for them.
    assert ChunkLayout.of((0, 3, 11), 5) is not first
    assert not any(x.is_inference() for x in indices)


@pytest.mark.parametrize(
    ("cu_seqlens", "chunk", "error", "part"),
    [
        ((0, 4), 0, ConfigError, "chunk=0"),
        ((), 4, LayoutError, "cu_seqlens"),
        ((1, 4), 4, LayoutError, "Start at 0"),
        ((0, 5, 4), 4, LayoutError, r"\[5, 4\] from place 1 of 3"),
    ],
    ids=["chunk", "none", "start", "fall"],
)
def test_bad_offsets_are_refused(
    cu_seqlens: tuple[int, ...], chunk: int, error: type[Exception], part: str
) -> None:
    with pytest.raises(error, match=part):
        ChunkLayout.of(cu_seqlens, chunk)
