"""What people do with models of transformers: adapters, checkpointing, teachers, and saving."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM, PreTrainedModel

from core_support.tiny_transformers import VOCABULARY, tiny_config, tiny_model
from fsdp_support.trainings import check_state, open_two, roles_of
from pcomm.core.errors import ConfigError
from pcomm.core.testing.on_ranks import ranks
from pcomm.fsdp._fully_shard import fully_shard
from pcomm.fsdp.sharded import Sharded

NEEDS_PEFT, NEEDS_ACCELERATE = (
    pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed")
    for name in ("peft", "accelerate")
)
STEPS = 3
LIMIT = 0.05


def llama(seed: int = 0, **settings: Any) -> PreTrainedModel:
    return tiny_model(LlamaForCausalLM, tiny_config("llama", **settings), seed).double()


def tokens(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(4, VOCABULARY, (2, 12), generator=generator)


def checkpointed(model: nn.Module, *, reentrant: bool) -> nn.Module:
    model.train()
    options = {"use_reentrant": reentrant}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)  # type: ignore[operator]
    return model


def adapted(model: nn.Module | None = None) -> nn.Module:
    peft = import_module("peft")
    adapters = peft.LoraConfig(
        r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.0, init_lora_weights=False
    )
    torch.manual_seed(1)
    return peft.get_peft_model(model or llama(), adapters).double()  # type: ignore[no-any-return]


def adapted_and_checkpointed() -> nn.Module:
    model = llama()
    model.enable_input_require_grads()
    return checkpointed(adapted(model), reentrant=False)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied weights": lambda: llama(tie_word_embeddings=True),
    "checkpointing": lambda: checkpointed(llama(), reentrant=False),
    "checkpointing, reentrant": lambda: checkpointed(llama(), reentrant=True),
    "adapters": adapted,
    "adapters, checkpointing": adapted_and_checkpointed,
}


def loss_of(model: nn.Module, tokens_BT: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=tokens_BT, labels=tokens_BT).loss
    return loss


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def train_alone(
    models: list[nn.Module], loss_of_all: Callable[[list[nn.Module], Tensor], Tensor]
) -> list[list[float]]:
    """The losses of both ranks' batches in each step."""
    optimizers = [adamw(model) for model in models]
    losses = []
    for step in range(STEPS):
        both = [loss_of_all(models, tokens(step, rank)) for rank in (0, 1)]
        (sum(both) / 2).backward()
        for model, optimizer in zip(models, optimizers, strict=True):
            nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
            optimizer.step()
            optimizer.zero_grad()
        losses.append([loss.item() for loss in both])
    return losses


def train_shards(
    sharded: list[Sharded],
    loss_of_all: Callable[[list[nn.Module], Tensor], Tensor],
    rank: int,
) -> list[float]:
    models = [one.model for one in sharded]
    optimizers = [adamw(model) for model in models]
    losses = []
    for step in range(STEPS):
        loss = loss_of_all(models, tokens(step, rank))
        loss.backward()
        for one, optimizer in zip(sharded, optimizers, strict=True):
            one.clip_grad_norm(LIMIT)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compare(
    models: list[nn.Module],
    loss_of_all: Callable[[list[nn.Module], Tensor], Tensor],
    rank: int,
) -> list[dict[str, Tensor]]:
    """The whole states after training in shards, which are those of one process."""
    alone = copy.deepcopy(models)
    expected = train_alone(alone, loss_of_all)
    with ExitStack() as stack:
        groups = [stack.enter_context(open_two()) for _ in models]
        sharded = [fully_shard(m, roles_of(g)) for m, g in zip(models, groups, strict=True)]
        losses = train_shards(sharded, loss_of_all, rank)
        torch.testing.assert_close(losses, [both[rank] for both in expected], rtol=1e-9, atol=0)
        states = [one.full_state_dict() for one in sharded]
    for state, model in zip(states, alone, strict=True):
        check_state(state, model)
    return states


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=NEEDS_PEFT if k.startswith("adapters") else ()) for k in MODELS],
)
@ranks(2)
def test_equal_to_one_process(rank: int, kind: str) -> None:
    model = MODELS[kind]()
    before = copy.deepcopy(model.state_dict())
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    (state,) = compare([model], lambda models, x: loss_of(models[0], x), rank)
    assert bool(frozen) == kind.startswith("adapters")
    for name in frozen:
        assert torch.equal(state[name], before[name])
    assert not all(torch.equal(state[name], value) for name, value in before.items())


