"""Forward and backward of the cores, and of layers of them, over the torch code of transformers.

One thread, fp32, 2048 tokens, all gradients. The cores are timed at several lengths of a chunk; the
layers at the default one, with slow decay. transformers knows no packs: for the packed rows its
layer is called for each sequence. Its state space is timed at its default chunk and at its best.
Results are compared first. Aim: at most the time of transformers.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from gdn_cp_bench.slow_decay import delta_inputs, relative_error, ssd_inputs
from gdn_cp_bench.transformers_layers import (
    LayerRun,
    gated_delta_net_of_cores,
    mamba2_of_cores,
    one_by_one,
    set_slow,
)
from pcomm.gdn_cp.ops import chunk_gated_delta_rule, chunk_mamba2_ssd, normalise_queries_keys

# The runner of benchmarks is in no wheel.
sys.path.append(str(Path(__file__).parents[2] / "pcomm-core" / "benchmarks"))

from core_bench.rows import Row
from core_bench.runner import beside_first, run_benchmark, time_cases

NAME = "cores"
TOKENS, DIM, CHUNKS = 2048, 64, (16, 32, 64, 128)
Case = Callable[[], tuple[Tensor, ...]]


def measure() -> list[Row]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = []
    for key_heads, heads in ((4, 8), (16, 32)):
        rows += timed(delta_cases(key_heads, heads))
    for groups, heads in ((1, 24), (8, 16)):
        rows += timed(state_space_cases(groups, heads))
    packs = {"1 sequence": [0, TOKENS], "32 sequences": [*range(0, TOKENS + 1, 64)]}
    for name, cu_seqlens in packs.items():
        layer = qwen3_next.Qwen3NextGatedDeltaNet(gated_delta_config(), layer_idx=0)
        label = f"Gated DeltaNet layer, {name}"
        rows += timed(layer_cases(label, layer, gated_delta_net_of_cores, cu_seqlens))
        mixer = mamba2.Mamba2Mixer(mamba2_config(), layer_idx=0)
        rows += timed(layer_cases(f"Mamba-2 layer, {name}", mixer, mamba2_of_cores, cu_seqlens))
    return rows


def timed(cases: dict[str, Case]) -> list[Row]:
    """Rows of one comparison; the first case is the one to compare with."""
    first, *others = cases.values()
    expected = first()
    for case in others:
        # fp32 against fp32: sums over thousands of tokens, in another order.
        assert relative_error(case(), expected) < 1e-3
    return beside_first(NAME, time_cases(cases, rounds=9, clock=time.thread_time))


def with_gradients(run: Callable[[], Tensor], leaves: Iterable[Tensor]) -> Case:
    """The result and the gradients of all leaves, in one call."""
    wanted, arriving = tuple(leaves), torch.randn(run().shape)

    def case() -> tuple[Tensor, ...]:
        result = run()
        return (result.detach(), *torch.autograd.grad(result, wanted, arriving))

    return case


def delta_cases(key_heads: int, heads: int) -> dict[str, Case]:
    sizes = {"key_heads": key_heads, "heads": heads, "key_dim": DIM, "value_dim": DIM}
    *tokens, _ = delta_inputs((TOKENS,), **sizes, dtype=torch.float32)

    def theirs() -> Tensor:
        batch = (x[None] for x in tokens)
        output, _ = qwen3_next.torch_chunk_gated_delta_rule(*batch, use_qk_l2norm_in_kernel=True)
        return output[0]

    def ours(chunk: int) -> Callable[[], Tensor]:
        q, k, *rest = tokens
        options: Any = {"cu_seqlens": (0, TOKENS), "chunk": chunk}
        return lambda: chunk_gated_delta_rule(*normalise_queries_keys(q, k), *rest, **options)[0]

    label = f"gated delta rule, {key_heads} and {heads} heads of {DIM}"
    torch.manual_seed(0)
    cases = {f"transformers, {label}": with_gradients(theirs, tokens)}
    for chunk in CHUNKS:
        torch.manual_seed(0)
        cases[f"{label}, chunk {chunk}"] = with_gradients(ours(chunk), tokens)
    return cases


def state_space_cases(groups: int, heads: int) -> dict[str, Case]:
    sizes = {"groups": groups, "heads": heads, "head_dim": DIM, "state_dim": 128}
    x, dt, a_log, b, c, d, bias, _ = ssd_inputs((TOKENS,), **sizes, dtype=torch.float32)
    leaves = (x, dt, a_log, b, c, d, bias)

    def theirs(chunk: int) -> Callable[[], Tensor]:
        inputs = (x[None], dt[None], lambda: -a_log.exp(), b[None], c[None])
        return lambda: mamba2.mamba2_chunk_scan(
            *(y() if callable(y) else y for y in inputs),
            chunk_size=chunk,
            D=d,
            dt_bias=bias,
            dt_softplus=True,
        )[0]

    def ours(chunk: int) -> Callable[[], Tensor]:
        options = {"d_H": d, "dt_bias_H": bias, "cu_seqlens": (0, TOKENS), "chunk": chunk}
        return lambda: chunk_mamba2_ssd(x, dt, a_log, b, c, **options)[0]

    label = f"state space, {groups} groups, {heads} heads of {DIM}, state 128"
    runs = {f"transformers, {label}, chunk {chunk}": theirs(chunk) for chunk in (64, 256)}
    runs |= {f"{label}, chunk {chunk}": ours(chunk) for chunk in CHUNKS}
    cases = {}
    for name, run in runs.items():
        torch.manual_seed(0)
        cases[name] = with_gradients(run, leaves)
    return cases


def layer_cases(
    label: str, layer: Any, of_cores: LayerRun, cu_seqlens: Sequence[int]
) -> dict[str, Case]:
    set_slow(layer)
    hidden = torch.randn(TOKENS, 512, requires_grad=True)
    leaves, cases = (hidden, *layer.parameters()), {}
    for name, run in ((f"transformers, {label}", one_by_one), (label, of_cores)):
        torch.manual_seed(0)
        cases[name] = with_gradients(lambda run=run: run(layer, hidden, cu_seqlens), leaves)
    return cases


def gated_delta_config() -> Any:
    return qwen3_next.Qwen3NextConfig(
        hidden_size=512,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=DIM,
        linear_value_head_dim=DIM,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
    )


def mamba2_config() -> Any:
    return mamba2.Mamba2Config(
        hidden_size=512,
        num_heads=16,
        head_dim=DIM,
        state_size=128,
        n_groups=1,
        expand=2,
        num_hidden_layers=1,
        chunk_size=64,
    )


if __name__ == "__main__":
    run_benchmark(__doc__, measure)
