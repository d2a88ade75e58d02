"""Directories of small models of transformers, in which every part matters, and of a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from torch import nn

__all__ = [
    "CHAT_TEMPLATE",
    "SMALL_CONFIGS",
    "rescale",
    "small_model",
    "write_directory",
    "write_tokenizer",
]


_DECODER = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}

SMALL_CONFIGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama": {**_DECODER, "head_dim": 16},
        "qwen2": {**_DECODER, "tie_word_embeddings": True},
        "qwen3": {**_DECODER, "head_dim": 20},
        "qwen3_moe": {**_DECODER, **_EXPERTS, "head_dim": 16, "decoder_sparse_step": 2},
        "mamba2": {
            "hidden_size": 48,
            "num_hidden_layers": 3,
            "vocab_size": 300,
            "num_heads": 8,
            "head_dim": 12,
            "expand": 2,
            "n_groups": 2,
            "state_size": 16,
            "chunk_size": 16,
        },
        "qwen3_next": {
            **_DECODER,
            **_EXPERTS,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "partial_rotary_factor": 0.25,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 12,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [],
        },
    }
)
"""A configuration of each family, by `model_type`."""


def small_model(family: str, *, seed: int = 0, **changes: Any) -> nn.Module:
    """A model of transformers, in fp32, with rescaled weights. Local.

    Args:
        family: Key of `SMALL_CONFIGS`.
        seed: Seed of the weights.
        changes: Fields of the configuration to change.
    """
    import transformers

    config = transformers.AutoConfig.for_model(family, **{**SMALL_CONFIGS[family], **changes})
    config._attn_implementation = "eager"
    build: Any = transformers.AutoModelForCausalLM.from_config
    # Vectors keep what they are made of, and decays of a delta rule are made at random.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = build(config)
    rescale(model, seed)
    return model.eval()


def rescale(model: nn.Module, seed: int = 0) -> None:
    """Weights with which each part changes the result; default ones leave it as it is. Local.

    Matrices have a standard deviation of one over the square root of their inputs, embeddings 0.3,
    and vectors are moved by 0.1.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.add_(0.1 * noise)
            else:
                std = 0.3 if "embed" in name else parameter.shape[-1] ** -0.5
                parameter.copy_(std * noise)


def write_directory(
    folder: Path, family: str, *, dtype: torch.dtype = torch.float32, **changes: Any
) -> nn.Module:
    """Save a small model with `save_pretrained`; returns it. Local.

    Args:
        folder: The directory, made if absent.
        family: Key of `SMALL_CONFIGS`.
        dtype: Dtype of the weights.
        changes: Fields of the configuration to change, and `max_shard_size` of `save_pretrained`.
    """
    saving = {"max_shard_size": changes.pop("max_shard_size", "5GB")}
    model = small_model(family, **changes).to(dtype)
    model.save_pretrained(folder, **saving)  # type: ignore[operator]
    return model


CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message.role }}\n{{ message.content | trim }}</s>\n"
    "{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
"""A template in the manner of ChatML."""


def write_tokenizer(folder: Path, texts: Iterable[str], *, vocabulary: int = 290) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and a chat template. Local.

    The token `<s>` begins a text and has id 0, `</s>` ends it and has id 1.

    Args:
        folder: An existing folder.
        texts: Texts that the merges are learnt from.
        vocabulary: Most token ids.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "__type": "AddedToken", "special": True},
        "model_max_length": 128,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