@NEEDS_PEFT
@ranks(2)
def test_an_adapter_is_saved_from_the_whole_state(rank: int, tmp_path: Path) -> None:
    model = adapted()
    (state,) = compare([model], lambda models, x: loss_of(models[0], x), rank)
    folder = tmp_path / str(rank)
    model.save_pretrained(folder, state_dict=state)  # type: ignore[operator]
    files = {path.name for path in folder.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= files
    assert "model.safetensors" not in files
    peft = import_module("peft")
    loaded = peft.PeftModel.from_pretrained(llama(), folder).double()
    trained = adapted()
    trained.load_state_dict(state)
    with torch.no_grad():
        for step in range(2):
            x = tokens(step, rank)
            assert torch.equal(loss_of(loaded, x), loss_of(trained, x))


def distilled(models: list[nn.Module], tokens_BT: Tensor) -> Tensor:
    student, teacher = models
    with torch.no_grad():
        target = F.softmax(teacher(input_ids=tokens_BT).logits, dim=-1)
    loss = F.cross_entropy(student(input_ids=tokens_BT).logits.mT, target.mT)
    # The teacher learns too, so that both have a backward in one step.
    return loss + loss_of(teacher, tokens_BT)


def of_both(models: list[nn.Module], tokens_BT: Tensor) -> Tensor:
    return loss_of(models[0], tokens_BT) + 2 * loss_of(models[1], tokens_BT)


@ranks(2)
def test_two_models_at_once(rank: int) -> None:
    for loss_of_all in (distilled, of_both):
        compare([llama(), llama(1, num_hidden_layers=3)], loss_of_all, rank)


@NEEDS_ACCELERATE
@ranks(2, leaves="tqdm's monitor, which transformers starts, lives as long as the process")
def test_accelerate_trains_and_names_how_to_save(rank: int, tmp_path: Path) -> None:
    accelerate = import_module("accelerate")
    expected = llama()
    train_alone([expected], lambda models, x: loss_of(models[0], x))
    with open_two() as groups, pytest.MonkeyPatch.context() as patch:
        # As a launcher sets them; there is a default process group already.
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        patch.setenv("MASTER_PORT", "1")
        for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", 2)):
            patch.setenv(name, str(value))
        accelerator = accelerate.Accelerator(cpu=True)
        assert accelerator.num_processes == 2
        model = llama()
        sharded = fully_shard(model, roles_of(groups))
        optimizer = accelerator.prepare(adamw(model))
        for step in range(STEPS):
            accelerator.backward(loss_of(model, tokens(step, rank)))
            accelerator.clip_grad_norm_(model.parameters(), LIMIT)
            optimizer.step()
            optimizer.zero_grad()
        for save in (
            lambda: accelerator.get_state_dict(model),
            lambda: accelerator.save_model(model, tmp_path / "refused"),
            lambda: accelerator.unwrap_model(model).save_pretrained(tmp_path / "refused"),
        ):
            with pytest.raises(ConfigError, match=r"sharded\.full_state_dict\(\) on all ranks"):
                save()
        state = sharded.full_state_dict()
        accelerator.unwrap_model(model).save_pretrained(
            tmp_path / "saved",
            state_dict=state,
            is_main_process=accelerator.is_main_process,
            save_function=accelerator.save,
        )
        accelerator.wait_for_everyone()
        with pytest.raises(ConfigError, match="DistributedDataParallel of a sharded model"):
            accelerator.prepare(model)
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float64)
    check_state(dict(loaded.state_dict()), expected)
