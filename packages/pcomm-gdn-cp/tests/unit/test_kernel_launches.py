"""The kernels of the mixers, launched as on a GPU: a driver that checks arguments takes them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest

pytest.importorskip("triton", reason="triton has wheels for Linux only")

# In a process of its own: where Triton interprets, it is decided by the import of the kernels.
PROGRAM = """
import sys
import torch
from core_support.fake_driver import fake_driver
from gdn_cp_bench.slow_decay import delta_inputs, offsets, ssd_inputs
from pcomm.gdn_cp.ops import Kernels

torch.set_num_threads(1)
is_long = sys.argv[2] == "long"
# Products in one part compile sooner than those in three.
torch.set_float32_matmul_precision("highest" if is_long else "high")
taps = 4 if is_long else 2
kernels, lengths = Kernels("triton", "for the test"), (70, 0, 1)
cu, halves = offsets(lengths), {"dtype": torch.bfloat16, "requires_grad": True}
launches = []
with fake_driver(int(sys.argv[1]), launches):
    if sys.argv[1] == "90":
        heads = 4 if is_long else 2
        *tokens, state = delta_inputs(lengths, dtype=torch.float32, heads=heads)
        output, final = kernels.chunk_gated_delta_rule(*tokens, cu_seqlens=cu, initial_state=state)
        (output.sum() + final.sum()).backward()
        found = kernels.convolve_sections(
            torch.zeros(71, 22, **halves), torch.zeros(22, taps, **halves),
            ((1, 6), (1, 6), (2, 5)), cu_seqlens=cu, bias_D=torch.zeros(22, **halves),
            initial_halo=torch.zeros(3, taps - 1, 22, **halves), normalise=True,
        )
        sum(part.float().sum() for part in found).backward()
    else:
        x, dt, a_log, b, c, d, bias, state = ssd_inputs(lengths, dtype=torch.float32)
        y, _ = kernels.chunk_mamba2_ssd(
            x, dt, a_log, b, c, d_H=d, dt_bias_H=bias, cu_seqlens=cu
        )
        if is_long:
            y.sum().backward()
        a = torch.zeros(71, 4, **halves)
        sum(x.sum() for x in kernels.delta_gates(a, a, a[0], a[1])).backward()
        z = torch.zeros(71, 4, 8, **halves)
        normed = kernels.rms_norm_then_gate(z, z, z[0, 0])
        (normed + kernels.gate_then_rms_norm(z, z, z[1, 0])).sum().backward()
print(*(launch[0] for launch in launches))
"""
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
    capability: int, form: str, expected: dict[str, int]
) -> None:
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(capability), form],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert Counter(done.stdout.split()) == expected
