"""Which tensors of a model and an optimizer are spread by a plan."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ntp_support.refusals import refused
from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.ntp.redistribute import (
    StateEntry,
    add_state,
    parameter_name,
    state_entries,
    state_tensors,
)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.LayerNorm(3)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("passing", torch.ones(2), persistent=False)


def stepped(model: nn.Module, kind: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    optimizer = kind(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


PARAMETERS = ["embedding.weight", "norm.bias", "norm.weight", "scale"]


def test_parameters_buffers_and_moments_are_named_once() -> None:
    model = Tied()
    optimizer = stepped(model, torch.optim.AdamW)
    found = state_tensors(model, optimizer)
    moments = [
        f"optimizer.{key}.{name}" for key in ("exp_avg", "exp_avg_sq") for name in PARAMETERS
    ]
    assert sorted(found) == sorted(["model.kept", *(f"model.{n}" for n in PARAMETERS), *moments])
    # No copies: what is written there is in the model.
    assert found["model.embedding.weight"].data_ptr() == model.head.weight.data_ptr()
    state = optimizer.state[model.norm.weight]
    assert found["optimizer.exp_avg.norm.weight"] is not None
    assert found["optimizer.exp_avg.norm.weight"].data_ptr() == state["exp_avg"].data_ptr()
    assert not any(x.requires_grad for x in found.values())


def test_an_optimizer_without_state_gets_what_another_one_has() -> None:
    other, model = Tied(), Tied()
    entries = state_entries(other, stepped(other, torch.optim.AdamW))
    optimizer = torch.optim.AdamW(model.parameters())
    assert set(state_tensors(model, optimizer)) == set(state_tensors(model))
    assert not optimizer.state
    add_state(model, optimizer, entries)
    assert state_entries(model, optimizer) == entries
    for name, _, _, dtype in entries:
        assert state_tensors(model, optimizer)[name].dtype == getattr(torch, dtype)
    # What is there already stays.
    first = optimizer.state[model.scale]["exp_avg"]
    add_state(model, optimizer, entries)
    assert optimizer.state[model.scale]["exp_avg"] is first


def test_state_has_the_data_type_of_each_parameter_and_none_of_parameters_elsewhere() -> None:
    other, model = nn.Linear(3, 4).bfloat16(), nn.Linear(3, 4).bfloat16()
    other.bias.data, model.bias.data = other.bias.data.float(), model.bias.data.float()
    entries = state_entries(other, stepped(other, torch.optim.AdamW))
    assert {entry.dtype for entry in entries} == {"bfloat16", "float32"}
    optimizer = torch.optim.AdamW([model.weight])
    elsewhere = StateEntry("optimizer.exp_avg.head", "head", "exp_avg", "float32")
    add_state(model, optimizer, [*entries, elsewhere])
    assert state_entries(model, optimizer) == entries[:2]


def test_state_of_another_shape_is_refused_and_single_numbers_are_left_out() -> None:
    model = nn.Linear(3, 4)
    for look in (state_entries, state_tensors):
        with pytest.raises(UnsupportedError, match=r"'row_var' of 'weight' in Adafactor"):
            look(model, stepped(model, torch.optim.Adafactor))
    keys = {entry.key for entry in state_entries(model, stepped(model, torch.optim.ASGD))}
    assert keys == {"ax"}


def test_names() -> None:
    assert parameter_name("model.model.w") == "model.w"
    assert parameter_name("optimizer.exp_avg.model.w") == "model.w"
    for name in ("w", "layers.0.w", "model.", "optimizer.exp_avg", "optimizer..w"):
        refused(ConfigError, "state_tensors", parameter_name, name)
