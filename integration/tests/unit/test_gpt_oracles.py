"""The GPT against transformers' Llama, Qwen2 and Qwen3: logits, loss and gradients of packed texts.

With default initialisation most of the next tokens do not change when every mixer is taken out
(measured by others for several models), so the weights are rescaled.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from integration_support.huggingface_directories import write_directory
from pcomm.integration.huggingface import load_model
from pcomm.integration.models import attention, language_model
from pcomm.integration.models.language_model import LanguageModel
from pcomm.integration.models.layers import RMSNorm
from pcomm.integration.parallelize import plan_sequences

pytest.importorskip("transformers", reason="transformers is the oracle here")

LENGTHS = (7, 19, 1, 12, 12)
TOLERANCE = 1e-4


def both(folder: Path, family: str = "llama", **changes: Any) -> tuple[LanguageModel, nn.Module]:
    """Our model and theirs, with the same weights."""
    theirs = write_directory(folder, family, **changes)
    return load_model(folder).requires_grad_(), theirs


def rope(kind: str, theta: float = 10_000.0, **more: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


# With a context of 100 tokens, pairs of 24 numbers are slowed wholly, in part and not at all.
BANDS = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 100,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "qwen2": ("qwen2", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "kv_heads=heads": ("llama", {"num_key_value_heads": 4}),
    "theta=100": ("llama", rope("default", 100.0)),
    "linear": ("llama", rope("linear", factor=3.0)),
    "llama3": ("llama", {"head_dim": 24, **rope("llama3", factor=8.0, **BANDS)}),
}


def packed() -> tuple[Tensor, tuple[int, ...]]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 300, (sum(LENGTHS),), generator=generator)
    borders = [sum(LENGTHS[:n]) for n in range(len(LENGTHS) + 1)]
    return tokens, tuple(borders)


def their_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Sequence by sequence, each alone."""
    return torch.cat([model(part.unsqueeze(0)).logits[0] for part in tokens.split(LENGTHS)])


@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_gradients_equal_transformers(case, tmp_path):
    family, changes = CASES[case]
    ours, theirs = both(tmp_path, family, **changes)
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
def test_a_broken_part_is_seen_by_the_oracle(name, tmp_path, monkeypatch):
    """The same comparison, which must fail by far when a part is missing."""
    ours, theirs = both(tmp_path, num_hidden_layers=1)
    tokens, borders = packed()
    expected = their_logits(theirs, tokens)
    monkeypatch.setattr(*BREAKS[name])
    difference = (ours(tokens, plan_sequences(ours, borders)) - expected).abs().max()
    assert difference > 100 * TOLERANCE


def test_tokens_of_one_document_do_not_reach_another_and_some_have_no_loss(tmp_path):
    ours, _ = both(tmp_path)
    tokens, borders = packed()
    changed = tokens.clone()
    changed[3] = (changed[3] + 1) % 300
    plan = plan_sequences(ours, borders)
    before, after = (ours(t, plan) for t in (tokens, changed))
    assert torch.equal(before[:3], after[:3])
    assert not torch.allclose(before[3 : LENGTHS[0]], after[3 : LENGTHS[0]])
    assert torch.equal(before[LENGTHS[0] :], after[LENGTHS[0] :])
    assert not ours.token_losses(tokens, torch.full_like(tokens, -100), plan).any()
