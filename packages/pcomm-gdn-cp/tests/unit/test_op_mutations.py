"""Deliberate breaks of the cores: each must show, by far, in the comparison that the tests make.

The comparison is with the token-by-token form at 1e-11. It means something only because decays are
slow: with the usual initial values a state that is lost changes little after a few tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from gdn_cp_bench.slow_decay import (
    delta_inputs,
    gradients,
    relative_error,
    ssd_inputs,
)
from gdn_cp_support.naive_recurrences import (
    naive_recurrent_gated_delta_rule,
    naive_recurrent_mamba2_ssd,
)
from pcomm.gdn_cp.ops import gated_delta_rule, mamba2_ssd
from pcomm.gdn_cp.ops.gated_delta_rule import chunk_gated_delta_rule
from pcomm.gdn_cp.ops.mamba2_ssd import chunk_mamba2_ssd

CU = (0, 40, 57, 90)
LENGTHS = (40, 17, 33)
LEAKING = (0, 57, 90)
Scan = Callable[..., Any]
Tensors = tuple[Tensor, ...]


def delta_errors(cu_seqlens: tuple[int, ...] = CU) -> tuple[float, float]:
    """Of outputs and of gradients."""
    *tokens, _ = delta_inputs(LENGTHS)
    ours = chunk_gated_delta_rule(*tokens, cu_seqlens=cu_seqlens, chunk=8)[:1]
    theirs = naive_recurrent_gated_delta_rule(*tokens, cu_seqlens=CU)[:1]
    found, expected = gradients(ours, tokens), gradients(theirs, tokens)
    return relative_error(ours, theirs), relative_error(found, expected)


def mamba2_ssd_errors(cu_seqlens: tuple[int, ...] = CU) -> tuple[float, float]:
    """Of outputs and of gradients."""
    x, dt, a_log, b, c, d, bias, _ = ssd_inputs(LENGTHS)
    leaves, rest = (x, dt, a_log, b, c, d, bias), {"d_H": d, "dt_bias_H": bias}
    ours = chunk_mamba2_ssd(x, dt, a_log, b, c, **rest, cu_seqlens=cu_seqlens, chunk=8)[:1]
    theirs = naive_recurrent_mamba2_ssd(x, dt, a_log, b, c, **rest, cu_seqlens=CU)[:1]
    found, expected = gradients(ours, leaves), gradients(theirs, leaves)
    return relative_error(ours, theirs), relative_error(found, expected)


FAMILIES = [
    pytest.param(gated_delta_rule, "delta_scan", 1, delta_errors, id="gated delta"),
    pytest.param(mamba2_ssd, "decay_scan", 0, mamba2_ssd_errors, id="state space"),
]


def breaking(scan: Scan, place: int, change: Callable[[Tensor], Tensor]) -> Scan:
    """`scan`, with the states that enter the chunks changed."""

    def broken(*arguments: Any) -> Any:
        found = scan(*arguments)
        changed = [change(x) if n == place else x for n, x in enumerate(found)]
        return type(found)(*changed) if hasattr(found, "_fields") else tuple(changed)

    return broken


@pytest.mark.parametrize(("module", "name", "place", "errors"), FAMILIES)
def test_unbroken_cores_pass(
    module: ModuleType, name: str, place: int, errors: Callable[..., tuple[float, float]]
) -> None:
    assert max(errors()) < 1e-11


@pytest.mark.parametrize(("module", "name", "place", "errors"), FAMILIES)
def test_a_state_dropped_between_chunks_shows(
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    name: str,
    place: int,
    errors: Callable[..., tuple[float, float]],
) -> None:
    monkeypatch.setattr(module, name, breaking(getattr(module, name), place, torch.zeros_like))
    assert min(errors()) > 0.1


@pytest.mark.parametrize(("module", "name", "place", "errors"), FAMILIES)
def test_a_state_that_leaks_into_the_next_document_shows(
    module: ModuleType, name: str, place: int, errors: Callable[..., tuple[float, float]]
) -> None:
    assert min(errors(LEAKING)) > 0.1


@pytest.mark.parametrize(("module", "name", "place", "errors"), FAMILIES)
def test_a_gradient_lost_in_the_state_shows(
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    name: str,
    place: int,
    errors: Callable[..., tuple[float, float]],
) -> None:
    monkeypatch.setattr(module, name, breaking(getattr(module, name), place, Tensor.detach))
    outputs, lost = errors()
    assert outputs < 1e-11
    assert lost > 0.1


@pytest.mark.parametrize(("module", "name", "place", "errors"), FAMILIES)
def test_sequences_handed_each_others_states_show(
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    name: str,
    place: int,
    errors: Callable[..., tuple[float, float]],
) -> None:
    def swapped(states: Tensor) -> Tensor:
        # The second step has chunks of all three sequences.
        return torch.cat([states[:3], states[3:6].flip(0), states[6:]])

    monkeypatch.setattr(module, name, breaking(getattr(module, name), place, swapped))
    assert min(errors()) > 0.1
