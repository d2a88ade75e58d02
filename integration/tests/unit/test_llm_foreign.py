"""Models of transformers that no family of pcomm has, in `LLM`: of a directory, and in memory."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from core_support.tiny_transformers import tiny_config, tiny_model
from integration_support.huggingface_directories import (
    rescale,
    write_directory,
    write_tokenizer,
)
from pcomm.core.cli import main
from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.inference import SamplingParams
from pcomm.integration.llm import LLM, load_model

transformers = pytest.importorskip("transformers", reason="transformers has the models")

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
# The second one is longer than the windows of tiny models.
TEXTS = ["one two", "three four five six seven " * 10, "one"]
MEMORY = 2**22


def made(kind: str, **fields: Any) -> Any:
    """A small model of any architecture, in which each part matters."""
    config = tiny_config(kind, vocab_size=300, **fields)
    cls = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model = tiny_model(cls, config)
    rescale(model)
    # So that `generate` ends no text either.
    model.generation_config.eos_token_id = None
    return model


def saved(folder: Path, kind: str, **fields: Any) -> tuple[Any, Any]:
    """A model and its tokenizer, both of them in a directory as well."""
    model = made(kind, **fields)
    model.save_pretrained(folder)
    write_tokenizer(folder, ["one two three four five six seven"] * 3)
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def theirs(model: Any, prompt: tuple[int, ...]) -> list[int]:
    ids = torch.tensor([prompt])
    settings = {"max_new_tokens": GREEDY.max_tokens, "do_sample": False, "pad_token_id": 0}
    found = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    return found[0, len(prompt) :].tolist()


def check_texts(llm: LLM, model: Any) -> None:
    texts = llm.generate(TEXTS, GREEDY)
    assert len({text.token_ids for text in texts}) == len(TEXTS)
    assert max(len(text.prompt_ids) for text in texts) > 24
    for text in texts:
        assert list(text.token_ids) == theirs(model, text.prompt_ids)


# Each with another mechanism: a fused product, another order of norms, windows and a softcap,
# scaled residuals, learned positions, sinks, compressed keys, a hybrid.
KINDS = ["phi3", "olmo2", "gemma2", "granite", "gpt2", "gpt_oss", "deepseek_v3", "falcon_h1"]


# With its embedding as the head a Gemma repeats its last token.
FIELDS = {"gemma2": {"tie_word_embeddings": False}}


@pytest.mark.parametrize("kind", KINDS)
def test_a_directory_of_any_family_writes_what_generate_writes(kind, tmp_path, caplog):
    model, tokenizer = saved(tmp_path, kind, **FIELDS.get(kind, {}))
    caplog.set_level(logging.INFO, "pcomm.llm")
    with LLM(tmp_path, memory_bytes=MEMORY) as llm:
        assert (llm.implementation, llm.path) == ("transformers", tmp_path)
        assert f"{type(model).__name__}: the value {kind!r}" in caplog.text
        assert llm.max_model_len == model.config.max_position_embeddings
        assert llm.loaded.prompt_ids("one two") == tokenizer("one two").input_ids
        check_texts(llm, model)


@pytest.mark.parametrize("kind", ["llama", "mamba2"])
def test_a_family_of_pcomm_is_its_own_from_a_directory_and_transformers_in_memory(kind, tmp_path):
    model, tokenizer = saved(tmp_path, kind)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.train()
    former = model.config._attn_implementation
    with (
        LLM(tmp_path, memory_bytes=MEMORY) as there,
        LLM(model=model, tokenizer=tokenizer, memory_bytes=MEMORY) as here,
    ):
        assert (there.implementation, here.implementation) == ("pcomm", "transformers")
        assert here.path is None
        for llm in (there, here):
            assert not model.training
            check_texts(llm, model)
        messages = [{"role": "user", "content": "one two"}]
        chats = [llm.chat_prompt(messages)[0] for llm in (there, here)]
        assert (
            chats[0]
            == chats[1]
            == tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
        )
        assert there.loaded.tokenizer.eos_ids == (2,), "of the directory's configuration"
    assert model.training
    assert model.config._attn_implementation == former
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    # Its weights are those of the caller, and may change between two of them.
    with torch.no_grad():
        model.get_output_embeddings().weight.neg_()
    with LLM(model=model, tokenizer=tokenizer, memory_bytes=MEMORY) as again:
        check_texts(again, model)


def test_a_server_says_what_computes(phi3):
    httpx = pytest.importorskip("httpx2")
    pytest.importorskip("uvicorn")
    from integration_support.live_server import LiveServer

    with LLM(phi3, memory_bytes=MEMORY) as llm, LiveServer(llm) as server:
        health = {"status": "ok", "implementation": "transformers"}
        assert httpx.get(f"{server.url}/health").json() == health
        fields = {"model": "tiny", "prompt": "one two", "max_tokens": 4}
        answer = httpx.post(f"{server.url}/v1/completions", json=fields)
        assert answer.json()["usage"]["completion_tokens"] == 4, answer.text


def test_two_models_in_one_process_do_not_meet(tmp_path):
    pairs = [saved(tmp_path / kind, kind) for kind in ("phi3", "gpt2") if _room(tmp_path / kind)]
    llms = [LLM(model=model, tokenizer=one, memory_bytes=MEMORY) for model, one in pairs]
    streams = [llm.stream("one two", GREEDY) for llm in llms]
    found: list[list[int]] = [[], []]
    for _ in range(4):
        for place, stream in enumerate(streams):
            found[place] += next(stream).token_ids
    prompt = tuple(llms[0].loaded.prompt_ids("one two"))
    for tokens, (model, _) in zip(found, pairs, strict=True):
        assert tokens == theirs(model, prompt)[:4]
    for llm in llms:
        llm.close()
        llm.close()


def _room(folder: Path) -> bool:
    folder.mkdir()
    return True


def test_a_model_in_bf16_keeps_its_dtype(tmp_path):
    model, tokenizer = saved(tmp_path, "phi3")
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    with (
        LLM(tmp_path, memory_bytes=MEMORY) as there,
        LLM(model=model, tokenizer=tokenizer, memory_bytes=MEMORY) as here,
    ):
        for llm in (there, here):
            assert {spec.dtype for spec in llm.loaded.model.memory_specs()} == {torch.bfloat16}
        texts = [llm.generate("one two", GREEDY)[0] for llm in (there, here)]
        assert texts[0].token_ids == texts[1].token_ids
    with LLM(tmp_path, dtype="float32", memory_bytes=MEMORY) as wide:
        assert wide.loaded.model.model.dtype == torch.float32
        check_texts(wide, model.float())


def config(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


REFUSED: dict[str, tuple[Callable[[Path], Any], dict[str, Any], tuple[str, ...]]] = {
    "unknown": (lambda f: config(f, model_type="phi99"), {}, ("'phi99'", "Neither pcomm")),
    "remote code": (
        lambda f: config(f, model_type="own", auto_map={"AutoModelForCausalLM": "own.Own"}),
        {},
        ("own.Own", "remote code", "never run"),
    ),
    "another head": (
        lambda f: config(f, architectures=["Phi3ForSequenceClassification"]),
        {},
        ("Phi3ForSequenceClassification", "Phi3ForCausalLM"),
    ),
    "no causal model": (
        lambda f: config(f, model_type="vit", architectures=None),
        {},
        ("no causal language model",),
    ),
    "a damaged field": (
        lambda f: config(f, num_hidden_layers="many"),
        {},
        ("config.json", "num_hidden_layers"),
    ),
    "more layers than weights": (
        lambda f: config(f, num_hidden_layers=3),
        {},
        ("no tensor", "layers.2", "random"),
    ),
    "pickles": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        {},
        ("pickles",),
    ),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), {}, ("no tokenizer.json",)),
    "ranks": (lambda f: None, {"ranks": 2}, ("2 ranks", "runs by transformers", "not cut")),
    "int8": (lambda f: None, {"quantization": "int8"}, ("quantization='int8'", "transformers")),
    "invariant": (lambda f: None, {"batch_invariant": True}, ("batch_invariant=True",)),
    "memory": (lambda f: None, {"memory_bytes": 10}, ("10 bytes", "memory_bytes")),
}


@pytest.fixture(scope="module")
def phi3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("phi3")
    saved(folder, "phi3")
    return folder


@pytest.mark.parametrize("name", REFUSED)
def test_a_directory_that_cannot_run_is_refused_by_name(name, phi3, tmp_path):
    for file in phi3.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    spoil, arguments, parts = REFUSED[name]
    (tmp_path / "own.py").write_text("raise SystemExit(3)")
    spoil(tmp_path)
    with pytest.raises((ConfigError, UnsupportedError)) as raised:
        LLM(tmp_path, **{"memory_bytes": MEMORY, **arguments})
    for part in parts:
        assert part in str(raised.value)
    assert raised.value.why
    assert raised.value.fix


def test_gguf_is_refused_by_name(tmp_path, capsys):
    """A file, a folder of it alone, and one with a configuration; wherever a model is given."""
    pytest.importorskip("uvicorn")
    alone, described = tmp_path / "alone", tmp_path / "described"
    for folder in (alone, described):
        folder.mkdir()
        (folder / "model.gguf").write_bytes(b"GGUF")
    (described / "config.json").write_text('{"model_type": "llama"}')
    for path in (alone / "model.gguf", alone, described):
        with pytest.raises(ConfigError, match="a GGUF file"):
            LLM(path)
        for command in (["serve", path, "--port", "0"], ["convert", path, "--out", tmp_path / "o"]):
            assert main([*map(str, command)]) == 2
            said = capsys.readouterr().err
            assert f"model {path}: a GGUF file" in said
            assert "gguf_file='model.gguf'" in said


def test_arguments_of_a_model_in_memory(phi3):
    model = made("phi3")
    tokenizer = transformers.AutoTokenizer.from_pretrained(phi3)
    both = {"model": model, "tokenizer": tokenizer, "memory_bytes": MEMORY}
    former = model.config._attn_implementation
    for arguments, part in (
        ({}, "none of them"),
        ({"tokenizer": tokenizer}, "tokenizer"),
        ({"path": phi3, **both}, "path and model"),
        ({"model": model}, "None"),
        ({**both, "tokenizer": "gpt2"}, "a str"),
        ({**both, "tokenizer": tokenizer.backend_tokenizer}, "tokenizer_object"),
        ({"model": str(phi3)}, f"Write LLM({str(phi3)!r})"),
        ({**both, "model": torch.nn.Linear(2, 2)}, "no model of transformers"),
        ({**both, "dtype": "bfloat16"}, "stays as it is"),
        ({**both, "ranks": 2}, "2 ranks"),
        ({**both, "quantization": "int8"}, "int8"),
        ({**both, "memory_bytes": 10}, "10 bytes"),
    ):
        model.train()
        with pytest.raises((ConfigError, UnsupportedError)) as raised:
            LLM(**arguments)
        assert part in str(raised.value)
        assert model.training
        assert model.config._attn_implementation == former


def test_a_field_that_pcomm_does_not_know_leaves_a_family_to_transformers(tmp_path):
    model = write_directory(tmp_path, "llama", mlp_bias=True)
    write_tokenizer(tmp_path, ["one two three four five six seven"] * 3)
    model.generation_config.eos_token_id = None
    with pytest.raises(UnsupportedError, match="mlp_bias"):
        load_model(tmp_path)
    with LLM(tmp_path, memory_bytes=MEMORY) as llm:
        assert llm.implementation == "transformers"
        check_texts(llm, model)


def test_pcomm_generate_writes_with_it(phi3, capsys):
    words = ["--prompt", "one two", "--max-tokens", "6", "--temperature", "0", "--memory-mib", "4"]
    assert main(["generate", str(phi3), *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    with LLM(phi3, memory_bytes=MEMORY) as llm:
        (text,) = llm.generate("one two", SamplingParams(temperature=0, max_tokens=6))
        assert llm.loaded.num_parameters == made("phi3").num_parameters()
    assert found["token_ids"] == list(text.token_ids)
    assert main(["generate", str(phi3), *words, "--ranks", "2"]) == 2
    assert "2 ranks" in capsys.readouterr().err
