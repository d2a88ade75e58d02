"""Norms and gates against the same formulas in fp64, and in fp32 against transformers."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from pcomm.core.errors import ConfigError
from pcomm.core.testing.assertions import assert_close, assert_equal
from pcomm.gdn_cp.ops.norms import gate_then_rms_norm, l2_normalise, rms_norm_then_gate


def test_l2_normalise_gives_length_one_and_leaves_zero() -> None:
    x = torch.randn(5, 3, 8, dtype=torch.float64)
    x[2, 1] = 0
    found = l2_normalise(x, scale=0.5)
    expected = 0.5 * x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    assert_close(found, expected, num_terms=8)
    assert not found[2, 1].any()
    assert l2_normalise(x.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_norm_before_the_gate_is_that_of_qwen3_next(dtype: torch.dtype) -> None:
    name = "transformers.models.qwen3_next.modeling_qwen3_next"
    qwen = pytest.importorskip(name, reason="transformers is an oracle: extra `test`")
    theirs = qwen.Qwen3NextRMSNormGated(8, eps=1e-5).to(dtype)
    torch.nn.init.normal_(theirs.weight)
    x, gate = torch.randn(2, 7, 4, 8).to(dtype)
    weight = theirs.weight.detach()
    ours = rms_norm_then_gate(x, gate, weight, eps=1e-5)
    assert ours.dtype == dtype
    if dtype == torch.float64:
        # transformers goes down to fp32 there; ours does not.
        expected = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        assert_close(ours, weight * expected * F.silu(gate), num_terms=8)
    else:
        assert_equal(ours, theirs(x, gate))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_groups", [1, 4])
def test_gate_before_the_norm_is_that_of_mamba2(dtype: torch.dtype, num_groups: int) -> None:
    name = "transformers.models.mamba2.modeling_mamba2"
    mamba = pytest.importorskip(name, reason="transformers is an oracle: extra `test`")
    theirs = mamba.MambaRMSNormGated(16, group_size=16 // num_groups, eps=1e-5).to(dtype)
    torch.nn.init.normal_(theirs.weight)
    x, gate = torch.randn(2, 7, 16).to(dtype)
    ours = gate_then_rms_norm(x, gate, theirs.weight, num_groups=num_groups, eps=1e-5)
    assert_equal(ours, theirs(x, gate))


def test_the_two_differ() -> None:
    x, gate, weight = torch.randn(3, 5, 8)
    before = rms_norm_then_gate(x, gate, weight[0])
    after = gate_then_rms_norm(x, gate, weight[0])
    assert (before - after).abs().max() > 0.1


def test_groups_must_divide_the_features() -> None:
    x = torch.randn(2, 10)
    with pytest.raises(ConfigError, match="num_groups=4: 10 features"):
        gate_then_rms_norm(x, x, x[0], num_groups=4)
