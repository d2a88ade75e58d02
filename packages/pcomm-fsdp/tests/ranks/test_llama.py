"""A model that knows nothing of shards: transformers' Llama as it is, compiled, and saved."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp_support.trainings import open_two, shard
from pcomm.core.errors import ConfigError
from pcomm.core.groups.open_groups import Groups
from pcomm.core.testing.on_ranks import ranks


def tokens(step: int, rank: int) -> Tensor:
    return torch.randint(
        32, (2, 7 + step), generator=torch.Generator().manual_seed(2 * step + rank)
    )


@pytest.mark.skipif(find_spec("transformers") is None, reason="the model is transformers' own")
@ranks(2, leaves="a progress bar of transformers keeps a thread")
def test_a_llama_is_trained_compiled_and_saved(rank: int, tmp_path: Path) -> None:
    """In one test: transformers takes longer to be imported than all of it."""
    transformers = import_module("transformers")
    with open_two() as groups:
        check_training(rank, transformers, groups, is_compiled=False)
        check_training(rank, transformers, groups, is_compiled=True)
        check_saving(rank, transformers, groups, tmp_path)


def model_of(transformers: Any) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def check_training(rank: int, transformers: Any, groups: Groups, *, is_compiled: bool) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    reference, model = (model_of(transformers).double() for _ in "ab")
    sharded = shard(model, groups, units=[type(model.model.layers[0])])
    if is_compiled:
        # One compilation is enough: the other layer has the same code.
        model.model.layers[0].compile(backend="eager")
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, reference))
    for step in range(2):
        # Another length is another graph.
        length = 0 if is_compiled else step
        mine = tokens(length, rank)
        model(input_ids=mine, labels=mine).loss.backward()
        for one in (0, 1):
            batch = tokens(length, one)
            (reference(input_ids=batch, labels=batch).loss / 2).backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    found = sharded.full_state_dict()
    assert bool(torch._dynamo.utils.counters["stats"]["unique_graphs"]) is is_compiled
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-8, atol=1e-10, msg=name)
    torch._dynamo.reset()


def check_saving(rank: int, transformers: Any, groups: Groups, folder: Path) -> None:
    model = model_of(transformers)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    sharded = shard(model, groups, units=[type(model.model.layers[0])])
    with pytest.raises(ConfigError, match=r"save_pretrained\(state_dict="):
        model.save_pretrained(folder / f"wrong{rank}")
    state = sharded.full_state_dict()
    # All ranks call it, and transformers writes on the first.
    model.save_pretrained(folder / "saved", state_dict=state)
    groups["dp", "gather"].collectives.all_reduce(torch.zeros(()))
    found = transformers.LlamaForCausalLM.from_pretrained(folder / "saved").state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
