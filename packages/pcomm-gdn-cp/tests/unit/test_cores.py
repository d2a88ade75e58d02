"""Chunked cores against their definitions, token by token: what both of them have to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gdn_cp_bench.slow_decay import (
    DeltaInputs,
    SsdInputs,
    awkward_lengths,
    delta_inputs,
    gradients,
    offsets,
    relative_error,
    ssd_inputs,
)
from gdn_cp_support.naive_recurrences import (
    naive_recurrent_gated_delta_rule,
    naive_recurrent_mamba2_ssd,
)
from pcomm.core.testing.assertions import assert_as_accurate, assert_equal
from pcomm.gdn_cp.ops import gated_delta_rule, mamba2_ssd
from pcomm.gdn_cp.ops.gated_delta_rule import DeltaChunks, chunk_gated_delta_rule, gated_delta_step
from pcomm.gdn_cp.ops.mamba2_ssd import SsdChunks, chunk_mamba2_ssd, mamba2_ssd_step
from pcomm.gdn_cp.specs import MatrixTransition, ScalarTransition

Tensors = tuple[Tensor, ...]


class GatedDelta:
    """The gated delta rule; `shared` and `small` are sizes of `inputs`."""

    inputs, transition = staticmethod(delta_inputs), MatrixTransition()
    # What makes the states that enter the chunks, and their place in its result.
    scan, place = (gated_delta_rule, "delta_scan"), 1
    shared, small = "key_heads", {"key_heads": 1, "heads": 2, "key_dim": 2, "value_dim": 3}

    @staticmethod
    def run(inputs: DeltaInputs, cu_seqlens: Any, chunk: int | None = None) -> Tensors:
        """Output and final state; token by token without a chunk."""
        *tokens, state = inputs
        options = {"cu_seqlens": cu_seqlens, "initial_state": state}
        if chunk is None:
            return naive_recurrent_gated_delta_rule(*tokens, **options)
        return chunk_gated_delta_rule(*tokens, **options, chunk=chunk)

    @staticmethod
    def step(inputs: DeltaInputs) -> Tensors:
        *tokens, state = inputs
        return gated_delta_step(state, *tokens)

    @staticmethod
    def chunks(inputs: DeltaInputs, cu_seqlens: Any, chunk: int) -> DeltaChunks:
        _, *tokens, _ = inputs
        return DeltaChunks.of(*tokens, cu_seqlens=cu_seqlens, chunk=chunk)

    @staticmethod
    def outputs(chunks: DeltaChunks, inputs: DeltaInputs, states: Tensor) -> Tensors:
        return chunks.outputs(inputs.q_TGK, initial_state=states)


class StateSpace:
    """The same of Mamba-2."""

    inputs, transition = staticmethod(ssd_inputs), ScalarTransition()
    scan, place = (mamba2_ssd, "decay_scan"), 0
    shared, small = "groups", {"groups": 1, "heads": 2, "state_dim": 2, "head_dim": 3}

    @staticmethod
    def run(inputs: SsdInputs, cu_seqlens: Any, chunk: int | None = None) -> Tensors:
        """Output and final state; token by token without a chunk."""
        x, dt, a_log, b, c, d, bias, state = inputs
        options = {"d_H": d, "dt_bias_H": bias, "cu_seqlens": cu_seqlens, "initial_state": state}
        if chunk is None:
            return naive_recurrent_mamba2_ssd(x, dt, a_log, b, c, **options)
        return chunk_mamba2_ssd(x, dt, a_log, b, c, **options, chunk=chunk)

    @staticmethod
    def step(inputs: SsdInputs) -> Tensors:
        x, dt, a_log, b, c, d, bias, state = inputs
        return mamba2_ssd_step(state, x, dt, a_log, b, c, d_H=d, dt_bias_H=bias)

    @staticmethod
    def chunks(inputs: SsdInputs, cu_seqlens: Any, chunk: int) -> SsdChunks:
        x, dt, a_log, b, _, _, bias, _ = inputs
        return SsdChunks.of(x, dt, a_log, b, dt_bias_H=bias, cu_seqlens=cu_seqlens, chunk=chunk)

    @staticmethod
    def outputs(chunks: SsdChunks, inputs: SsdInputs, states: Tensor) -> Tensors:
        return chunks.outputs(inputs.c_TGS, d_H=inputs.d_H, initial_state=states)


CORES = pytest.mark.parametrize("core", [GatedDelta, StateSpace], ids=["delta", "ssd"])


def results(core: Any, inputs: Any, lengths: tuple[int, ...], chunk: int | None = None) -> Tensors:
    """Output, final state, and all gradients; token by token without a chunk."""
    outputs = core.run(inputs, offsets(lengths), chunk)
    return (*(x.detach() for x in outputs), *gradients(outputs, tuple(inputs)))


def at(inputs: Any, tokens: Tensor, num_tokens: int) -> Any:
    """Inputs of these tokens; parameters and states as they are."""
    return type(inputs)(*(x[tokens] if len(x) == num_tokens else x for x in inputs))


@CORES
@pytest.mark.parametrize(
    ("heads", "chunk"), [((1, 1), 4), ((2, 2), 64), ((2, 6), 16), ((2, 6), 1)], ids=str
)
def test_chunks_give_what_tokens_give(core: Any, heads: tuple[int, int], chunk: int) -> None:
    lengths = awkward_lengths(16)
    inputs = core.inputs(lengths, **{core.shared: heads[0]}, heads=heads[1])
    found, expected = (results(core, inputs, lengths, size) for size in (chunk, None))
    assert relative_error(found, expected) < 1e-11


@CORES
@given(st.lists(st.integers(0, 14), max_size=7), st.integers(1, 5), st.integers(0, 2**31))
@settings(max_examples=15, deadline=None)
def test_any_pack_gives_what_tokens_give(
    core: Any, lengths: list[int], chunk: int, seed: int
) -> None:
    pack = tuple(lengths)
    inputs = core.inputs(pack, seed=seed)
    found, expected = (results(core, inputs, pack, size) for size in (chunk, None))
    assert relative_error(found, expected) < 1e-11


@CORES
def test_torch_finds_the_same_gradients_by_differences(core: Any) -> None:
    inputs = core.inputs((1, 0, 5), **core.small)

    def chunked(*tensors: Tensor) -> Tensors:
        return core.run(type(inputs)(*tensors), (0, 1, 1, 6), 2)  # type: ignore[no-any-return]

    assert torch.autograd.gradcheck(chunked, tuple(inputs))


@CORES
def test_a_summary_maps_every_state_to_the_state_after_the_sequence(core: Any) -> None:
    cut = offsets(awkward_lengths(8))
    inputs = core.inputs(awkward_lengths(8))
    ours = core.transition.apply(core.chunks(inputs, cut, 8).summary(), inputs[-1])
    _, theirs = core.run(inputs, cut)
    assert relative_error([ours], [theirs]) < 1e-11
    leaves = tuple(inputs)
    assert relative_error(gradients([ours], leaves), gradients([theirs], leaves)) < 1e-11


@CORES
def test_torch_finds_the_same_gradients_of_summaries_by_differences(core: Any) -> None:
    inputs = core.inputs((3, 2), **core.small)

    def summary(*tensors: Tensor) -> Tensors:
        return core.chunks(type(inputs)(*tensors), (0, 3, 5), 2).summary()  # type: ignore[no-any-return]

    assert torch.autograd.gradcheck(summary, tuple(inputs))


@CORES
@given(st.lists(st.integers(0, 12), min_size=1, max_size=5), st.integers(0, 2**31))
@settings(max_examples=12, deadline=None)
def test_segments_started_from_summaries_are_the_whole(
    core: Any, segments: list[int], seed: int
) -> None:
    """What ranks do: summaries of all segments, a fold, then each segment from its own state."""
    total = sum(segments)
    inputs = core.inputs((total,), seed=seed)
    chunks = core.chunks(inputs, offsets(segments), 4)
    transitions, written = chunks.summary()
    starts = [inputs[-1]]
    for n in range(len(segments)):
        summary = (transitions[n : n + 1], written[n : n + 1])
        starts.append(core.transition.apply(summary, starts[-1]))
    output, finals = core.outputs(chunks, inputs, torch.cat(starts[:-1]))
    parts, whole = (output, finals[-1:]), core.run(inputs, (0, total), 4)
    assert relative_error(parts, whole) < 1e-11
    assert relative_error([starts[-1]], [whole[1]]) < 1e-11
    leaves = tuple(inputs)
    assert relative_error(gradients(parts, leaves), gradients(whole, leaves)) < 1e-11


@CORES
def test_a_sequence_does_not_depend_on_its_neighbours(core: Any) -> None:
    lengths = (7, 5, 12)
    inputs, other = core.inputs(lengths), core.inputs(lengths, seed=7)
    # The middle sequence keeps its tokens; all others become another pack's, some not finite.
    changed = []
    for mine, theirs in zip(inputs, other, strict=True):
        copy = mine.detach().clone()
        if len(mine) == sum(lengths):
            copy[:7], copy[12:] = theirs.detach()[:7], torch.nan
        changed.append(copy.requires_grad_())
    mixed = type(inputs)(*changed)
    (expected, left), (actual, found) = (core.run(x, offsets(lengths), 4) for x in (inputs, mixed))
    assert_equal(actual[7:12], expected[7:12])
    assert_equal(found[1], left[1])
    ours = gradients((actual[7:12], found[1]), tuple(mixed))
    theirs = gradients((expected[7:12], left[1]), tuple(inputs))
    for mine, wanted, x in zip(ours, theirs, inputs, strict=True):
        if len(x) == sum(lengths):
            assert_equal(mine[7:12], wanted[7:12])
            assert not mine[:7].any()


@CORES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_lower_dtypes_lose_no_more_than_the_recurrence_does(core: Any, dtype: torch.dtype) -> None:
    lengths = (70, 0, 33)
    inputs = core.inputs(lengths, dtype=dtype)
    exact = type(inputs)(*(x.detach().double().requires_grad_() for x in inputs))
    ours, plain = results(core, inputs, lengths, 16), results(core, inputs, lengths)
    assert ours[0].dtype == dtype
    assert ours[1].dtype == torch.float32
    for chunked, stepped, wanted in zip(ours, plain, results(core, exact, lengths), strict=True):
        assert_as_accurate(chunked, stepped, wanted, num_terms=64)


@CORES
def test_autocast_lowers_nothing(core: Any) -> None:
    inputs = core.inputs((20,), dtype=torch.float32)
    leaves = tuple(inputs)
    plain = core.run(inputs, (0, 20), 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lowered = core.run(inputs, (0, 20), 8)
        found = gradients(lowered, leaves)
    assert_equal(lowered[0], plain[0])
    assert_equal(lowered[1], plain[1])
    assert relative_error(found, gradients(plain, leaves)) == 0


@CORES
def test_decoding_continues_a_prefill(core: Any) -> None:
    lengths = (9, 6)
    inputs = core.inputs(lengths)
    whole, final = core.run(inputs, offsets(lengths))
    ends, before = torch.tensor([8, 14]), torch.tensor([*range(8), *range(9, 14)])
    _, carried = core.run(at(inputs, before, 15), (0, 8, 13), 4)
    last = type(inputs)(*at(inputs, ends, 15)[:-1], carried)
    assert relative_error(core.step(last), (whole[ends], final)) < 1e-11


def swapped(states: Tensor) -> Tensor:
    # The second step has chunks of all three sequences.
    return torch.cat([states[:3], states[3:6].flip(0), states[6:]])


@CORES
@pytest.mark.parametrize(
    "change",
    [torch.zeros_like, Tensor.detach, swapped, None],
    ids=["zero", "detached", "swapped", "none"],
)
def test_a_wrong_state_shows_by_far(
    core: Any, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Because decays are slow: with the usual ones a lost state changes little after few tokens.

    Without a change of what enters the chunks, the first sequence leaks into the second one.
    """
    inputs = core.inputs((40, 17, 33))
    *tokens, state = inputs
    expected, right = core.run(inputs, (0, 40, 57, 90))[0], getattr(*core.scan)

    def broken(*given: Any) -> Any:
        found = right(*given)
        changed = [change(x) if n == core.place else x for n, x in enumerate(found)]
        return type(found)(*changed) if hasattr(found, "_fields") else tuple(changed)

    cut = (0, 40, 57, 90) if change else (0, 57, 90)
    if change:
        monkeypatch.setattr(*core.scan, broken)
    found, _ = core.run(type(inputs)(*tokens, state if change else state[::2]), cut, 8)
    off = relative_error([found], [expected])
    assert off < 1e-11 if change is Tensor.detach else off > 0.1
    assert relative_error(gradients([found], tokens), gradients([expected], tokens)) > 0.1
