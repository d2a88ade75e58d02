"""The cores against code that is not ours: transformers by sequences, and attn-gym by packs.

Decays are slow, so that every sequence still knows its first token at its end. transformers
computes its cores in fp32 whatever comes in. So there the yardstick is its own distance from our
token-by-token form in fp64, which attn-gym confirms to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from gdn_cp_bench.slow_decay import (
    DeltaInputs,
    SsdInputs,
    delta_inputs,
    gradients,
    offsets,
    relative_error,
    ssd_inputs,
)
from gdn_cp_bench.transformers_layers import (
    LayerRun,
    gated_delta_net_of_cores,
    mamba2_of_cores,
    one_by_one,
    set_slow,
)
from gdn_cp_support.naive_recurrences import (
    naive_recurrent_gated_delta_rule,
    naive_recurrent_mamba2_ssd,
)
from pcomm.core.testing.assertions import assert_as_accurate
from pcomm.gdn_cp.ops.gated_delta_rule import chunk_gated_delta_rule
from pcomm.gdn_cp.ops.mamba2_ssd import chunk_mamba2_ssd
from pcomm.gdn_cp.ops.norms import normalise_queries_keys

LENGTHS = (70, 1, 64, 37, 2)
CU = offsets(LENGTHS)
Tensors = tuple[Tensor, ...]

# With these installed, transformers runs their kernels instead, which want a GPU.
KERNELS = [name for name in ("fla", "mamba_ssm", "causal_conv1d") if find_spec(name)]
without_kernels = pytest.mark.skipif(
    bool(KERNELS), reason=f"transformers would use {KERNELS}, not its torch code"
)


def transformers_module(family: str) -> object:
    name = f"transformers.models.{family}.modeling_{family}"
    return pytest.importorskip(name, reason="transformers is an oracle: extra `test`")


def sequences_alone(run: Callable[[int, slice], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Outputs and final states of every sequence by itself."""
    parts = [run(n, slice(start, stop)) for n, (start, stop) in enumerate(pairwise(CU))]
    outputs, states = zip(*parts, strict=True)
    return torch.cat(outputs), torch.cat(states)


def with_gradients(outputs: Tensors, leaves: Sequence[Tensor]) -> Tensors:
    return (*(x.detach() for x in outputs), *gradients(outputs, tuple(leaves)))


def in_double(inputs: Sequence[Tensor]) -> list[Tensor]:
    return [x.detach().double().requires_grad_() for x in inputs]


def test_attn_gym_computes_the_same_packed_gated_delta_rule() -> None:
    gdn = pytest.importorskip("attn_gym.linear.gdn", reason="attn-gym is an oracle: extra `test`")
    inputs = delta_inputs(LENGTHS)
    *tokens, state = inputs
    ours = chunk_gated_delta_rule(*tokens, cu_seqlens=CU, initial_state=state, chunk=16)
    output, final = gdn.chunk_gdn(
        *(x[None] for x in tokens),
        state.mT,
        cu_seqlens=torch.tensor(CU, dtype=torch.int32),
        scale=1.0,
        output_final_state=True,
        impl="reference",
    )
    theirs = (output[0], final.mT)
    leaves = tuple(inputs)
    assert relative_error(ours, theirs) < 1e-11
    assert relative_error(gradients(ours, leaves), gradients(theirs, leaves)) < 1e-11


