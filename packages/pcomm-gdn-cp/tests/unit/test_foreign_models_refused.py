"""Models and batches that `context_parallel` refuses, and what it leaves of those it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AttentionInterface, T5ForConditionalGeneration
from transformers.masking_utils import AttentionMaskInterface

from core_support.tiny_transformers import tiny_config
from gdn_cp_support.foreign_models import model_of, packed
from pcomm.core.errors import ConfigError, LayoutError, PcommError, UnsupportedError
from pcomm.gdn_cp import context_parallel

TOKENS, LABELS, OFFSETS = packed((9, 7))


def state_of(model: torch.nn.Module) -> list[Any]:
    """What a batch could leave behind."""
    interfaces = (AttentionInterface, AttentionMaskInterface)
    registered = [sorted(interface._global_mapping) for interface in interfaces]
    modules = [
        (name, module.training, set(module.__dict__)) for name, module in model.named_modules()
    ]
    names = [
        module.config._attn_implementation
        for module in model.modules()
        if hasattr(module, "config") and hasattr(module.config, "_attn_implementation")
    ]
    hooks = [len(module._forward_hooks) for module in model.modules()]
    return [registered, modules, names, hooks]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("bloom", "no attention by name"),
        ("lfm2", r"layers.0.conv.*ShortConv"),
        ("kimi_linear", "KimiLinearDeltaAttention"),
        ("jamba", "JambaMambaMixer"),
        ("roberta", "position_embeddings"),
        ("deepseek_v32", "attention with indices"),
        ("doge", "a mask of its own"),
        ("gemma4_unified", "made for one text"),
    ],
)
def test_a_model_that_mixes_tokens_in_another_way_is_refused_by_name(kind: str, words: str) -> None:
    model = model_of(kind).train()
    before = state_of(model)
    with pytest.raises(UnsupportedError, match=words):
        context_parallel(model, (0, 1))
    assert state_of(model) == before


def test_what_is_no_decoder_of_transformers_is_refused() -> None:
    with pytest.raises(ConfigError, match="no model of transformers"):
        context_parallel(torch.nn.Linear(2, 2), (0, 1))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="an encoder and a decoder"):
        context_parallel(T5ForConditionalGeneration(tiny_config("t5")), (0, 1))
    with pytest.raises(ConfigError, match="no such strategy"):
        context_parallel(model_of("llama"), (0, 1), strategy="ring")  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="4 heads over 3 ranks"):
        context_parallel(model_of("llama"), (0, 3), strategy="heads")


@pytest.mark.parametrize("kind", ["gemma2", "qwen3_next"])
def test_a_batch_leaves_the_model_as_it_was(kind: str) -> None:
    model = model_of(kind)
    wanted = model(input_ids=TOKENS).logits
    before = state_of(model)
    cp = context_parallel(model, (0, 1))
    assert state_of(model) == before

    def fail() -> None:
        with cp.batch(TOKENS, labels=LABELS, cu_seqlens=OFFSETS) as local:
            model(**local).loss.backward()
            assert state_of(model) != before
            raise RuntimeError("an error of the caller")

    with pytest.raises(RuntimeError, match="of the caller"):
        fail()
    assert state_of(model) == before
    assert torch.equal(model(input_ids=TOKENS).logits, wanted)
    assert "heads" in cp.describe()


def test_a_batch_within_a_batch_is_refused_and_the_first_goes_on() -> None:
    model = model_of("llama")
    cp = context_parallel(model, (0, 1))
    with cp.batch(TOKENS) as local:
        for enter in (
            lambda: cp.batch(TOKENS).__enter__(),
            lambda: context_parallel(model, (0, 1)),
        ):
            with pytest.raises(ConfigError, match="a batch within a batch"):
                enter()
        assert model(**local).logits.shape[:2] == (1, 16)


def test_a_mixer_whose_forward_is_replaced_is_refused() -> None:
    model = model_of("mamba2")
    mixer = model.backbone.layers[0].mixer
    mixer.forward = mixer.forward
    with pytest.raises(ConfigError, match=r"forward of backbone.layers.0.mixer is replaced"):
        context_parallel(model, (0, 1))


def test_batches_that_cannot_be_are_refused_before_anything_changes() -> None:
    model = model_of("qwen3_moe")
    cp, before = context_parallel(model, (0, 1)), state_of(model)

    def refused(error: type[PcommError], words: str, **given: Any) -> None:
        with pytest.raises(error, match=words), cp.batch(TOKENS, **given):
            pass
        assert state_of(model) == before

    refused(UnsupportedError, "attention_mask", attention_mask=torch.ones_like(TOKENS))
    refused(LayoutError, "ends at 15", cu_seqlens=(0, 15))
    refused(LayoutError, "labels", labels=LABELS[:, 1:])
    refused(ConfigError, "integers of the host|a tensor|float", cu_seqlens=(0, 16.0))
    model.config.output_router_logits = True
    refused(ConfigError, "balance of experts", labels=LABELS)


def test_rotary_embeddings_that_depend_on_the_longest_sequence() -> None:
    model = model_of("llama")
    model.config.rope_parameters |= {"rope_type": "dynamic", "factor": 2.0}
    model = type(model)(model.config)
    cp = context_parallel(model, (0, 1))
    tokens = torch.ones(1, 300, dtype=torch.long)
    with pytest.raises(UnsupportedError, match="a sequence of 300 tokens"), cp.batch(tokens):
        pass
    with cp.batch(tokens[:, :200]) as local:
        assert model(**local).logits.shape[1] == 200
