"""A Gated DeltaNet layer on one GPU, forward and backward, over `GatedDeltaNet` of fla.

The shape of Qwen3-Next, bf16, 16,384 tokens, slow decay, all gradients. Ours are the pieces of this
package around either choice of `Kernels`, with the parameters of fla's own layer. Results are
compared first. Without a GPU, or without flash-linear-attention, it says so and measures nothing.
It has never run on hardware.
"""

# T tokens, D hidden size

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gdn_cp_bench.slow_decay import relative_error
from gdn_cp_bench.transformers_layers import set_slow
from pcomm.core.errors import UnsupportedError
from pcomm.gdn_cp.ops import (
    Kernels,
    causal_convolution,
    choose_kernels,
    delta_gates,
    normalise_queries_keys,
    rms_norm_then_gate,
)

# The runner of benchmarks is in no wheel.
sys.path.append(str(Path(__file__).parents[2] / "pcomm-core" / "benchmarks"))

from core_bench.runner import Row, beside_first, run_benchmark, time_cases

NAME = "layer_on_gpu"
DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
TOKENS, WIDTH = 16_384, 2048
PACKS = {"1 sequence": (0, TOKENS), "64 sequences": tuple(range(0, TOKENS + 1, 256))}
# bf16 keeps 8 bits of each result. A layer rounds some dozen times from input to output, and twice
# as often from there to a gradient.
BOUND = 32 * 2.0**-8
Case = Callable[[], tuple[Tensor, ...]]


def measure() -> list[Row]:
    if reason := obstacle():
        raise UnsupportedError(
            NAME,
            found=reason,
            why="It compares a layer with that of flash-linear-attention, which needs a GPU.",
            fix="Run it on a machine with a GPU and `pip install flash-linear-attention`.",
        )
    torch.manual_seed(0)
    layer = fla_layer()
    rows: list[Row] = []
    for label, cu_seqlens in PACKS.items():
        rows += timed(layer_cases(layer, label, cu_seqlens))
    return [replace(row, hardware=torch.cuda.get_device_name()) for row in rows]


def obstacle() -> str:
    """Why this cannot run here, or nothing."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    try:
        choose_kernels(DEVICE, DTYPE, wanted="fla")
    except UnsupportedError as problem:
        return problem.found
    return "" if find_spec("fla.layers") else "fla has no layers without flash-linear-attention"


def fla_layer() -> Any:
    """In the shape of Qwen3-Next: 16 key heads and 32 value heads of 128."""
    layer = import_module("fla.layers").GatedDeltaNet(
        hidden_size=WIDTH, head_dim=128, num_heads=16, num_v_heads=32, expand_v=1.0
    )
    set_slow(layer)
    return layer.to(DEVICE, DTYPE)


def of_kernels(
    layer: Any, hidden_TD: Tensor, cu_seqlens: Sequence[int], kernels: Kernels
) -> Tensor:
    """The same layer by this package, `[T, D]` to `[T, D]`."""
    names = ("q", "k", "v")
    mixed = torch.cat([getattr(layer, f"{name}_proj")(hidden_TD) for name in names], -1)
    weight = torch.cat([getattr(layer, f"{name}_conv1d").weight[:, 0] for name in names])
    mixed, _ = causal_convolution(mixed, weight, cu_seqlens=cu_seqlens)
    parts = mixed.split([layer.key_dim, layer.key_dim, layer.value_dim], -1)
    heads = (layer.num_heads, layer.num_heads, layer.num_v_heads)
    q, k, v = (part.unflatten(-1, (num, -1)) for part, num in zip(parts, heads, strict=True))
    q, k = normalise_queries_keys(q, k)
    a, b = layer.a_proj(hidden_TD), layer.b_proj(hidden_TD)
    g, beta = delta_gates(a, b, layer.A_log, layer.dt_bias)
    y, _ = kernels.chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=cu_seqlens)
    z = layer.g_proj(hidden_TD).unflatten(-1, (layer.num_v_heads, -1))
    y = rms_norm_then_gate(y, z, layer.o_norm.weight, eps=layer.o_norm.eps)
    result: Tensor = layer.o_proj(y.flatten(1))
    return result


def layer_cases(layer: Any, label: str, cu_seqlens: Sequence[int]) -> dict[str, Case]:
    shape = (TOKENS, WIDTH)
    hidden = torch.randn(shape, device=DEVICE, dtype=DTYPE, requires_grad=True)
    arriving = torch.randn(shape, device=DEVICE, dtype=DTYPE)
    leaves, offsets = (hidden, *layer.parameters()), torch.tensor(cu_seqlens, device=DEVICE)

    def case(run: Callable[[], Tensor]) -> Case:
        def forward_and_backward() -> tuple[Tensor, ...]:
            result = run()
            return (result.detach(), *torch.autograd.grad(result, leaves, arriving))

        return forward_and_backward

    def ours(kernels: Kernels) -> Case:
        return case(lambda: of_kernels(layer, hidden, cu_seqlens, kernels))

    cases = {
        f"fla GatedDeltaNet, {label}": case(lambda: layer(hidden[None], cu_seqlens=offsets)[0][0])
    }
    for wanted in ("fla", "torch"):
        cases[f"{wanted} kernels, {label}"] = ours(choose_kernels(DEVICE, DTYPE, wanted=wanted))
    return cases


def timed(cases: dict[str, Case]) -> list[Row]:
    """Rows of one comparison; the first case is the one to compare with."""
    first, *others = cases.values()
    expected = first()
    for other in others:
        assert relative_error(other(), expected) < BOUND
    return beside_first(NAME, time_cases(cases, rounds=31, round_s=0.05, clock=synchronised))


def synchronised() -> float:
    """Seconds, once the GPU has done all it was given."""
    torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    run_benchmark(__doc__, measure)
