"""Writing text: long prompts, extreme temperatures, and no limit that matters."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from pcomm.core.testing import assert_close
from pcomm.inference import SamplingParams
from pcomm.integration import recipes
from pcomm.integration.config_rules import validate
from pcomm.integration.data.tokenizer import train_tokenizer
from pcomm.integration.generate import stream
from pcomm.integration.generate.writer import Writer
from pcomm.integration.llm.loading import LoadedModel
from pcomm.integration.llm.plain_chat import plain_chat
from pcomm.integration.llm.run_tokenizer import RunTokenizer
from pcomm.integration.models.initialisation import initialise
from pcomm.integration.models.language_model import LanguageModel
from pcomm.integration.testing.step_pools import StepPools


def model_of(pattern: str = "A", **sizes: int) -> LanguageModel:
    """A model whose weights are so large that each token decides those that follow."""
    tiny = recipes.tiny()
    layers = max(2, len(pattern))
    shape = dataclasses.replace(tiny.model, pattern=pattern, layers=layers, init_std=0.3, **sizes)
    config = validate(dataclasses.replace(tiny, model=shape), 1)
    model = LanguageModel(config.model, config.data.vocabulary, dtype=torch.float64)
    initialise(model, config.model, seed=0)
    return model.eval()


def test_only_the_logits_that_are_asked_for_are_computed() -> None:
    model, rows = model_of("MA"), []
    model.head.register_forward_hook(lambda _, inputs, __: rows.append(len(inputs[0])))
    pools, tokens = StepPools(model, 2, 50), list(range(50))
    every = pools.step({0: tokens})[0]
    batch = pools.batch([1], {1: tokens})
    for wanted in ([49], [3, 1, 40], []):
        # The slots of request 1 are zeros again, as the engine leaves them.
        pools.forget(1)
        found = model.step(
            dataclasses.replace(batch, logits_rows=torch.tensor(wanted, dtype=torch.int64)),
            pools.memory,
        )
        # In fp64, in which a matrix product of fewer rows may add in another order.
        assert_close(found, every[wanted], num_terms=64)
    assert rows == [50, 1, 3, 0]


def writer(pattern: str = "A") -> tuple[Writer, list[int]]:
    """A writer, and the rows of logits that it computes at a time."""
    tokenizer = train_tokenizer(["some words to learn " * 5], 320)
    model, rows = model_of(pattern), []
    model.head.register_forward_hook(lambda _, inputs, __: rows.append(len(inputs[0])))
    plain, stop = plain_chat()
    own = RunTokenizer(tokenizer)
    return Writer(LoadedModel("words", own, plain, stop, 2048, 320, model)), rows


def test_a_long_prompt_costs_one_row_of_logits() -> None:
    found, rows = writer()
    found.write("words " * 700, SamplingParams(max_tokens=3, temperature=0))
    assert set(rows) == {1}


def test_a_limit_beyond_all_memory_is_only_a_limit() -> None:
    found, _ = writer()
    text = found.write("some", SamplingParams(max_tokens=10**10, temperature=3.0))
    assert text.finish_reason == "stop"
    assert text.num_tokens < 10_000


@pytest.mark.parametrize("pattern", ["A", "GM"])
@pytest.mark.parametrize("first", [1, 5, 16])
def test_more_room_changes_no_token(
    pattern: str, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _ = writer(pattern)
    settings = SamplingParams(max_tokens=60, temperature=0.7, seed=2, stop=("\0",))
    expected = found.write("some words", settings)
    assert expected.num_tokens > 3 * first
    monkeypatch.setattr(stream, "_FIRST_TOKENS", first)
    assert found.write("some words", settings) == expected


def test_a_stop_string_ends_the_text_before_it() -> None:
    found, _ = writer()
    settings = SamplingParams(max_tokens=60, temperature=0.7, seed=2)
    whole = found.write("some words", settings)
    # Across the border of two tokens.
    first, second = (found.tokenizer.decode(whole.token_ids[i : i + 1]) for i in (10, 11))
    end = whole.text.index(first[-1] + second[0])
    stopped = found.write(
        "some words", dataclasses.replace(settings, stop=(first[-1] + second[0],))
    )
    assert (stopped.text, stopped.finish_reason) == (whole.text[:end], "stop")
    assert stopped.token_ids == whole.token_ids[: stopped.num_tokens]


@pytest.mark.parametrize("temperature", [1e-40, 5e-324, 1e300])
def test_every_temperature_that_python_can_name(temperature: float) -> None:
    found, _ = writer()
    settings = SamplingParams(max_tokens=8, temperature=temperature)
    text = found.write("some", settings)
    likeliest = found.write("some", dataclasses.replace(settings, temperature=0.0))
    assert (text.text == likeliest.text) == (temperature < 1)
