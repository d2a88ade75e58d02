"""Summaries of segments do to a state what the segments do, one after another."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pcomm.core.testing.close import assert_equal
from pcomm.gdn_cp.ops.gated_delta_rule.chunk import DeltaChunks, chunk_gated_delta_rule
from pcomm.gdn_cp.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
from pcomm.gdn_cp.ops.gated_delta_rule.summary import gated_delta_summary
from pcomm.gdn_cp.ops.transitions import MatrixTransition
from pcomm.gdn_cp.testing.slow_decay import (
    awkward_lengths,
    delta_inputs,
    gradients,
    offsets,
    relative_error,
)


def test_it_maps_every_state_to_the_state_after_the_sequence() -> None:
    lengths = awkward_lengths(8)
    inputs = delta_inputs(lengths)
    q, k, v, g, beta, state = inputs
    cut = {"cu_seqlens": offsets(lengths)}
    ours = MatrixTransition().apply(gated_delta_summary(k, v, g, beta, **cut, chunk=8), state)
    _, theirs = naive_recurrent_gated_delta_rule(q, k, v, g, beta, **cut, initial_state=state)
    assert relative_error([ours], [theirs]) < 1e-11
    leaves = (k, v, g, beta, state)
    assert relative_error(gradients([ours], leaves), gradients([theirs], leaves)) < 1e-11


def test_an_empty_sequence_hands_its_state_on() -> None:
    _, k, v, g, beta, state = delta_inputs((3, 0))
    summary = gated_delta_summary(k, v, g, beta, cu_seqlens=(0, 3, 3))
    assert_equal(MatrixTransition().apply(summary, state)[1], state[1])


def test_torch_finds_the_same_gradients_by_differences() -> None:
    _, k, v, g, beta, _ = delta_inputs((3, 2), key_heads=1, heads=2, key_dim=2, value_dim=3)

    def run(k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        return gated_delta_summary(k, v, g, beta, cu_seqlens=(0, 3, 5), chunk=2)

    assert torch.autograd.gradcheck(run, (k, v, g, beta))


@given(st.lists(st.integers(0, 12), min_size=1, max_size=5), st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_segments_started_from_summaries_are_the_whole(segments: list[int], seed: int) -> None:
    """What ranks do: summaries of all segments, a fold, then each segment from its own state."""
    total = sum(segments)
    inputs = delta_inputs((total,), seed=seed)
    q, k, v, g, beta, state = inputs
    cut = {"cu_seqlens": offsets(segments), "chunk": 4}
    chunks = DeltaChunks.of(k, v, g, beta, **cut)
    transitions, written = chunks.summary()
    summaries = [(transitions[n : n + 1], written[n : n + 1]) for n in range(len(segments))]
    starts = [state]
    for summary in summaries:
        starts.append(MatrixTransition().apply(summary, starts[-1]))
    output, finals = chunks.outputs(q, initial_state=torch.cat(starts[:-1]))
    whole = chunk_gated_delta_rule(
        q, k, v, g, beta, cu_seqlens=(0, total), initial_state=state, chunk=4
    )
    parts = (output, finals[-1:])
    assert relative_error(parts, whole) < 1e-11
    assert relative_error([starts[-1]], [whole[1]]) < 1e-11
    leaves = tuple(inputs)
    assert relative_error(gradients(parts, leaves), gradients(whole, leaves)) < 1e-11
