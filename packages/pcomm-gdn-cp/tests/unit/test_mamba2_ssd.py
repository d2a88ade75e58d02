"""The chunked state space of Mamba-2 and its summaries against the definition, token by token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pcomm.core.errors import ConfigError, LayoutError
from pcomm.core.testing.close import assert_as_accurate, assert_equal
from pcomm.gdn_cp.ops.mamba2_ssd.chunk import SsdChunks, chunk_mamba2_ssd
from pcomm.gdn_cp.ops.mamba2_ssd.naive import naive_recurrent_mamba2_ssd
from pcomm.gdn_cp.ops.mamba2_ssd.recurrent import mamba2_ssd_step
from pcomm.gdn_cp.ops.mamba2_ssd.summary import mamba2_ssd_summary
from pcomm.gdn_cp.ops.transitions import ScalarTransition
from pcomm.gdn_cp.testing.slow_decay import (
    SsdInputs,
    awkward_lengths,
    gradients,
    offsets,
    relative_error,
    ssd_inputs,
)

Tensors = tuple[Tensor, ...]


def run(
    inputs: SsdInputs, cu_seqlens: tuple[int, ...], chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Output and final state; token by token without a chunk."""
    x, dt, a_log, b, c, d, bias, state = inputs
    options = {"d_H": d, "dt_bias_H": bias, "cu_seqlens": cu_seqlens, "initial_state": state}
    if chunk is None:
        return naive_recurrent_mamba2_ssd(x, dt, a_log, b, c, **options)
    return chunk_mamba2_ssd(x, dt, a_log, b, c, **options, chunk=chunk)


def results(inputs: SsdInputs, lengths: tuple[int, ...], chunk: int | None = None) -> Tensors:
    outputs = run(inputs, offsets(lengths), chunk)
    return (*(x.detach() for x in outputs), *gradients(outputs, tuple(inputs)))


@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (2, 6)], ids=["one", "equal", "grouped"])
@pytest.mark.parametrize("chunk", [1, 4, 16, 64])
def test_chunks_give_what_tokens_give(heads: tuple[int, int], chunk: int) -> None:
    lengths = awkward_lengths(16)
    inputs = ssd_inputs(lengths, groups=heads[0], heads=heads[1])
    assert relative_error(results(inputs, lengths, chunk), results(inputs, lengths)) < 1e-11


@given(st.lists(st.integers(0, 14), max_size=7), st.integers(1, 5), st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_any_pack_gives_what_tokens_give(lengths: list[int], chunk: int, seed: int) -> None:
    pack = tuple(lengths)
    inputs = ssd_inputs(pack, seed=seed)
    assert relative_error(results(inputs, pack, chunk), results(inputs, pack)) < 1e-11


def test_torch_finds_the_same_gradients_by_differences() -> None:
    inputs = ssd_inputs((3, 0, 5), groups=1, heads=2, state_dim=2, head_dim=3)

    def chunked(*tensors: Tensor) -> Tensors:
        return run(SsdInputs(*tensors), (0, 3, 3, 8), 2)

    assert torch.autograd.gradcheck(chunked, tuple(inputs))


def test_skip_and_initial_state_may_be_left_out() -> None:
    x, dt, a_log, b, c, d, bias, state = ssd_inputs((9, 4))
    options = {"dt_bias_H": bias, "cu_seqlens": (0, 9, 13), "chunk": 4}
    left_out = chunk_mamba2_ssd(x, dt, a_log, b, c, **options)
    zeros = {"d_H": torch.zeros_like(d), "initial_state": torch.zeros_like(state)}
    given = chunk_mamba2_ssd(x, dt, a_log, b, c, **options, **zeros)
    for ours, theirs in zip(left_out, given, strict=True):
        assert_equal(ours, theirs)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=5), st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_segments_started_from_summaries_are_the_whole(segments: list[int], seed: int) -> None:
    """What ranks do: summaries of all segments, a fold, then each segment from its own state."""
    total = sum(segments)
    inputs = ssd_inputs((total,), seed=seed)
    x, dt, a_log, b, c, d, bias, state = inputs
    cut = {"dt_bias_H": bias, "cu_seqlens": offsets(segments), "chunk": 4}
    chunks = SsdChunks.of(x, dt, a_log, b, **cut)
    decays, written = mamba2_ssd_summary(x, dt, a_log, b, **cut)
    starts = [state]
    for n in range(len(segments)):
        summary = (decays[n : n + 1], written[n : n + 1])
        starts.append(ScalarTransition().apply(summary, starts[-1]))
    output, finals = chunks.outputs(c, d_H=d, initial_state=torch.cat(starts[:-1]))
    parts, whole = (output, finals[-1:]), run(inputs, (0, total), 4)
    assert relative_error(parts, whole) < 1e-11
    assert relative_error([starts[-1]], [whole[1]]) < 1e-11
    leaves = tuple(inputs)
    assert relative_error(gradients(parts, leaves), gradients(whole, leaves)) < 1e-11


