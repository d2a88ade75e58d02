"""Log-probabilities of prompts over HTTP, beside the model's own forward in transformers.

This is what lm-evaluation-harness asks a server for: `echo` and `logprobs`, prompts of token ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from core_support.tiny_transformers import tiny_config, tiny_model
from integration_support.huggingface_directories import (
    rescale,
    write_directory,
    write_tokenizer,
)
from pcomm.integration.llm import LLM

transformers = pytest.importorskip("transformers", reason="transformers has the models")
httpx = pytest.importorskip("httpx2")
pytest.importorskip("uvicorn")

from integration_support.live_server import LiveServer  # noqa: E402

TEXT = "one two three four"
# A block of the cache is 16 tokens, and a step of this engine reads 8.
LENGTHS = [2, 3, 15, 16, 17, 40]


class Echo:
    """A server and the model of transformers that it serves."""

    def __init__(self, model: Any, llm: LLM, server: LiveServer) -> None:
        self.model, self.llm, self._url = model, llm, f"{server.url}/v1/completions"

    def post(self, **fields: Any) -> Any:
        body = {"model": "tiny", "echo": True, "temperature": 0, **fields}
        return httpx.post(self._url, json=body, timeout=600)

    def choices(self, **fields: Any) -> list[dict[str, Any]]:
        answer = self.post(**fields)
        assert answer.status_code == 200, answer.text
        found: list[dict[str, Any]] = answer.json()["choices"]
        return found

    @torch.inference_mode()
    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """Log-probabilities of all tokens behind each token: `[T, V]`."""
        found: torch.Tensor = self.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        return found

    def check(self, entry: dict[str, Any], ids: list[int], top: int) -> None:
        """Compare the entries of all tokens; the first one has none."""
        expected = self.logprobs(ids)
        assert entry["token_logprobs"][0] is entry["top_logprobs"][0] is None
        assert {len(entry[name]) for name in entry} == {len(ids)}
        for place, (token, value, likeliest) in enumerate(
            zip(ids[1:], entry["token_logprobs"][1:], entry["top_logprobs"][1:], strict=True)
        ):
            assert value == pytest.approx(float(expected[place, token]), abs=1e-4)
            best = expected[place].topk(top).values.tolist()
            # Tokens of one text, such as parts of characters, have one entry.
            assert max(likeliest.values(), default=None) == (
                pytest.approx(best[0], abs=1e-4) if top else None
            )
            # What makes lm-eval's `is_greedy`: the likeliest token has the very same number.
            if top:
                is_greedy = value == max(likeliest.values())
                assert is_greedy == (token == int(expected[place].argmax()))


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def echo(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Echo]:
    """A family of pcomm's own, and one that runs by transformers."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "llama":
        model: Any = write_directory(folder, "llama")
    else:
        config = tiny_config("gpt2", vocab_size=300)
        model = tiny_model(transformers.GPT2LMHeadModel, config).eval()
        rescale(model)
        model.save_pretrained(folder)
    write_tokenizer(folder, ["one two three four five six seven"] * 3)
    with (
        LLM(folder, memory_bytes=2**22, max_batch_tokens=8) as llm,
        LiveServer(llm) as server,
    ):
        yield Echo(model, llm, server)


def test_each_prompt_of_a_batch_has_the_log_probabilities_of_the_models_forward(echo):
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 300, (n,), generator=generator).tolist() for n in LENGTHS]
    # The same ones again: what a prefix cache has of them is no reason to leave one out.
    for max_tokens in (1, 0, 1):
        choices = echo.choices(prompt=prompts, max_tokens=max_tokens, logprobs=1)
        assert [choice["index"] for choice in choices] == list(range(len(prompts)))
        for choice, ids in zip(choices, prompts, strict=True):
            written = echo.logprobs(ids)[-1].argmax().item()
            echo.check(choice["logprobs"], [*ids, written] if max_tokens else ids, 1)
            assert choice["text"].startswith(echo.llm.loaded.tokenizer.decode(ids))
            assert choice["finish_reason"] in ("length", "stop")


@pytest.mark.parametrize("logprobs", [0, 5])
def test_a_text_is_echoed_as_it_was_sent(echo, logprobs):
    ids = echo.llm.loaded.prompt_ids(TEXT)
    plain = echo.choices(prompt=TEXT, max_tokens=6, echo=False)[0]["text"]
    for n in (1, 2):
        answer = echo.post(prompt=TEXT, max_tokens=6, logprobs=logprobs, n=n).json()
        assert answer["usage"]["prompt_tokens"] == len(ids)
        for choice in answer["choices"]:
            assert choice["text"] == TEXT + plain
            entry = choice["logprobs"]
            written = len(entry["tokens"]) - len(ids)
            assert answer["usage"]["completion_tokens"] == n * written
            for name in ("token_logprobs", "top_logprobs", "text_offset"):
                entry[name] = entry[name][: len(ids)]
            entry["tokens"] = entry["tokens"][: len(ids)]
            echo.check(entry, ids, logprobs)
            # The tokens stand at their offsets; what opens the text is no part of it.
            pairs = list(zip(entry["text_offset"], entry["tokens"], strict=True))
            assert all(TEXT.startswith(text, at) for at, text in pairs if text != "<s>")
    assert echo.choices(prompt=TEXT, max_tokens=6)[0]["logprobs"] is None


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_a_stream_begins_with_the_prompt(echo, max_tokens):
    fields = {"prompt": [TEXT, "five"], "max_tokens": max_tokens, "logprobs": 2}
    whole = echo.choices(**fields)
    more = {"stream": True, "stream_options": {"include_usage": True}}
    lines = [line for line in echo.post(**fields, **more).text.splitlines() if line]
    *parts, done = [line.removeprefix("data: ") for line in lines]
    assert done == "[DONE]"
    *chunks, last = map(json.loads, parts)
    for expected in whole:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == expected["index"]]
        assert "".join(part["text"] for part in mine) == expected["text"]
        for name, values in expected["logprobs"].items():
            found = [value for part in mine for value in part["logprobs"][name]]
            assert found == values
        assert mine[-1]["finish_reason"] == expected["finish_reason"]
    written = sum(len(one["logprobs"]["tokens"]) for one in whole) - last["usage"]["prompt_tokens"]
    assert last["usage"]["completion_tokens"] == written
    assert (written == 0) == (max_tokens == 0)


def test_nothing_to_write_and_nothing_to_echo_is_no_request(echo):
    answer = echo.post(prompt=TEXT, max_tokens=0, echo=False)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("max_tokens", "invalid_value")
    one = echo.choices(prompt=[5], max_tokens=0, logprobs=3)[0]
    assert (one["finish_reason"], one["logprobs"]["token_logprobs"]) == ("length", [None])
