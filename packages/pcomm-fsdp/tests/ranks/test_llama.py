"""A model that knows nothing of shards: transformers' Llama as it is, and with compiled layers."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from pcomm.core.testing.on_ranks import ranks
from pcomm.fsdp.testing.small_training import open_two, shard


def tokens(step: int, rank: int) -> Tensor:
    return torch.randint(
        32, (2, 7 + step), generator=torch.Generator().manual_seed(2 * step + rank)
    )


@pytest.mark.skipif(find_spec("transformers") is None, reason="the model is transformers' own")
@pytest.mark.parametrize("is_compiled", [False, True])
@ranks(2, leaves="a progress bar of transformers keeps a thread")
def test_equal_to_one_process(rank: int, is_compiled: bool) -> None:
    torch._dynamo.reset()
    transformers = import_module("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    reference, model = (transformers.LlamaForCausalLM(config).double() for _ in "ab")
    model.load_state_dict(reference.state_dict())
    with open_two() as groups:
        sharded = shard(model, groups, units=[type(model.model.layers[0])])
        if is_compiled:
            for layer in model.model.layers:
                layer.compile(backend="eager")
        ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, reference))
        for step in range(3):
            mine = tokens(step, rank)
            model(input_ids=mine, labels=mine).loss.backward()
            for one in (0, 1):
                batch = tokens(step, one)
                (reference(input_ids=batch, labels=batch).loss / 2).backward()
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        found = sharded.full_state_dict()
    assert bool(torch._dynamo.utils.counters["stats"]["unique_graphs"]) is is_compiled
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-8, atol=1e-10, msg=name)
    torch._dynamo.reset()
