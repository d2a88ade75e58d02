"""Models of transformers, run by the engine: the same logits, and the same likeliest tokens.

The weights are rescaled, since with those of a new model most of the next tokens do not change when
every mixer is taken out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from integration_support.huggingface_directories import SMALL_CONFIGS, write_directory
from integration_support.step_pools import StepPools
from pcomm.inference import Engine, Request, SamplingParams
from pcomm.integration.config.model_rules import resolve_model
from pcomm.integration.huggingface.config_json import read_model
from pcomm.integration.huggingface.directory import open_directory
from pcomm.integration.huggingface.weights import load_weights
from pcomm.integration.models.attention import Attention
from pcomm.integration.models.gated_delta_net import GatedDeltaNet
from pcomm.integration.models.language_model import LanguageModel
from pcomm.integration.models.mamba2 import Mamba2

pytest.importorskip("transformers", reason="transformers is the oracle here")

WRITTEN = 12
# Of logits with a standard deviation of about 1. Theirs are in fp32, whose rounding the corrections
# of a Gated DeltaNet amplify: by the number of threads they are 3e-4 to 1.4e-3 off there, and 1e-5
# elsewhere.
TOLERANCE, OF_GDN = 2e-5, 5e-3
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in SMALL_CONFIGS},
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, stretched": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 40,
            }
        },
    ),
}
PROMPTS = [[5, 9, 3, 250, 17, 17, 2], [1], [(31 * n) % 300 for n in range(75)]]


def loaded(folder: Path) -> LanguageModel:
    directory = open_directory(folder)
    found = read_model(directory)
    model = LanguageModel(resolve_model(found.config), found.vocabulary)
    load_weights(model, found.family, directory)
    return model.eval()


@pytest.fixture(scope="module")
def both(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[nn.Module, LanguageModel]]:
    """Their model and ours with the same weights."""
    known: dict[str, tuple[nn.Module, LanguageModel]] = {}

    def of(name: str) -> tuple[nn.Module, LanguageModel]:
        if name not in known:
            family, changes = VARIANTS[name]
            folder = tmp_path_factory.mktemp("family")
            known[name] = write_directory(folder, family, **changes), loaded(folder)
        return known[name]

    return of


@torch.inference_mode()
def their_logits(model: nn.Module, tokens: list[int]) -> Tensor:
    logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def in_chunks(ours: LanguageModel) -> list[Tensor]:
    """Logits of each prompt, read in chunks beside the others."""
    pools = StepPools(ours, len(PROMPTS), 80)
    found: list[list[Tensor]] = [[] for _ in PROMPTS]
    # The long prompt in chunks of 1, 70 and 4 tokens.
    for cuts in ({0: (0, 5), 2: (0, 1)}, {0: (5, 7), 1: (0, 1), 2: (1, 71)}, {2: (71, 75)}):
        logits = pools.step({n: PROMPTS[n][start:stop] for n, (start, stop) in cuts.items()})
        for n, part in logits.items():
            found[n].append(part)
    return [torch.cat(parts) for parts in found]


def distances(some: list[Tensor], others: list[Tensor]) -> list[float]:
    return [float((a - b).abs().max()) for a, b in zip(some, others, strict=True)]


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(both, name):
    """In fp32 we are about as far from the exact logits as they are."""
    theirs, ours = both(name)
    their = [their_logits(theirs, prompt) for prompt in PROMPTS]
    exact = in_chunks(copy.deepcopy(ours).double())
    allowed = OF_GDN if name == "qwen3_next" else TOLERANCE
    assert max(distances(their, exact)) <= allowed
    assert max(distances(in_chunks(ours), exact)) <= 2 * allowed


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_tokens_equal_transformers(both, name):
    """Their tokens come from a full forward pass each, without a cache that both could misuse."""
    theirs, ours = both(name)
    engine = Engine(
        ours,
        vocabulary=300,
        max_model_len=100,
        num_blocks=32,
        num_state_slots=8,
        max_batch_tokens=16,
    )
    found: dict[str, list[int]] = {str(n): [] for n in range(len(PROMPTS))}
    for n, prompt in enumerate(PROMPTS):
        params = SamplingParams(temperature=0, max_tokens=WRITTEN, ignore_eos=True)
        engine.add(Request(str(n), tuple(prompt), params))
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            found[output.request_id] += output.token_ids
    engine.close()
    for n, prompt in enumerate(PROMPTS):
        tokens = list(prompt)
        for _ in range(WRITTEN):
            tokens.append(int(their_logits(theirs, tokens)[-1].argmax()))
        assert found[str(n)] == tokens[len(prompt) :]


@pytest.mark.parametrize(
    ("name", "mixer"),
    [
        ("llama", Attention),
        ("qwen3_moe", Attention),
        ("mamba2", Mamba2),
        ("qwen3_next", GatedDeltaNet),
        ("qwen3_next", Attention),
    ],
)
def test_a_mixer_of_zeros_is_seen(both, name, mixer, monkeypatch):
    theirs, ours = both(name)
    monkeypatch.setattr(mixer, "step", lambda self, x, context, memory: torch.zeros_like(x))
    their = [their_logits(theirs, prompt) for prompt in PROMPTS]
    assert min(distances(in_chunks(ours), their)) > 50 * OF_GDN
