"""Text, stop strings and grammars of requests that run through the engine together."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

import jsonschema
import pytest
import torch

from inference_support.trained_tokenizers import Tokens, byte_level, unigram
from pcomm.core.errors import ConfigError
from pcomm.inference.engine.engine import Engine
from pcomm.inference.engine.request import Request
from pcomm.inference.model import KVSpec, LayerSpec
from pcomm.inference.sampling.params import SamplingParams

TEXT = "the cat sat on the mat, and the dog did not sit there 🙂 at all"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2, "é🙂"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Script:
    """A model that goes on with one text, behind any part of it; or with noise, without a text."""

    vocabulary: int
    ids: Sequence[int] = ()

    def memory_specs(self) -> Sequence[LayerSpec]:
        return [KVSpec(1, 1, torch.float32)]

    def step(self, batch, memory) -> torch.Tensor:
        positions = batch.positions_T[batch.logits_rows].tolist()
        logits = torch.empty(len(positions), self.vocabulary)
        for row, position in zip(logits, positions, strict=True):
            if self.ids:
                # Behind the end stands a draft that is wrong.
                row.fill_(0.0)[(*self.ids, 0)[min(position + 1, len(self.ids))]] = 1.0
            else:
                row.normal_(generator=torch.Generator().manual_seed(position))
        return logits


def engine_for(tokens: Tokens, ids: Sequence[int] = (), **settings) -> Engine:
    vocabulary = tokens.tokenizer.get_vocab_size()
    return Engine(
        Script(vocabulary, ids),
        vocabulary=vocabulary,
        tokenizer=tokens,
        max_model_len=200,
        num_blocks=200,
        num_state_slots=16,
        **settings,
    )


def run(engine: Engine) -> tuple[dict[str, str], dict[str, str]]:
    """The text of each request, and the reason for which it ended."""
    texts: dict[str, str] = {}
    reasons: dict[str, str] = {}
    while engine.has_work:
        for output in engine.step():
            texts[output.request_id] = texts.get(output.request_id, "") + output.text
            assert "�" not in output.text
            if output.finish_reason:
                reasons[output.request_id] = output.finish_reason
    return texts, reasons


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize(("kind", "size"), [(byte_level, 300), (unigram, 60)])
def test_a_text_goes_on_behind_its_prompt_up_to_its_stop_string(kind, size, drafts) -> None:
    tokens = kind([TEXT], size)
    ids = [*tokens.encode(TEXT), 1]
    engine = engine_for(tokens, ids, speculative_tokens=drafts)
    stops = {"whole": (), "stop": (" did",), "early": ("at", "zz"), "late": ("there 🙂 at all!",)}
    cut = len(tokens.encode("the cat sat"))
    for name, stop in stops.items():
        params = SamplingParams(temperature=0, stop=stop)
        engine.add(Request(name, tuple(ids[:cut]), params))
    params = SamplingParams(temperature=0, stop=("at",), min_tokens=len(ids) - cut - 1)
    engine.add(Request("min_tokens", tuple(ids[:cut]), params))
    texts, reasons = run(engine)
    rest = TEXT.removeprefix("the cat sat")
    assert texts == {
        "whole": rest,
        "stop": " on the mat, and the dog",
        "early": " on the m",
        "late": rest,
        "min_tokens": rest,
    }
    assert set(reasons.values()) == {"stop"}


def test_grammars_run_beside_requests_without_one() -> None:
    tokens = byte_level([TEXT, json.dumps(SCHEMA)], 300)
    engine = engine_for(tokens, speculative_tokens=2)
    schema, expression = json.dumps(SCHEMA), "(no|yes), (é|🙂){2,4}"
    wanted = {"schema": {"json_schema": schema}, "regex": {"regex": expression}, "free": {}}
    for seed in range(4):
        for name, settings in wanted.items():
            params = SamplingParams(seed=seed, max_tokens=90, ignore_eos=name == "free", **settings)
            engine.add(Request(f"{name} {seed}", (5, 6), params))
    with pytest.raises(ConfigError, match="Invalid type"):
        engine.add(Request("wrong", (5,), SamplingParams(json_schema='{"type": "text"}')))
    outputs: dict[str, list[int]] = {}
    reasons = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason:
                reasons[output.request_id] = output.finish_reason
    for seed in range(4):
        jsonschema.validate(json.loads(tokens.decode(outputs[f"schema {seed}"])), SCHEMA)
        assert re.fullmatch(expression, tokens.decode(outputs[f"regex {seed}"]))
        assert len(outputs[f"free {seed}"]) == 90
    assert {name.split()[0]: reason for name, reason in reasons.items()} == {
        "schema": "stop",
        "regex": "stop",
        "free": "length",
    }
    assert engine.stats().blocks.used == 0
