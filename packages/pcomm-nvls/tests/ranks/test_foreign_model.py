"""Layers and a model of others, unchanged: their sums are kernels of this package."""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from nvls_support.emulation import opened
from pcomm import nvls
from pcomm.core.testing import ranks
from pcomm.core.testing.on_ranks import default_group

PLAN = {
    **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
    **{f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
    "self_attn.o_proj": RowwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}


@ranks(2)
def test_a_llama_under_tensor_parallelism_has_the_logits_that_it_had(rank: int) -> None:
    # Here, so that the ranks alone import it.
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    tokens = torch.arange(6).view(1, 6) * 7 % 64
    process_group = default_group()
    mesh = DeviceMesh.from_group(process_group, "cpu")
    with torch.no_grad():
        alone = model(tokens).logits
        for layer in model.model.layers:
            parallelize_module(layer, mesh, PLAN)
        expected = model(tokens).logits
        with opened(max_bytes=1 << 16) as workspace:
            with mock.patch.object(
                functional,
                "all_reduce",
                lambda x, *_, **__: nvls.all_reduce(x, workspace=workspace),
            ):
                logits = model(tokens).logits
            # One for the attention and one for the MLP of each layer.
            assert workspace.num_launches == 4
    # Two addends have one order, and gloo rounds their sum once, too.
    assert torch.equal(logits, expected)
    # Products of up to 64 numbers are summed in halves: 4 of them, each off by 64 * 2^-24 of values
    # that are at most a few units before a norm.
    torch.testing.assert_close(logits, alone, rtol=0, atol=4 * 64 * 2.0**-24)


def row_parallel(x: Tensor, weight: Tensor) -> Tensor:
    """A layer of a program that knows torch.distributed alone."""
    y = x @ weight
    dist.all_reduce(y, op=dist.ReduceOp.SUM)
    return y


@ranks(2)
def test_a_layer_that_calls_torch_distributed_takes_the_function_that_it_is_given(rank):
    x, weight = torch.arange(16.0).view(2, 8), torch.ones(8, 4) * (rank + 1)
    expected = row_parallel(x, weight)
    with (
        opened(max_bytes=1 << 12) as workspace,
        mock.patch.object(
            dist, "all_reduce", lambda y, *_, **__: nvls.all_reduce(y, out=y, workspace=workspace)
        ),
    ):
        assert torch.equal(row_parallel(x, weight), expected)
        assert workspace.num_launches == 1
