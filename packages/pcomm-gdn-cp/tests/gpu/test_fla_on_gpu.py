"""flash-linear-attention's kernels against our torch cores on CUDA; never run yet, without a GPU.

The reference is our core in fp64, from the same rounded inputs. The kernels multiply in the dtype
of the values, fp32 as TF32, and add in fp32. So an element is off by one rounding for every product
on the longest chain behind it, relative to the largest element: the system, its solution, what it
is applied to, the output; and for each chunk of 64 tokens the state, what is read from it, and what
is written to it. Backward walks the chain once more. Decays are slow, so that a state which gets
lost changes the first digit.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from gdn_cp_bench.slow_decay import (
    delta_inputs,
    gradients,
    offsets,
    relative_error,
    ssd_inputs,
)
from pcomm.core.errors import UnsupportedError
from pcomm.gdn_cp.ops.backend import Kernels, choose_kernels
from pcomm.gdn_cp.ops.gated_delta_rule import chunk_gated_delta_rule
from pcomm.gdn_cp.ops.mamba2_ssd import chunk_mamba2_ssd

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not find_spec("fla"), reason="needs flash-linear-attention: fla-core[cuda]"),
]

LENGTHS = (70, 5, 0, 130, 64)
CU = offsets(LENGTHS)
# The longest sequence has 3 chunks.
ROUNDINGS = 4 + 3 * 3
# bf16 keeps 8 bits of a number, TF32 keeps 11.
UNITS = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-11}


@pytest.fixture(params=list(UNITS), ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Of the values."""
    return request.param


@pytest.fixture
def kernels(dtype: torch.dtype) -> Kernels:
    """Those of flash-linear-attention, or why not."""
    try:
        return choose_kernels(torch.device("cuda"), dtype, wanted="fla")
    except UnsupportedError as problem:
        pytest.skip(problem.found)


def on_gpu(inputs: Sequence[Tensor], *kinds: torch.dtype) -> tuple[Tensor, ...]:
    """Leaves on the GPU, each in its dtype."""
    pairs = zip(inputs, kinds, strict=True)
    return tuple(x.detach().to("cuda", kind).requires_grad_() for x, kind in pairs)


def in_double(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Leaves of the same values in fp64."""
    return tuple(x.detach().double().requires_grad_() for x in inputs)


def check(
    results: Sequence[Tensor],
    wanted: Sequence[Tensor],
    leaves: Sequence[Tensor],
    exact: Sequence[Tensor],
    dtype: torch.dtype,
) -> None:
    """Outputs, states and all gradients are as near as the roundings of the chain explain."""
    assert [x.dtype for x in results] == [dtype, torch.float32]
    bound = ROUNDINGS * UNITS[dtype]
    assert relative_error(results, wanted) < bound
    assert relative_error(gradients(results, leaves), gradients(wanted, exact)) < 2 * bound


def test_the_gated_delta_rule_is_ours(kernels: Kernels, dtype: torch.dtype) -> None:
    inputs = delta_inputs(LENGTHS, key_dim=64, value_dim=32)
    full = torch.float32
    leaves = on_gpu(tuple(inputs), dtype, dtype, dtype, full, full, full)
    exact = in_double(leaves)
    results, wanted = (
        run(*tokens, cu_seqlens=CU, initial_state=state)
        for run, (*tokens, state) in (
            (kernels.chunk_gated_delta_rule, leaves),
            (chunk_gated_delta_rule, exact),
        )
    )
    check(results, wanted, leaves, exact, dtype)


def test_the_state_space_is_ours(kernels: Kernels, dtype: torch.dtype) -> None:
    inputs = ssd_inputs(LENGTHS, head_dim=32, state_dim=64)
    full = torch.float32
    leaves = on_gpu(tuple(inputs), dtype, dtype, full, dtype, dtype, full, full, full)
    exact = in_double(leaves)
    results, wanted = (
        run(x, dt, a_log, b, c, d_H=d, dt_bias_H=bias, cu_seqlens=CU, initial_state=state)
        for run, (x, dt, a_log, b, c, d, bias, state) in (
            (kernels.chunk_mamba2_ssd, leaves),
            (chunk_mamba2_ssd, exact),
        )
    )
    check(results, wanted, leaves, exact, dtype)


def test_a_second_gated_delta_rule_does_not_wait_for_the_gpu(
    kernels: Kernels, dtype: torch.dtype
) -> None:
    *tokens, state = on_gpu(tuple(delta_inputs(LENGTHS, key_dim=64, value_dim=32)), *[dtype] * 6)

    def step() -> None:
        output, _ = kernels.chunk_gated_delta_rule(*tokens, cu_seqlens=CU, initial_state=state)
        output.sum().backward()

    # The first one compiles kernels, measures them, and copies offsets to the GPU.
    step()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode(before)
