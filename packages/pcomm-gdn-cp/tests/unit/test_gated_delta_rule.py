"""The chunked gated delta rule against its definition, token by token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pcomm.core.errors import ConfigError, LayoutError
from pcomm.core.testing.close import assert_as_accurate, assert_equal
from pcomm.gdn_cp.ops.gated_delta_rule.chunk import chunk_gated_delta_rule
from pcomm.gdn_cp.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
from pcomm.gdn_cp.ops.gated_delta_rule.recurrent import gated_delta_step
from pcomm.gdn_cp.ops.norms import normalise_queries_keys
from pcomm.gdn_cp.testing.slow_decay import (
    DeltaInputs,
    awkward_lengths,
    delta_inputs,
    gradients,
    offsets,
    relative_error,
)

Tensors = tuple[Tensor, ...]


def results(inputs: DeltaInputs, lengths: tuple[int, ...], chunk: int | None = None) -> Tensors:
    """Output, final state, and all gradients; token by token without a chunk."""
    *tokens, state = inputs
    options = {"cu_seqlens": offsets(lengths), "initial_state": state}
    if chunk is None:
        outputs = naive_recurrent_gated_delta_rule(*tokens, **options)
    else:
        outputs = chunk_gated_delta_rule(*tokens, **options, chunk=chunk)
    return (*(x.detach() for x in outputs), *gradients(outputs, tuple(inputs)))


@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (2, 6)], ids=["one", "equal", "grouped"])
@pytest.mark.parametrize("chunk", [1, 4, 16, 64])
def test_chunks_give_what_tokens_give(heads: tuple[int, int], chunk: int) -> None:
    lengths = awkward_lengths(16)
    inputs = delta_inputs(lengths, key_heads=heads[0], heads=heads[1])
    assert relative_error(results(inputs, lengths, chunk), results(inputs, lengths)) < 1e-11


@given(st.lists(st.integers(0, 14), max_size=7), st.integers(1, 5), st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_any_pack_gives_what_tokens_give(lengths: list[int], chunk: int, seed: int) -> None:
    pack = tuple(lengths)
    inputs = delta_inputs(pack, seed=seed)
    assert relative_error(results(inputs, pack, chunk), results(inputs, pack)) < 1e-11


def test_torch_finds_the_same_gradients_by_differences() -> None:
    inputs = delta_inputs((3, 0, 5), key_heads=1, heads=2, key_dim=2, value_dim=3)

    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, s: Tensor) -> Tensors:
        return chunk_gated_delta_rule(
            q, k, v, g, beta, cu_seqlens=(0, 3, 3, 8), initial_state=s, chunk=2
        )

    assert torch.autograd.gradcheck(run, tuple(inputs))


def test_without_an_initial_state_it_is_zero() -> None:
    *tokens, state = delta_inputs((9, 4))
    cut = {"cu_seqlens": (0, 9, 13), "chunk": 4}
    zeros = chunk_gated_delta_rule(*tokens, **cut, initial_state=torch.zeros_like(state))
    for ours, theirs in zip(chunk_gated_delta_rule(*tokens, **cut), zeros, strict=True):
        assert_equal(ours, theirs)


@given(st.integers(1, 30), st.data())
@settings(max_examples=30, deadline=None)
def test_a_sequence_cut_anywhere_is_the_whole(length: int, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, length))
    *tokens, state = inputs = delta_inputs((length,))
    whole = chunk_gated_delta_rule(*tokens, cu_seqlens=(0, length), initial_state=state, chunk=4)
    first, middle = chunk_gated_delta_rule(
        *(x[:cut] for x in tokens), cu_seqlens=(0, cut), initial_state=state, chunk=4
    )
    rest = (x[cut:] for x in tokens)
    second, final = chunk_gated_delta_rule(
        *rest, cu_seqlens=(0, length - cut), initial_state=middle, chunk=4
    )
    parts = (torch.cat([first, second]), final)
    assert relative_error(parts, whole) < 1e-11
    leaves = tuple(inputs)
    assert relative_error(gradients(parts, leaves), gradients(whole, leaves)) < 1e-11


def test_a_sequence_does_not_depend_on_its_neighbours() -> None:
    lengths = (7, 5, 12)
    inputs = delta_inputs(lengths)
    other = delta_inputs(lengths, seed=7)
    # The middle sequence keeps its tokens; all others become another pack's, some not finite.
    *tokens, state = inputs
    mixed = []
    for mine, theirs in zip(tokens, other, strict=False):
        changed = theirs.detach().clone()
        changed[7:12] = mine.detach()[7:12]
        changed[12:] = torch.nan
        mixed.append(changed.requires_grad_())
    cut = {"cu_seqlens": offsets(lengths), "initial_state": state, "chunk": 4}
    expected, actual = (chunk_gated_delta_rule(*x, **cut) for x in (tokens, mixed))
    assert_equal(actual[0][7:12], expected[0][7:12])
    assert_equal(actual[1][1], expected[1][1])
    rows = [gradients((o[7:12], s[1]), x) for (o, s), x in ((actual, mixed), (expected, tokens))]
    for ours, theirs in zip(*rows, strict=True):
        assert_equal(ours[7:12], theirs[7:12])
        assert not ours[:7].any()


def test_gates_at_their_limits_stay_finite_forward_and_backward() -> None:
    lengths = (40,)
    *tokens, state = delta_inputs(lengths, dtype=torch.float32)
    q, k, v, g, beta = (x.detach().clone() for x in tokens)
    g[::3], g[1::7], g[2::7], beta[::4], beta[1::4] = -1e4, -torch.inf, 0, 0, 1
    q[5:8], k[9:30] = 0, k[9]
    leaves = [x.requires_grad_() for x in (q, k, v, g, beta)]
    options = {"cu_seqlens": (0, 40), "initial_state": state}
    ours = chunk_gated_delta_rule(*leaves, **options, chunk=16)
    theirs = naive_recurrent_gated_delta_rule(*leaves, **options)
    # A decay is the exponential of a difference of sums: 16 tokens of at most 103 each, in fp32.
    bound = 16 * 103 * torch.finfo(torch.float32).eps / 2
    assert relative_error(ours, theirs) < bound
    wanted = (*leaves, state)
    assert relative_error(gradients(ours, wanted), gradients(theirs, wanted)) < bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_lower_dtypes_lose_no_more_than_the_recurrence_does(dtype: torch.dtype) -> None:
    lengths = (70, 0, 33)
    inputs = delta_inputs(lengths, dtype=dtype)
    exact = DeltaInputs(*(x.detach().double().requires_grad_() for x in inputs))
    ours, plain = results(inputs, lengths, 16), results(inputs, lengths)
    assert ours[0].dtype == dtype
    assert ours[1].dtype == torch.float32
    for chunked, stepped, wanted in zip(ours, plain, results(exact, lengths), strict=True):
        assert_as_accurate(chunked, stepped, wanted, num_terms=64)


def test_autocast_lowers_nothing() -> None:
    *tokens, state = delta_inputs((20,), dtype=torch.float32)
    options = {"cu_seqlens": (0, 20), "initial_state": state, "chunk": 8}
    plain = chunk_gated_delta_rule(*tokens, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lowered = chunk_gated_delta_rule(*tokens, **options)
        found = gradients(lowered, tokens)
    assert_equal(lowered[0], plain[0])
    assert_equal(lowered[1], plain[1])
    assert relative_error(found, gradients(plain, tokens)) == 0


def test_recomputing_it_in_backward_changes_nothing() -> None:
    *tokens, state = inputs = delta_inputs((20, 7))
    options = {"cu_seqlens": (0, 20, 27), "initial_state": state, "chunk": 8}
    kept = chunk_gated_delta_rule(*tokens, **options)
    again = checkpoint(chunk_gated_delta_rule, *tokens, **options, use_reentrant=False)
    for ours, theirs in zip(
        (*again, *gradients(again, tuple(inputs))),
        (*kept, *gradients(kept, tuple(inputs))),
        strict=True,
    ):
        assert_equal(ours, theirs)


def test_gradients_of_any_strides_are_taken() -> None:
    *tokens, state = delta_inputs((10,))
    options = {"cu_seqlens": (0, 10), "initial_state": state, "chunk": 4}
    output, final = chunk_gated_delta_rule(*tokens, **options)
    arriving = torch.randn(*output.shape[::-1], dtype=output.dtype).permute(2, 1, 0)
    found = torch.autograd.grad(output, tokens, arriving, retain_graph=True)
    expected = torch.autograd.grad(output, tokens, arriving.contiguous(), retain_graph=True)
    for ours, theirs in zip(found, expected, strict=True):
        assert_equal(ours, theirs)
    expanded = torch.autograd.grad(final.sum(), tokens[1:])
    assert all(x.isfinite().all() for x in expanded)


def test_decoding_continues_a_prefill() -> None:
    lengths = (9, 6)
    *tokens, state = delta_inputs(lengths)
    whole, final = naive_recurrent_gated_delta_rule(
        *tokens, cu_seqlens=offsets(lengths), initial_state=state
    )
    ends = torch.tensor([8, 14])
    before = torch.tensor([*range(8), *range(9, 14)])
    _, carried = chunk_gated_delta_rule(
        *(x[before] for x in tokens), cu_seqlens=(0, 8, 13), initial_state=state, chunk=4
    )
    output, stepped = gated_delta_step(carried, *(x[ends] for x in tokens))
    assert relative_error((output, stepped), (whole[ends], final)) < 1e-11


def test_the_front_normalises_and_scales() -> None:
    inputs = delta_inputs((12,))
    q, k, v, g, beta, _ = inputs
    prepared = normalise_queries_keys(3 * q, 5 * k)
    raw = chunk_gated_delta_rule(*prepared, v, g, beta, cu_seqlens=(0, 12), chunk=4)
    ready = chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=(0, 12), chunk=4)
    # The small number under the root is not scaled along; it moves a length by about 1e-6.
    assert relative_error(raw, ready) < 1e-5


def test_the_default_chunk_follows_the_key_dimension() -> None:
    for key_dim, chunk in ((6, 32), (128, 64)):
        *tokens, _ = delta_inputs((100,), key_dim=key_dim, dtype=torch.float32)
        by_default, given = (
            chunk_gated_delta_rule(*tokens, cu_seqlens=(0, 100), chunk=size)[0]
            for size in (None, chunk)
        )
        assert_equal(by_default, given)
    with pytest.raises(ConfigError, match="chunk=0"):
        chunk_gated_delta_rule(*tokens, cu_seqlens=(0, 100), chunk=0)


def test_shapes_that_do_not_fit_are_refused() -> None:
    q, k, v, g, beta, state = delta_inputs((8,))
    with pytest.raises(LayoutError, match=r"v: 7 tokens, and cu_seqlens ends at 8"):
        chunk_gated_delta_rule(q, k, v[:7], g, beta, cu_seqlens=(0, 8))
    with pytest.raises(ConfigError, match="3 value heads and 2 key heads"):
        chunk_gated_delta_rule(q, k, v[:, :3], g[:, :3], beta[:, :3], cu_seqlens=(0, 8))
    with pytest.raises(ConfigError, match=r"g: shape \(8, 3\)"):
        chunk_gated_delta_rule(q, k, v, g[:, :3], beta, cu_seqlens=(0, 8))
    with pytest.raises(ConfigError, match=r"q: shape \(8, 1, 6\)"):
        chunk_gated_delta_rule(q[:, :1], k, v, g, beta, cu_seqlens=(0, 8))
    with pytest.raises(ConfigError, match="initial_state"):
        chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=(0, 8), initial_state=state[:, :1])
