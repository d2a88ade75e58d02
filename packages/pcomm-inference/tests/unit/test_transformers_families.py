"""Causal language models of transformers, unchanged, write the tokens of their own forward."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel

from core_support.works_with import check_outcome, committed, models, outcome
from inference_support.transformers_families import (
    FAMILIES,
    PROMPTS,
    difference,
    engine_for,
    own_logits,
    prompts_for,
    tiny_family,
    write,
)
from pcomm.inference.transformers import TransformersModel

# A family for each mechanism: grouped heads, learned positions, those that begin behind padding,
# experts, windows beside full layers, capped scores, sinks, values of another width, keys that
# layers share, attention twice in a layer, recurrences alone and beside attention. Then one for
# each reason of a refusal.
SHOWN = (
    *("llama", "gpt2", "roberta", "mixtral", "gemma3_text", "gemma2", "gpt_oss", "deepseek_v3"),
    *("gemma3n_text", "diffllama", "mamba", "mamba2", "bamba", "qwen3_next", "zamba2"),
    *("bloom", "bart", "deepseek_v32", "llama4_text", "minimax", "recurrent_gemma"),
)


def tried(family: str) -> PreTrainedModel:
    """A model whose own forward works."""
    model = tiny_family(family)
    own_logits(model, prompts_for()[-1])
    return model


def compare(model: PreTrainedModel) -> None:
    adapter, prompts = TransformersModel(model), prompts_for()
    written = write(engine_for(adapter), prompts)
    adapter.close()
    assert len({tuple(tokens) for tokens, _ in written}) > len(PROMPTS) // 2
    assert difference(model, prompts, written) is None


@pytest.mark.parametrize("family", models("pcomm-inference", FAMILIES, SHOWN))
def test_works_with_a_family_or_refuses_it_before_the_first_step(family: str) -> None:
    check_outcome("pcomm-inference", family, outcome(lambda: tried(family), compare))


def test_most_families_are_equal() -> None:
    found = committed("pcomm-inference")
    assert found.keys() == FAMILIES.keys()
    assert [*found.values()].count("equal") >= 120
