"""Mixers in two threads at once: host code shares offsets and their tables, and nothing else.

Triton's interpreter replaces functions of a module while it runs, so one launch at a time is
interpreted; what is around the launches is not held apart.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from core_support.interpreter import interpreted
from gdn_cp_bench.slow_decay import delta_inputs, gradients, offsets, ssd_inputs
from gdn_cp_support.kernels import MODULES, TORCH, TRITON
from pcomm.core.kernel_launch import KernelLaunch
from pcomm.core.testing.assertions import assert_equal, poisoned_memory
from pcomm.gdn_cp.ops.backend import Kernels
from pcomm.gdn_cp.pack_offsets import PackOffsets

Tensors = tuple[Tensor, ...]
LENGTHS = (7, 0)


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[None]:
    with interpreted(MODULES), poisoned_memory():
        yield


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Threads change often, and launches wait for each other."""
    lock, run, interval = threading.Lock(), KernelLaunch.run, sys.getswitchinterval()

    def one_by_one(launch: KernelLaunch) -> None:
        with lock:
            run(launch)

    monkeypatch.setattr(KernelLaunch, "run", one_by_one)
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(interval)


def delta(way: Kernels, seed: int, cu: PackOffsets) -> Tensors:
    sizes = {"key_heads": 1, "heads": 1}
    *tokens, state = inputs = delta_inputs(LENGTHS, **sizes, dtype=torch.float32, seed=seed)
    outputs = way.chunk_gated_delta_rule(*tokens, cu_seqlens=cu, initial_state=state)
    return (*outputs, *gradients(outputs, tuple(inputs)))


def space(way: Kernels, seed: int, cu: PackOffsets) -> Tensors:
    inputs = ssd_inputs(LENGTHS, groups=1, heads=1, dtype=torch.float32, seed=seed)
    x, dt, a_log, b, c, d, bias, state = inputs
    options: dict[str, Any] = {"d_H": d, "dt_bias_H": bias, "initial_state": state}
    outputs = way.chunk_mamba2_ssd(x, dt, a_log, b, c, cu_seqlens=cu, **options)
    return (*outputs, *gradients(outputs, tuple(inputs)))


def convolution(way: Kernels, seed: int, cu: PackOffsets) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((cu[-1], 6), (6, 4), (6,), (len(LENGTHS), 3, 6))
    inputs = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    x, weight, bias, halo = inputs
    outputs = way.convolve_sections(
        x, weight, ((1, 6),), cu_seqlens=cu, bias_D=bias, initial_halo=halo
    )
    return (*outputs, *gradients(outputs, inputs))


@pytest.mark.usefixtures("turns")
@pytest.mark.parametrize("run", [delta, space, convolution], ids=lambda run: run.__name__)
@pytest.mark.parametrize(("way", "times"), [(TORCH, 5), (TRITON, 1)], ids=["torch", "triton"])
def test_what_two_threads_compute_is_what_one_does(
    way: Kernels, times: int, run: Callable[..., Tensors]
) -> None:
    alone = [run(way, seed, PackOffsets.of(offsets(LENGTHS))) for seed in (0, 7)]
    start = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        for _ in range(times):
            # Nothing has been derived from them yet.
            shared = PackOffsets.of(offsets(LENGTHS))

            def one(seed: int, shared: PackOffsets = shared) -> Tensors:
                start.wait(60)
                return run(way, seed, shared)

            for ours, wanted in zip(pool.map(one, (0, 7)), alone, strict=True):
                for mine, theirs in zip(ours, wanted, strict=True):
                    assert_equal(mine, theirs)
