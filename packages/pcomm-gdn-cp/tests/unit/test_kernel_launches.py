"""The kernels of the mixers, launched as on a GPU: a driver that checks arguments takes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton has wheels for Linux only")

from core_support.fake_driver import fake_driver
from gdn_cp_bench.slow_decay import delta_inputs, offsets, ssd_inputs
from pcomm.gdn_cp.ops import Kernels

KERNELS = Kernels("triton", "for the test")
LENGTHS = (70, 0, 1)
CU, HALVES = offsets(LENGTHS), {"dtype": torch.bfloat16, "requires_grad": True}


@pytest.fixture
def products(form: str) -> Iterator[None]:
    """Products in one part, in the short form: they compile sooner than those in three."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if form == "long" else "high")
    yield
    torch.set_float32_matmul_precision(before)


def run_gated_delta_net(form: str) -> None:
    heads, taps = (4, 4) if form == "long" else (2, 2)
    *tokens, state = delta_inputs(LENGTHS, dtype=torch.float32, heads=heads)
    output, final = KERNELS.chunk_gated_delta_rule(*tokens, cu_seqlens=CU, initial_state=state)
    (output.sum() + final.sum()).backward()
    found = KERNELS.convolve_sections(
        torch.zeros(71, 22, **HALVES),
        torch.zeros(22, taps, **HALVES),
        ((1, 6), (1, 6), (2, 5)),
        cu_seqlens=CU,
        bias_D=torch.zeros(22, **HALVES),
        initial_halo=torch.zeros(3, taps - 1, 22, **HALVES),
        normalise=True,
    )
    sum(part.float().sum() for part in found).backward()


def run_mamba2_and_gates(form: str) -> None:
    x, dt, a_log, b, c, d, bias, _ = ssd_inputs(LENGTHS, dtype=torch.float32)
    y, _ = KERNELS.chunk_mamba2_ssd(x, dt, a_log, b, c, d_H=d, dt_bias_H=bias, cu_seqlens=CU)
    if form == "long":
        y.sum().backward()
    a = torch.zeros(71, 4, **HALVES)
    sum(x.sum() for x in KERNELS.delta_gates(a, a, a[0], a[1])).backward()
    z = torch.zeros(71, 4, 8, **HALVES)
    normed = KERNELS.rms_norm_then_gate(z, z, z[0, 0])
    (normed + KERNELS.gate_then_rms_norm(z, z, z[1, 0])).sum().backward()


# Twice what the backward computes again.
RECURRENCE = {
    **dict.fromkeys(("chunk_kernel", "scan_kernel", "collect_kernel"), 2),
    **dict.fromkeys(("read_kernel", "finish_kernel"), 1),
    **dict.fromkeys(("back_through_reads_kernel", "back_through_scan_kernel"), 1),
}
CONVOLUTION = {"convolution_kernel": 1, "convolution_backward_kernel": 1, "sum_kernel": 1}
GATES = {"gates_kernel": 2, "gates_backward_kernel": 1, "sum_kernel": 3}
MORE_GATES = {"gates_kernel": 2, "gates_backward_kernel": 2, "sum_kernel": 4}
NORMS = {"norm_kernel": 2, "norm_backward_kernel": 2}
FORWARD = dict.fromkeys(("chunk_kernel", "scan_kernel", "read_kernel"), 1)


@pytest.mark.parametrize(
    ("capability", "form", "expected"),
    [
        (90, "short", RECURRENCE | CONVOLUTION),
        (100, "short", FORWARD | GATES | NORMS),
        pytest.param(90, "long", RECURRENCE | CONVOLUTION, marks=pytest.mark.soak),
        pytest.param(100, "long", RECURRENCE | MORE_GATES | NORMS, marks=pytest.mark.soak),
    ],
)
def test_mixers_are_launched_as_they_were_compiled(
    products: None, capability: int, form: str, expected: dict[str, int]
) -> None:
    launches: list[tuple[Any, ...]] = []
    with fake_driver(capability, launches):
        run = run_gated_delta_net if capability == 90 else run_mamba2_and_gates
        run(form)
    assert Counter(launch[0] for launch in launches) == expected
