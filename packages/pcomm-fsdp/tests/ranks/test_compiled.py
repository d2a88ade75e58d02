"""Models that know nothing of shards: compiled ones, and one of transformers."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdp_support.trainings import (
    STRATEGIES,
    Block,
    SmallModel,
    model_of,
    no_progress_monitor,
    open_two,
    shard,
    tokens,
)
from pcomm.core.errors import ClosedError, ConfigError
from pcomm.core.groups.open_groups import Groups
from pcomm.core.testing.on_ranks import ranks
from pcomm.fsdp.full_state import unwrapped
from pcomm.fsdp.sharded import Sharded

# -- blocks and whole models under `torch.compile`, before and after they are sharded -----------

no_progress_monitor()

FORMS = {
    "blocks before": ("blocks", "before", "zero3"),
    "blocks, zero2": ("blocks", "after", "zero2"),
    "forwards of blocks": ("forwards", "before", "zero3"),
    "model before": ("model", "before", "zero3"),
    "model after": ("model", "after", "zero3"),
    "model in place": ("model in place", "after", "zero3"),
}


class Breaking(Block):
    """A block that no compiler gets in one piece."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        y_BTD = torch.tanh(self.norm(x_BTD))
        torch._dynamo.graph_break()
        return super().forward(x_BTD) + y_BTD


def compiled(model: SmallModel, what: str, **options: object) -> nn.Module:
    """The model to call."""
    if what == "model":
        return torch.compile(model, **options)  # type: ignore[return-value, call-overload]
    if what == "model in place":
        model.compile(**options)
    for index, block in enumerate(model.blocks):
        if what == "blocks":
            model.blocks[index] = torch.compile(block, **options)  # type: ignore[call-overload]
        elif what == "forwards":
            block.forward = torch.compile(block.forward, fullgraph=True, **options)  # type: ignore[call-overload]
    return model


def sharded_in(form: str, backend: str, groups: Groups) -> tuple[Sharded, nn.Module]:
    """The sharded model, and what to call."""
    what, when, strategy = FORMS[form]
    model = model_of(num_blocks=2)
    called: nn.Module = compiled(model, what, backend=backend) if when == "before" else model
    sharded = shard(called, groups, reshard=STRATEGIES[strategy])
    return sharded, called if when == "before" else compiled(model, what, backend=backend)


def loss_of(model: Callable[[Tensor], Tensor], tokens_BT: Tensor) -> Tensor:
    logits_BTV = model(tokens_BT[:, :-1])
    return F.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten())


def check_gradients(found: dict[str, Tensor], reference: nn.Module) -> None:
    found = {unwrapped(name): gradient for name, gradient in found.items()}
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-9, atol=1e-12, msg=name)


def follow_frozen(rank: int, form: str, backend: str) -> None:
    torch._dynamo.reset()
    graphs = torch._dynamo.utils.counters["stats"]
    reference = model_of(num_blocks=2)
    with open_two() as groups:
        sharded, called = sharded_in(form, backend, groups)
        ours = torch.optim.SGD(sharded.parameters(), lr=0.1)
        theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
        for step in range(2):
            for micro in range(2):
                with sharded.accumulate(is_last=micro == 1):
                    loss_of(called, tokens(step, micro, rank)).backward()
                for one in (0, 1):
                    (loss_of(reference, tokens(step, micro, one)) / 2).backward()
            check_gradients(sharded.full_gradients(), reference)
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        assert graphs["unique_graphs"] > 0
    with pytest.raises(ClosedError):
        called(tokens(0, 0, 0))
    torch._dynamo.reset()


# Two of the forms have a compiled backward as well.
AOT = ("blocks before", "model after")


@pytest.mark.parametrize("form", [form for form in FORMS if form not in AOT])
@ranks(2)
def test_equal_to_one_process(rank: int, form: str) -> None:
    follow_frozen(rank, form, "eager")


@pytest.mark.parametrize(
    "form", [pytest.param(one, marks=[pytest.mark.soak] * (one != AOT[0])) for one in AOT]
)
@ranks(2)
def test_equal_to_one_process_with_compiled_backward(rank: int, form: str) -> None:
    """Autograd gets one node for all of a graph, which saves other tensors."""
    # What finds equal expressions imports all of inductor, of which this backend uses nothing.
    with torch._functorch.config.patch(cse=False):
        follow_frozen(rank, form, "aot_eager")


def batch(length: int, rank: int) -> Tensor:
    return torch.randint(7, (2, length), generator=torch.Generator().manual_seed(length + rank))


def a_step(model: nn.Module, length: int, rank: int) -> Tensor:
    """An evaluation, and two forwards before one backward."""
    with torch.no_grad():
        evaluated = loss_of(model, batch(length + 1, rank))
    (loss_of(model, batch(length, rank)) + 2 * loss_of(model, batch(length - 1, rank))).backward()
    return evaluated


@ranks(2)
def test_graph_breaks_shapes_and_flows(rank: int) -> None:
    torch._dynamo.reset()
    model, reference = (model_of(num_blocks=2) for _ in range(2))
    for one in (model, reference):
        for block in one.blocks:
            block.__class__ = Breaking
    with open_two() as groups:
        sharded = shard(model, groups)
        called = compiled(model, "blocks", backend="eager", dynamic=True)
        for length in (6, 8):
            sharded.zero_grad()
            reference.zero_grad()
            evaluated = a_step(called, length, rank)
            for index in (1 - rank, rank):
                expected = a_step(reference, length, index)
            torch.testing.assert_close(evaluated, expected, rtol=1e-9, atol=0)
            for parameter in reference.parameters():
                assert parameter.grad is not None
                parameter.grad /= 2
            check_gradients(sharded.full_gradients(), reference)
    torch._dynamo.reset()


# -- a model that knows nothing of shards: transformers' Llama as it is, compiled, and saved ----


def llama_tokens(step: int, rank: int) -> Tensor:
    return torch.randint(
        32, (2, 7 + step), generator=torch.Generator().manual_seed(2 * step + rank)
    )


@pytest.mark.skipif(find_spec("transformers") is None, reason="the model is transformers' own")
@ranks(2)
def test_a_llama_is_trained_compiled_and_saved(rank: int, tmp_path: Path) -> None:
    """In one test: transformers takes longer to be imported than all of it."""
    transformers = import_module("transformers")
    with open_two() as groups:
        check_training(rank, transformers, groups, is_compiled=False)
        check_training(rank, transformers, groups, is_compiled=True)
        check_saving(rank, transformers, groups, tmp_path)


def llama_of(transformers: Any) -> Any:
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
    reference, model = (llama_of(transformers).double() for _ in "ab")
    sharded = shard(model, groups, units=[type(model.model.layers[0])])
    if is_compiled:
        # One compilation is enough: the other layer has the same code.
        model.model.layers[0].compile(backend="eager")
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, reference))
    for step in range(2):
        # Another length is another graph.
        length = 0 if is_compiled else step
        mine = llama_tokens(length, rank)
        model(input_ids=mine, labels=mine).loss.backward()
        for one in (0, 1):
            batch = llama_tokens(length, one)
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
    model = llama_of(transformers)
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
