"""The chunked gated delta rule: what `test_cores` does not have for the state space as well."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from gdn_cp_bench.slow_decay import delta_inputs, gradients, relative_error
from gdn_cp_support.naive_recurrences import naive_recurrent_gated_delta_rule
from pcomm.core.errors import ConfigError, LayoutError
from pcomm.core.testing.assertions import assert_equal
from pcomm.gdn_cp.ops.gated_delta_rule import chunk_gated_delta_rule
from pcomm.gdn_cp.ops.norms import normalise_queries_keys


def test_without_an_initial_state_it_is_zero() -> None:
    *tokens, state = delta_inputs((9, 4))
    cut = {"cu_seqlens": (0, 9, 13), "chunk": 4}
    zeros = chunk_gated_delta_rule(*tokens, **cut, initial_state=torch.zeros_like(state))
    for ours, theirs in zip(chunk_gated_delta_rule(*tokens, **cut), zeros, strict=True):
        assert_equal(ours, theirs)


@given(st.integers(1, 30), st.data())
@settings(max_examples=15, deadline=None)
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
