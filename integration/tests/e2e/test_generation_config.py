"""`generation_config.json` as defaults: texts of transformers' `generate`, which reads it too."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from integration_support.huggingface_directories import write_directory, write_tokenizer
from pcomm.core.cli import main
from pcomm.core.errors import ConfigError
from pcomm.inference import SamplingParams
from pcomm.integration.llm import LLM

transformers = pytest.importorskip("transformers", reason="transformers reads the same file")

TEXT = "one two three"
MEMORY = 2**22
# Draws from one token alone, so that two generators of random numbers draw alike.
DRAWN = {"do_sample": True, "temperature": 0.7, "top_k": 1, "repetition_penalty": 1.5}
FILES: dict[str, dict[str, Any]] = {
    "the likeliest of k": {**DRAWN, "max_new_tokens": 9},
    "min_p": {"do_sample": True, "min_p": 1.0, "top_k": 0, "max_new_tokens": 7},
    "greedy": {"do_sample": False, "repetition_penalty": 1.3, "max_new_tokens": 5},
    "an end that waits": {**DRAWN, "max_new_tokens": 9, "min_new_tokens": 9},
    "a temperature that is nearly 0": {"do_sample": True, "temperature": 1e-6, "top_p": 0.9},
}


def directory(folder: Path, content: dict[str, Any]) -> Path:
    write_directory(folder, "llama")
    write_tokenizer(folder, ["one two three four five six seven"] * 3)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, **content}))
    return folder


def theirs(folder: Path, **given: Any) -> list[int]:
    """What `generate` writes by the file alone, and by what it is given."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    settings = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "tokenizer": tokenizer}
    found = model.generate(ids, **settings, **given)
    tokens: list[int] = found[0, ids.shape[1] :].tolist()
    return tokens


@pytest.mark.parametrize("name", FILES)
def test_texts_without_settings_are_those_of_generate_with_the_same_file(name, tmp_path, capsys):
    folder = directory(tmp_path, FILES[name])
    expected = theirs(folder, **({} if "max_new_tokens" in FILES[name] else {"max_new_tokens": 16}))
    with LLM(folder, memory_bytes=MEMORY) as llm:
        (text,) = llm.generate(TEXT)
        assert list(text.token_ids)[: len(expected)] == expected
        if "max_new_tokens" in FILES[name]:
            assert list(text.token_ids) == expected
        else:
            assert llm.get_default_sampling_params().max_tokens == SamplingParams().max_tokens
        parts = [part for delta in llm.stream(TEXT) for part in delta.token_ids]
        assert parts == list(text.token_ids)
    assert main(["generate", str(folder), "--prompt", TEXT, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"][: len(expected)] == expected


def test_what_is_asked_for_wins_and_none_takes_nothing(tmp_path, capsys):
    folder = directory(tmp_path, {**FILES["the likeliest of k"], "stop_strings": "zzz"})
    plain = theirs(folder, do_sample=False, max_new_tokens=12, repetition_penalty=1.0)
    assert plain[:9] != theirs(folder)
    with LLM(folder, memory_bytes=MEMORY) as llm:
        ours = SamplingParams(temperature=0, max_tokens=12)
        assert list(llm.generate(TEXT, ours)[0].token_ids) == plain
        assert llm.get_default_sampling_params().stop == ("zzz",)
        message = {"role": "user", "content": TEXT}
        assert llm.chat_prompt([message])[1].repetition_penalty == 1.5
    with LLM(folder, memory_bytes=MEMORY, generation_config="none") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
        # The ids that end a text are of the model, not of how it is drawn.
        assert llm.loaded.tokenizer.eos_ids == (2,)
    options = ["--temperature", "0", "--max-tokens", "12", "--json"]
    for more in ([], ["--generation-config", "none"]):
        assert main(["generate", str(folder), "--prompt", TEXT, *options, *more]) == 0
        tokens = json.loads(capsys.readouterr().out)["token_ids"]
        assert (tokens == plain) == bool(more), "the penalty of the file is left"
    with pytest.raises(ConfigError, match="vllm"):
        LLM(folder, generation_config="vllm")


def test_a_server_has_the_defaults_where_a_request_has_no_field(tmp_path):
    httpx = pytest.importorskip("httpx2")
    pytest.importorskip("uvicorn")
    from integration_support.live_server import LiveServer

    folder = directory(tmp_path, FILES["the likeliest of k"])
    expected = theirs(folder)
    plain = theirs(folder, max_new_tokens=4, do_sample=False, repetition_penalty=1.0)
    with LLM(folder, memory_bytes=MEMORY) as llm, LiveServer(llm) as server:

        def text(path: str, **fields: Any) -> tuple[str, int]:
            body = {"model": "tiny", **fields}
            answer = httpx.post(f"{server.url}/v1/{path}", json=body).json()
            assert "choices" in answer, answer
            (choice,) = answer["choices"]
            written = choice["text"] if "text" in choice else choice["message"]["content"]
            return written, answer["usage"]["completion_tokens"]

        decode = llm.loaded.tokenizer.decode
        assert text("completions", prompt=TEXT) == (decode(expected), 9)
        own = {"max_tokens": 4, "repetition_penalty": 1.0}
        assert text("completions", prompt=TEXT, **own) == (decode(plain), len(plain))
        chat = {"messages": [{"role": "user", "content": TEXT}]}
        first = text("chat/completions", **chat)
        assert first[1] <= 9
        assert text("chat/completions", **chat) == first
        (card,) = httpx.get(f"{server.url}/v1/models").json()["data"]
        wanted = {"temperature": 0.7, "top_k": 1, "repetition_penalty": 1.5, "max_tokens": 9}
        assert card["default_sampling_params"] == wanted


def test_what_has_no_effect_is_named_once_and_what_changes_nothing_is_not(tmp_path, caplog):
    quiet = {"num_beams": 1, "typical_p": 1.0, "use_cache": True, "bad_words_ids": None}
    caplog.set_level(logging.WARNING, "pcomm.llm")
    with LLM(directory(tmp_path, quiet), memory_bytes=MEMORY):
        assert not caplog.records
    odd = {**quiet, "num_beams": 4, "max_length": 99, "suppress_tokens": [3], "own": "x"}
    with LLM(directory(tmp_path, odd), memory_bytes=MEMORY) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
    (record,) = caplog.records
    assert "max_length, num_beams, own, suppress_tokens: pcomm does not" in record.getMessage()


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k", "max_new_tokens"])
def test_a_value_that_cannot_be_is_said_with_the_file(name, tmp_path):
    folder = directory(tmp_path, {name: "hot"})
    with pytest.raises(ConfigError, match=r"generation_config\.json") as raised:
        LLM(folder)
    assert "'hot'" in raised.value.found
    assert "--generation-config none" in raised.value.fix


def test_a_model_in_memory_brings_its_own(tmp_path):
    folder = directory(tmp_path, FILES["the likeliest of k"])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with LLM(model=model, tokenizer=tokenizer, memory_bytes=MEMORY) as llm:
        assert list(llm.generate(TEXT)[0].token_ids) == theirs(folder)
