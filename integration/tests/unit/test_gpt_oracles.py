"""The GPT against transformers' Llama and Qwen3, with weights that make a missing part visible.

With default initialisation most of the next tokens do not change when every mixer is taken out
(measured by others for several models), so weights are rescaled first: matrices to a standard
deviation of one over the square root of their inputs, embeddings to 0.3, norms moved off 1.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from pcomm.integration.config.rules import validate
from pcomm.integration.config.sections import Config, ModelConfig
from pcomm.integration.models import attention, language_model
from pcomm.integration.models.language_model import LanguageModel
from pcomm.integration.models.layers import RMSNorm
from pcomm.integration.parallelize import plan_sequences

transformers = pytest.importorskip("transformers", reason="transformers is the oracle here")

VOCABULARY = 97
LENGTHS = (7, 19, 1, 12, 12)
TOLERANCE = 1e-4


def gpt(**changes: object) -> LanguageModel:
    shape = ModelConfig(layers=3, width=64, heads=4, kv_heads=2, head_dim=24, mlp_width=96)
    model = dataclasses.replace(shape, **changes)
    config = validate(Config(model=model), 1)
    torch.manual_seed(1)
    built = LanguageModel(config.model, VOCABULARY)
    rescale(built)
    return built


def rescale(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
        elif parameter.dim() == 1:
            parameter.data = 1 + 0.1 * torch.randn(parameter.shape, generator=generator)
        else:
            std = 0.3 if "embedding" in name else parameter.shape[1] ** -0.5
            parameter.data = std * torch.randn(parameter.shape, generator=generator)


def oracle(model: LanguageModel) -> nn.Module:
    """The same model as transformers has it, with the weights of `model`."""
    config = model.config
    shared = {
        "vocab_size": VOCABULARY,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope_parameters(config),
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": 64,
        "attn_implementation": "eager",
    }
    if config.qkv_bias:
        theirs = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**shared))
    elif config.qk_norm:
        theirs = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shared))
    else:
        theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shared))
    state = {
        "model.embed_tokens.weight": model.embedding.weight,
        "model.norm.weight": model.norm.weight,
        "lm_head.weight": model.head.weight,
    }
    for index, ours in enumerate(model.blocks):
        prefix = f"model.layers.{index}"
        heads = [n * config.head_dim for n in (config.heads, config.kv_heads, config.kv_heads)]
        q, k, v = ours.mixer.qkv.weight.split(heads)
        gate, up = ours.mlp.gate_up.weight.chunk(2)
        state |= {
            f"{prefix}.self_attn.q_proj.weight": q,
            f"{prefix}.self_attn.k_proj.weight": k,
            f"{prefix}.self_attn.v_proj.weight": v,
            f"{prefix}.self_attn.o_proj.weight": ours.mixer.output.weight,
            f"{prefix}.mlp.gate_proj.weight": gate,
            f"{prefix}.mlp.up_proj.weight": up,
            f"{prefix}.mlp.down_proj.weight": ours.mlp.down.weight,
            f"{prefix}.input_layernorm.weight": ours.mixer_norm.weight,
            f"{prefix}.post_attention_layernorm.weight": ours.mlp_norm.weight,
        }
        if config.qk_norm:
            state[f"{prefix}.self_attn.q_norm.weight"] = ours.mixer.q_norm.weight
            state[f"{prefix}.self_attn.k_norm.weight"] = ours.mixer.k_norm.weight
        if config.qkv_bias:
            for name, bias in zip("qkv", ours.mixer.qkv.bias.split(heads), strict=True):
                state[f"{prefix}.self_attn.{name}_proj.bias"] = bias
    theirs.load_state_dict(state)
    return theirs.eval()


def rope_parameters(config: ModelConfig) -> dict[str, object]:
    """The rotary positions as transformers is told of them."""
    kind = "default" if config.rope_scaling == "none" else config.rope_scaling
    found: dict[str, object] = {"rope_type": kind, "rope_theta": config.rope_theta}
    if kind != "default":
        found["factor"] = config.rope_factor
    if kind == "llama3":
        found["low_freq_factor"] = config.rope_low_frequency
        found["high_freq_factor"] = config.rope_high_frequency
        found["original_max_position_embeddings"] = config.rope_original_context
    return found


# With a context of 100 tokens, pairs of 24 numbers are slowed wholly, in part and not at all.
LINEAR = {"rope_scaling": "linear", "rope_factor": 3.0}
LLAMA3 = {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_original_context": 100}


def packed() -> tuple[Tensor, tuple[int, ...]]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCABULARY, (sum(LENGTHS),), generator=generator)
    borders = [sum(LENGTHS[:n]) for n in range(len(LENGTHS) + 1)]
    return tokens, tuple(borders)


def their_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Sequence by sequence, each alone."""
    return torch.cat([model(part.unsqueeze(0)).logits[0] for part in tokens.split(LENGTHS)])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"qk_norm": True},
        {"qkv_bias": True, "head_dim": 16},
        {"tie_embeddings": True},
        {"kv_heads": 4},
        {"rope_theta": 100.0},
        LINEAR,
        LLAMA3,
    ],
    ids=["llama", "qwen3", "qwen2", "tied", "kv_heads=heads", "theta=100", "linear", "llama3"],
)
def test_logits_loss_and_gradients_equal_transformers(changes):
    ours = gpt(**changes)
    theirs = oracle(ours)
    tokens, borders = packed()
    targets = tokens.roll(-1)
    targets[::5] = -100
    plan = plan_sequences(ours, borders)
    logits = ours(tokens, plan)
    expected = their_logits(theirs, tokens)
    torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE)
    loss = ours.token_losses(tokens, targets, plan).sum() / (targets >= 0).sum()
    reference = nn.functional.cross_entropy(expected, targets)
    torch.testing.assert_close(loss, reference, rtol=0, atol=TOLERANCE)
    loss.backward()
    reference.backward()
    for name, their_name in (
        ("embedding.weight", "model.embed_tokens.weight"),
        ("blocks.0.mixer_norm.weight", "model.layers.0.input_layernorm.weight"),
        ("blocks.0.mixer.output.weight", "model.layers.0.self_attn.o_proj.weight"),
        ("blocks.2.mlp.down.weight", "model.layers.2.mlp.down_proj.weight"),
    ):
        mine = ours.get_parameter(name).grad
        other = theirs.get_parameter(their_name).grad
        torch.testing.assert_close(mine, other, rtol=0, atol=TOLERANCE)


