"""Packing and unpacking on one GPU, in GB/s, over `clone()` of as many bytes. Needs CUDA.

bf16, 8 ranks, zigzag. Sections are those of Qwen3-Next with the gate: 12,352 columns, 1,544 of a
rank. 16,384 tokens of a rank are what it packs before the all-to-all, and 65,536 tokens of all
ranks what it brings into order after it. Every byte is counted twice, read and written. Results are
compared with torch first, which is timed too. Aim: 85 % of `clone()`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from pcomm.core.errors import UnsupportedError
from pcomm.core.exchange import ColumnShards, Packing
from pcomm.core.testing import assert_equal
from pcomm.gdn_cp.ops.backend import choose_packing
from pcomm.gdn_cp.token_layout import TokenLayout

# The runner of benchmarks is in no wheel.
sys.path.append(str(Path(__file__).parents[2] / "pcomm-core" / "benchmarks"))

from core_bench.rows import Row
from core_bench.runner import run_benchmark, time_cases

NAME, RANKS, SEQUENCES = "pack_bandwidth", 8, 64
SHARDS = [
    ColumnShards(num_heads, head_width, 1, RANKS)
    for num_heads, head_width in ((16, 128), (16, 128), (32, 128), (32, 128), (32, 1), (32, 1))
]
WIDTHS = [shard.width_per_rank for shard in SHARDS]
Case = Callable[[], Sequence[Tensor]]


def measure() -> list[Row]:
    if not torch.cuda.is_available():
        raise UnsupportedError(
            NAME,
            found="no CUDA device",
            why="It compares kernels with the memory bandwidth of the GPU that they are made for.",
            fix="Run it on a machine with a GPU and a CUDA build of torch.",
        )
    return [*rows_of(16_384 * RANKS), *rows_of(65_536)]


def rows_of(num_tokens: int) -> list[Row]:
    """All cases with so many tokens of all ranks."""
    device = torch.device("cuda")
    message = torch.randn(num_tokens, sum(WIDTHS), device=device).bfloat16()
    label = f"{num_tokens // RANKS:,} x {sum(WIDTHS) * RANKS:,} = {num_tokens:,} x {sum(WIDTHS):,}"
    clone = f"clone, {label}"
    cases: dict[str, Case] = {clone: lambda: [message.clone()]}
    names = "triton", "torch"
    ours, plain = (
        cases_of(choose_packing(device, message.dtype, wanted=name).packing, message)
        for name in names
    )
    for operation in ours:
        for mine, expected in zip(ours[operation](), plain[operation](), strict=True):
            assert_equal(mine, expected)
        for name, run in zip(names, (ours[operation], plain[operation]), strict=True):
            cases[f"{operation} by {name}, {label}"] = run
    timings = time_cases(cases, rounds=21, round_s=0.02, clock=gpu_clock)
    moved, hardware = 2 * message.nbytes, torch.cuda.get_device_name(device)
    rows = []
    for case, timing in timings.items():
        compared = (clone, round(1 / timing.ratio_to(timings[clone]), 3))
        found = (round(moved / timing.median_us / 1e3, 1), "GB/s")
        to_clone = compared if case != clone else ("", None)
        rows.append(Row(NAME, case, *found, *to_clone, len(timing.rounds_us), hardware=hardware))
    return rows


def cases_of(packing: Packing, message: Tensor) -> dict[str, Case]:
    """The four operations of strategy `heads`, all on as many bytes as the message has."""
    num_tokens = len(message)
    sections = packing.unpack_sections(message, SHARDS)
    offsets = range(0, num_tokens + 1, num_tokens // SEQUENCES)
    order = TokenLayout(tuple(offsets), RANKS, "zigzag").order.to(message.device)
    # As gradients arrive: each section by itself.
    parts = [part.contiguous() for part in message.split(WIDTHS, 1)]
    return {
        "pack sections": lambda: [packing.pack_sections(sections, SHARDS)],
        "take rows": lambda: [packing.take_rows([message], order)],
        "take rows of 6 sections": lambda: [packing.take_rows(parts, order)],
        "unpack sections": lambda: packing.unpack_sections(message, SHARDS),
    }


def gpu_clock() -> float:
    """Seconds when the GPU has done what was asked of it."""
    torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    run_benchmark(__doc__, measure)