@without_kernels
def test_transformers_computes_the_same_gated_delta_rule() -> None:
    qwen = transformers_module("qwen3_next")
    inputs = delta_inputs(LENGTHS, dtype=torch.float32)
    exact = DeltaInputs(*in_double(tuple(inputs)))
    q, k, v, g, beta, state = inputs

    def alone(n: int, tokens: slice) -> tuple[Tensor, Tensor]:
        output, final = qwen.torch_chunk_gated_delta_rule(
            *(x[None, tokens] for x in (q, k, v, g, beta)),
            initial_state=state[n : n + 1],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return output[0], final

    options = {"cu_seqlens": CU, "initial_state": state}
    ours = chunk_gated_delta_rule(*normalise_queries_keys(q, k), v, g, beta, **options)
    normalised = normalise_queries_keys(exact.q_TGK, exact.k_TGK)
    wanted = naive_recurrent_gated_delta_rule(
        *normalised,
        exact.v_THV,
        exact.g_TH,
        exact.beta_TH,
        cu_seqlens=CU,
        initial_state=exact.state_NHKV,
    )
    assert_each_as_accurate(
        with_gradients(ours, tuple(inputs)),
        with_gradients(sequences_alone(alone), tuple(inputs)),
        with_gradients(wanted, tuple(exact)),
    )


@without_kernels
def test_transformers_computes_the_same_state_space() -> None:
    mamba = transformers_module("mamba2")
    inputs = ssd_inputs(LENGTHS, dtype=torch.float32)
    exact = SsdInputs(*in_double(tuple(inputs)))
    x, dt, a_log, b, c, d, bias, state = inputs

    def alone(n: int, tokens: slice) -> tuple[Tensor, Tensor]:
        output, final = mamba.mamba2_chunk_scan(
            x[None, tokens],
            dt[None, tokens],
            -a_log.exp(),
            b[None, tokens],
            c[None, tokens],
            chunk_size=64,
            D=d,
            dt_bias=bias,
            dt_softplus=True,
            initial_states=state[n : n + 1].mT,
            return_final_states=True,
        )
        return output[0], final.mT

    def run(of: Callable[..., Tensors], y: SsdInputs) -> Tensors:
        x, dt, a_log, b, c, d, bias, state = y
        options = {"d_H": d, "dt_bias_H": bias, "cu_seqlens": CU, "initial_state": state}
        return with_gradients(of(x, dt, a_log, b, c, **options), tuple(y))

    theirs = with_gradients(sequences_alone(alone), tuple(inputs))
    assert_each_as_accurate(
        run(chunk_mamba2_ssd, inputs), theirs, run(naive_recurrent_mamba2_ssd, exact)
    )


@without_kernels
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_a_layer_of_these_cores_is_mamba2_of_transformers(bias: bool) -> None:
    mamba = transformers_module("mamba2")
    config = mamba.Mamba2Config(
        hidden_size=16,
        num_heads=4,
        head_dim=8,
        state_size=6,
        n_groups=2,
        expand=2,
        num_hidden_layers=1,
        use_bias=bias,
        use_conv_bias=bias,
    )
    compare_layers(mamba.Mamba2Mixer(config, layer_idx=0), mamba2_of_cores)


@without_kernels
def test_a_layer_of_these_cores_is_gated_delta_net_of_transformers() -> None:
    qwen = transformers_module("qwen3_next")
    config = qwen.Qwen3NextConfig(
        hidden_size=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=6,
        linear_value_head_dim=8,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
    )
    compare_layers(qwen.Qwen3NextGatedDeltaNet(config, layer_idx=0), gated_delta_net_of_cores)


def compare_layers(layer: nn.Module, of_cores: LayerRun) -> None:
    """Outputs and gradients of the same layer, run by transformers and by our cores."""
    set_slow(layer)
    hidden = torch.randn(CU[-1], 16, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def results(run: LayerRun, hidden: Tensor) -> Tensors:
        return with_gradients((run(layer, hidden, CU),), (hidden, *layer.parameters()))

    ours, theirs = (results(run, hidden) for run in (of_cores, one_by_one))
    layer.double()
    exact = results(of_cores, hidden.detach().double().requires_grad_())
    assert_each_as_accurate(ours, theirs, exact)


def assert_each_as_accurate(ours: Tensors, theirs: Tensors, exact: Tensors) -> None:
    for mine, plain, wanted in zip(ours, theirs, exact, strict=True):
        # Sums over the 174 tokens of the pack, on either side.
        assert_as_accurate(mine, plain, wanted, num_terms=174)
