"""The chunked cores: what they refuse, and what only the gated delta rule has."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from gdn_cp_bench.slow_decay import delta_inputs, gradients, relative_error, ssd_inputs
from gdn_cp_support.naive_recurrences import naive_recurrent_gated_delta_rule
from pcomm.core.errors import ConfigError, LayoutError
from pcomm.core.testing.assertions import assert_equal
from pcomm.gdn_cp.ops.chunks import default_chunk
from pcomm.gdn_cp.ops.gated_delta_rule import DeltaChunks, chunk_gated_delta_rule
from pcomm.gdn_cp.ops.mamba2_ssd import chunk_mamba2_ssd
from pcomm.gdn_cp.ops.norms import normalise_queries_keys


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_decays_of_any_strength_leave_no_denormal_numbers(dtype: torch.dtype) -> None:
    kind = torch.finfo(dtype)
    # From one that lasts for a chunk to one that makes the token before a denormal number.
    strongest = math.log(kind.smallest_normal) + math.log(kind.eps) / 2
    assert 0 < math.exp(strongest) < kind.smallest_normal
    q, k, v, _, beta, _ = (x.detach() for x in delta_inputs((64,), dtype=dtype, heads=4))
    g = torch.tensor([strongest / n for n in (32, 8, 3, 1)], dtype=dtype).expand(64, 4)
    chunks = DeltaChunks.of(k, v, g, beta, cu_seqlens=(0, 64), chunk=32)
    for x in (chunks.pairwise_MGRCC, chunks.inverse_MGRCC):
        assert not ((x != 0) & (x.abs() < kind.smallest_normal)).any()
    ours = chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=(0, 64), chunk=32)
    exact = (x.double() for x in (q, k, v, g, beta))
    theirs = naive_recurrent_gated_delta_rule(*exact, cu_seqlens=(0, 64))
    # A decay is the exponential of a difference of sums over the chunk.
    assert relative_error(ours, theirs) < 32 * -strongest * kind.eps / 2


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
    assert default_chunk(6, is_corrected=False) == 64
    for key_dim, chunk in ((6, 32), (127, 32), (128, 64)):
        *tokens, _ = delta_inputs((100,), key_dim=key_dim, dtype=torch.float32)
        by_default, given = (
            chunk_gated_delta_rule(*tokens, cu_seqlens=(0, 100), chunk=size)[0]
            for size in (None, chunk)
        )
        assert_equal(by_default, given)
    with pytest.raises(ConfigError, match="chunk=0"):
        chunk_gated_delta_rule(*tokens, cu_seqlens=(0, 100), chunk=0)


def delta(**changed: Any) -> None:
    names = ("q_TGK", "k_TGK", "v_THV", "g_TH", "beta_TH")
    tensors = dict(zip(names, delta_inputs((8,)), strict=False))
    chunk_gated_delta_rule(**{**tensors, "cu_seqlens": (0, 8), **changed})


def space(**changed: Any) -> None:
    names = ("x_THP", "dt_TH", "a_log_H", "b_TGS", "c_TGS", "d_H", "dt_bias_H")
    tensors = dict(zip(names, ssd_inputs((8,)), strict=False))
    chunk_mamba2_ssd(**{**tensors, "cu_seqlens": (0, 8), **changed})


@pytest.mark.parametrize(
    ("call", "changed", "error", "words"),
    [
        (delta, {"v_THV": (7, 4, 5)}, LayoutError, "v: 7 tokens, and cu_seqlens ends at 8"),
        (delta, {"v_THV": (8, 3, 5)}, ConfigError, "3 value heads and 2 key heads"),
        (delta, {"g_TH": (8, 3)}, ConfigError, r"g: shape \(8, 3\)"),
        (delta, {"q_TGK": (8, 1, 6)}, ConfigError, r"q: shape \(8, 1, 6\)"),
        (delta, {"initial_state": (1, 1, 6, 5)}, ConfigError, "initial_state"),
        (space, {"b_TGS": (7, 2, 6)}, LayoutError, "b: 7 tokens, and cu_seqlens ends at 8"),
        (space, {"x_THP": (8, 3, 5)}, ConfigError, "3 value heads and 2 key heads"),
        (space, {"a_log_H": (3,)}, ConfigError, r"a_log: shape \(3,\)"),
        (space, {"c_TGS": (8, 1, 6)}, ConfigError, r"c: shape \(8, 1, 6\)"),
        (space, {"d_H": (1,)}, ConfigError, "d: shape"),
        (space, {"initial_state": (1, 4, 5, 6)}, ConfigError, "initial_state"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    call: Any, changed: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        call(**{name: torch.zeros(shape).double() for name, shape in changed.items()})


def test_skip_and_initial_state_may_be_left_out() -> None:
    x, dt, a_log, b, c, d, bias, state = ssd_inputs((9, 4))
    options = {"dt_bias_H": bias, "cu_seqlens": (0, 9, 13), "chunk": 4}
    left_out = chunk_mamba2_ssd(x, dt, a_log, b, c, **options)
    zeros = {"d_H": torch.zeros_like(d), "initial_state": torch.zeros_like(state)}
    assert_equal(left_out, chunk_mamba2_ssd(x, dt, a_log, b, c, **options, **zeros))
    *tokens, state = delta_inputs((9, 4))
    cut = {"cu_seqlens": (0, 9, 13), "chunk": 4}
    zero = chunk_gated_delta_rule(*tokens, **cut, initial_state=torch.zeros_like(state))
    assert_equal(chunk_gated_delta_rule(*tokens, **cut), zero)
