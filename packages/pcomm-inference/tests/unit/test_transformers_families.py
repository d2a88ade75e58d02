"""Causal language models of transformers, unchanged, write the tokens of their own forward."""

from __future__ import annotations

import pytest

from inference_support.transformers_families import (
    FAMILIES,
    NOT_TRIED,
    PROMPTS,
    REFUSED,
    difference,
    engine_for,
    prompts_for,
    tiny_family,
    write,
)
from pcomm.core.errors import ConfigError
from pcomm.inference.transformers import TransformersModel

# Models of transformers warn of much that is no concern of these tests.
pytestmark = pytest.mark.filterwarnings("ignore")

# A family for each mechanism: grouped heads, learned positions, those that begin behind padding,
# experts, windows beside full layers, capped scores, sinks, values of another width, keys that
# layers share, attention twice in a layer, recurrences alone and beside attention.
SHOWN = (
    *("llama", "gpt2", "roberta", "mixtral", "gemma3_text", "gemma2", "gpt_oss", "deepseek_v3"),
    *("gemma3n_text", "diffllama", "mamba", "mamba2", "bamba", "qwen3_next", "zamba2"),
)
SHOWN_REFUSED = ("bloom", "bart", "deepseek_v32", "llama4_text", "minimax", "recurrent_gemma")
EQUAL = [family for family in FAMILIES if family not in {*REFUSED, *NOT_TRIED}]


def soak_but(shown: tuple[str, ...], families: list[str]) -> list[object]:
    """Some families in every run, and the others in the long one."""
    assert set(shown) <= set(families)
    return [
        family if family in shown else pytest.param(family, marks=pytest.mark.soak)
        for family in families
    ]


@pytest.mark.parametrize("family", soak_but(SHOWN, EQUAL))
def test_tokens_are_those_of_the_models_own_forward(family: str) -> None:
    model, prompts = tiny_family(family), prompts_for()
    adapter = TransformersModel(model)
    written = write(engine_for(adapter), prompts)
    adapter.close()
    assert len({tuple(tokens) for tokens, _ in written}) > len(PROMPTS) // 2
    assert difference(model, prompts, written) is None


@pytest.mark.parametrize("family", soak_but(SHOWN_REFUSED, list(REFUSED)))
def test_other_families_are_refused_before_the_first_step(family: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TransformersModel(tiny_family(family))
    assert REFUSED[family] in str(caught.value).splitlines()[0]
    assert len(str(caught.value).splitlines()) == 3


def test_most_families_are_equal() -> None:
    assert len(EQUAL) >= 120
    assert {*REFUSED, *NOT_TRIED} <= set(FAMILIES)