def test_a_sequence_does_not_depend_on_its_neighbours() -> None:
    lengths = (7, 5, 12)
    inputs, other = ssd_inputs(lengths), ssd_inputs(lengths, seed=7)
    mixed = []
    for mine, theirs in zip(inputs, other, strict=True):
        changed = mine.detach().clone()
        if len(mine) == sum(lengths):
            changed[:7], changed[12:] = theirs.detach()[:7], torch.nan
        mixed.append(changed.requires_grad_())
    cut = offsets(lengths)
    expected, actual = (run(x, cut, 4) for x in (inputs, SsdInputs(*mixed)))
    assert_equal(actual[0][7:12], expected[0][7:12])
    assert_equal(actual[1][1], expected[1][1])
    (grad_x,) = gradients((actual[0][7:12], actual[1][1]), mixed[:1])
    (grad_y,) = gradients((expected[0][7:12], expected[1][1]), [inputs.x_THP])
    assert_equal(grad_x[7:12], grad_y[7:12])
    assert not grad_x[:7].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_lower_dtypes_lose_no_more_than_the_recurrence_does(dtype: torch.dtype) -> None:
    lengths = (70, 0, 33)
    inputs = ssd_inputs(lengths, dtype=dtype)
    exact = SsdInputs(*(x.detach().double().requires_grad_() for x in inputs))
    ours, plain = results(inputs, lengths, 16), results(inputs, lengths)
    assert ours[0].dtype == dtype
    assert ours[1].dtype == torch.float32
    for chunked, stepped, wanted in zip(ours, plain, results(exact, lengths), strict=True):
        assert_as_accurate(chunked, stepped, wanted, num_terms=64)


def test_autocast_lowers_nothing() -> None:
    inputs = ssd_inputs((20,), dtype=torch.float32)
    plain = run(inputs, (0, 20), 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lowered = run(inputs, (0, 20), 8)
    assert_equal(lowered[0], plain[0])
    assert_equal(lowered[1], plain[1])


def test_decoding_continues_a_prefill() -> None:
    lengths = (9, 6)
    x, dt, a_log, b, c, d, bias, state = ssd_inputs(lengths)
    rest = {"d_H": d, "dt_bias_H": bias}
    whole, final = naive_recurrent_mamba2_ssd(
        x, dt, a_log, b, c, **rest, cu_seqlens=offsets(lengths), initial_state=state
    )
    ends, before = torch.tensor([8, 14]), torch.tensor([*range(8), *range(9, 14)])
    parts = {"cu_seqlens": (0, 8, 13), "initial_state": state, "chunk": 4}
    x1, dt1, b1, c1 = (y[before] for y in (x, dt, b, c))
    _, carried = chunk_mamba2_ssd(x1, dt1, a_log, b1, c1, **rest, **parts)
    x2, dt2, b2, c2 = (y[ends] for y in (x, dt, b, c))
    output, stepped = mamba2_ssd_step(carried, x2, dt2, a_log, b2, c2, **rest)
    assert relative_error((output, stepped), (whole[ends], final)) < 1e-11


def test_shapes_that_do_not_fit_are_refused() -> None:
    x, dt, a_log, b, c, d, bias, state = ssd_inputs((8,))
    options = {"dt_bias_H": bias, "cu_seqlens": (0, 8)}
    with pytest.raises(LayoutError, match=r"b: 7 tokens, and cu_seqlens ends at 8"):
        chunk_mamba2_ssd(x, dt, a_log, b[:7], c, **options)
    with pytest.raises(ConfigError, match="3 value heads and 2 key heads"):
        chunk_mamba2_ssd(x[:, :3], dt[:, :3], a_log[:3], b, c, **options)
    with pytest.raises(ConfigError, match=r"a_log: shape \(3,\)"):
        chunk_mamba2_ssd(x, dt, a_log[:3], b, c, **options)
    with pytest.raises(ConfigError, match=r"c: shape \(8, 1, 6\)"):
        chunk_mamba2_ssd(x, dt, a_log, b, c[:, :1], **options)
    with pytest.raises(ConfigError, match="d: shape"):
        chunk_mamba2_ssd(x, dt, a_log, b, c, d_H=d[:1], **options)
    with pytest.raises(ConfigError, match="initial_state"):
        chunk_mamba2_ssd(x, dt, a_log, b, c, **options, initial_state=state.mT)