BREAKS = {
    "no mixer": (attention.Attention, "forward", lambda self, x, context: torch.zeros_like(x)),
    "no mlp": (language_model.SwiGLU, "forward", lambda self, x: torch.zeros_like(x)),
    "no rotation": (attention, "rotate", lambda x, turn: x),
    "sees the document before": (
        attention,
        "packed_attention",
        lambda q, k, v, cu_seqlens: attention._equal_sequences(q, k, v, 1),
    ),
    "no norm": (RMSNorm, "forward", lambda self, x: x),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_part_is_seen_by_the_oracle(name, monkeypatch):
    """The same comparison, which must fail by far when a part is missing."""
    ours = gpt(layers=1)
    tokens, borders = packed()
    expected = their_logits(oracle(ours), tokens)
    monkeypatch.setattr(*BREAKS[name])
    difference = (ours(tokens, plan_sequences(ours, borders)) - expected).abs().max()
    assert difference > 100 * TOLERANCE


def test_a_token_of_one_document_does_not_reach_another():
    ours = gpt()
    tokens, borders = packed()
    changed = tokens.clone()
    changed[3] = (changed[3] + 1) % VOCABULARY
    plan = plan_sequences(ours, borders)
    before, after = (ours(t, plan) for t in (tokens, changed))
    assert torch.equal(before[:3], after[:3])
    assert not torch.allclose(before[3 : LENGTHS[0]], after[3 : LENGTHS[0]])
    assert torch.equal(before[LENGTHS[0] :], after[LENGTHS[0] :])


def test_the_loss_ignores_what_has_no_target():
    ours = gpt(layers=1)
    tokens, borders = packed()
    losses = ours.token_losses(tokens, torch.full_like(tokens, -100), plan_sequences(ours, borders))
    assert torch.equal(losses, torch.zeros_like(losses))
