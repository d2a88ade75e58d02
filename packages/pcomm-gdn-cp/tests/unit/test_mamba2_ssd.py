"""The chunked state space of Mamba-2: arguments that the gated delta rule of `test_cores` lacks."""

from __future__ import annotations

import pytest
import torch

from gdn_cp_bench.slow_decay import ssd_inputs
from pcomm.core.errors import ConfigError, LayoutError
from pcomm.core.testing.assertions import assert_equal
from pcomm.gdn_cp.ops.mamba2_ssd import chunk_mamba2_ssd


def test_skip_and_initial_state_may_be_left_out() -> None:
    x, dt, a_log, b, c, d, bias, state = ssd_inputs((9, 4))
    options = {"dt_bias_H": bias, "cu_seqlens": (0, 9, 13), "chunk": 4}
    left_out = chunk_mamba2_ssd(x, dt, a_log, b, c, **options)
    zeros = {"d_H": torch.zeros_like(d), "initial_state": torch.zeros_like(state)}
    given = chunk_mamba2_ssd(x, dt, a_log, b, c, **options, **zeros)
    for ours, theirs in zip(left_out, given, strict=True):
        assert_equal(ours, theirs)


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
