"""Writing text: long prompts, extreme temperatures, and no limit that matters."""

from __future__ import annotations

import dataclasses
from unittest.mock import patch

import pytest
import torch

from integration_support.step_pools import StepPools
from pcomm.core.testing import assert_close
from pcomm.inference import Engine, Request, SamplingParams
from pcomm.integration import recipes
from pcomm.integration.config.rules import validate
from pcomm.integration.data.tokenizer import train_tokenizer
from pcomm.integration.huggingface.chat_template import plain_chat
from pcomm.integration.llm.engine_size import EngineOptions
from pcomm.integration.llm.loading import LoadedModel, RunTokenizer
from pcomm.integration.llm.open_requests import Generation, joined
from pcomm.integration.models.initialisation import initialise
from pcomm.integration.models.language_model import LanguageModel

OPTIONS = EngineOptions(max_model_len=2048, max_requests=1, prefix_cache=False)


def model_of(pattern: str = "A", **sizes: int) -> LanguageModel:
    """A model whose weights are so large that each token decides those that follow."""
    tiny = recipes.tiny()
    layers = max(2, len(pattern))
    shape = dataclasses.replace(tiny.model, pattern=pattern, layers=layers, init_std=0.3, **sizes)
    config = validate(dataclasses.replace(tiny, model=shape), 1)
    model = LanguageModel(config.model, config.data.vocabulary, dtype=torch.float64)
    initialise(model, config.model, seed=0)
    return model.eval()


def test_only_the_logits_that_are_asked_for_are_computed():
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


def test_graphs_are_recorded_before_the_first_request():
    """A CPU records none, so it is the call that is looked for."""
    loaded = Writing().loaded
    with patch.object(Engine, "record_graphs", autospec=True) as recorded:
        engine = OPTIONS.engine(loaded, 2**27)
    recorded.assert_called_once_with(engine)
    engine.close()


class Writing:
    """A model in an engine for one text, and the rows of logits that it computes at a time."""

    def __init__(self, pattern: str = "A") -> None:
        own = RunTokenizer(train_tokenizer(["some words to learn " * 5], 320))
        plain, stop = plain_chat()
        model, self.rows = model_of(pattern), list[int]()
        model.head.register_forward_hook(lambda _, inputs, __: self.rows.append(len(inputs[0])))
        found = {"num_parameters": model.num_parameters(), "dtype": torch.float32}
        self.loaded = LoadedModel("words", own, plain, stop, 2048, 320, {}, model, **found)

    def write(self, prompt: str, params: SamplingParams) -> Generation:
        ids = tuple(self.loaded.prompt_ids(prompt))
        engine = OPTIONS.engine(self.loaded, 2**27)
        engine.add(Request("text", ids, params))
        outputs = []
        while engine.has_work:
            outputs += engine.step()
        engine.close()
        return joined(ids, outputs)


def test_a_long_prompt_costs_one_row_of_logits():
    found = Writing()
    found.write("words " * 700, SamplingParams(max_tokens=3, temperature=0))
    assert set(found.rows) == {1}


def test_a_limit_beyond_all_memory_is_only_a_limit():
    text = Writing().write("some", SamplingParams(max_tokens=10**10, temperature=3.0))
    assert text.finish_reason == "stop"
    assert len(text.token_ids) < 2048


def test_a_stop_string_ends_the_text_before_it():
    found = Writing()
    settings = SamplingParams(max_tokens=60, temperature=0.7, seed=2)
    whole = found.write("some words", settings)
    # Across the border of two tokens.
    first, second = (found.loaded.tokenizer.decode(whole.token_ids[i : i + 1]) for i in (10, 11))
    end = whole.text.index(first[-1] + second[0])
    stopped = found.write(
        "some words", dataclasses.replace(settings, stop=(first[-1] + second[0],))
    )
    assert (stopped.text, stopped.finish_reason) == (whole.text[:end], "stop")
    assert stopped.token_ids == whole.token_ids[: len(stopped.token_ids)]


@pytest.mark.parametrize("temperature", [1e-40, 5e-324, 1e300])
def test_every_temperature_that_python_can_name(temperature):
    found = Writing()
    settings = SamplingParams(max_tokens=8, temperature=temperature)
    text = found.write("some", settings)
    likeliest = found.write("some", dataclasses.replace(settings, temperature=0.0))
    assert (text.text == likeliest.text) == (temperature < 1)
