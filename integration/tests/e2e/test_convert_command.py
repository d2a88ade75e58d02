"""`pcomm convert`: a run as a Hugging Face directory, and a directory as a run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from integration_support.huggingface_directories import write_directory, write_tokenizer
from pcomm.core.cli import main
from pcomm.integration.checkpoint.folders import newest
from pcomm.integration.commands import conversion
from pcomm.integration.llm import load_model
from pcomm.integration.models.language_model import LanguageModel
from pcomm.integration.parallelize import plan_sequences

transformers = pytest.importorskip("transformers", reason="transformers reads what is written")


@pytest.fixture(scope="module")
def run(train: Callable[..., int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps."""
    out = tmp_path_factory.mktemp("convert") / "run"
    overrides = ["train.steps=2", "train.eval_every=end", "sample.prompt=''"]
    assert train(out, *(word for item in overrides for word in ("--set", item))) == 0
    return out


@pytest.mark.parametrize(("option", "dtype"), [(None, "F32"), ("bf16", "BF16"), ("fp16", "F16")])
def test_transformers_loads_what_a_run_becomes(option, dtype, run, tmp_path, capsys):
    out = tmp_path / "out"
    words = [] if option is None else ["--dtype", option]
    assert main(["convert", str(run), "--out", str(out), *words]) == 0
    first, *files, last = capsys.readouterr().out.splitlines()
    assert first == f"{out}  a llama model, which transformers loads:"
    written = {file.name: f"{file.stat().st_size:,}" for file in out.iterdir()}
    assert {name: size for name, size, _ in map(str.split, files)} == written
    assert last == f"pcomm serve {out}  serves it"
    with safe_open(out / "model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {dtype}  # noqa: SIM118
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(out)
    loaded = load_model(run)
    text = "word1 word2 wörd"
    ids = tokenizer(text)["input_ids"]
    assert ids == loaded.tokenizer.encode(text)
    assert theirs.generation_config.eos_token_id == loaded.tokenizer.eos_ids[0]
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0]
        logits = loaded.model(torch.tensor(ids), plan_sequences(loaded.model, (0, len(ids))))
    # A weight of 16 bits is off by up to 2^-8 of itself; the logits of this model are below 1.
    tolerance = 1e-5 if option is None else 3e-2
    torch.testing.assert_close(logits, expected, rtol=0, atol=tolerance)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("theirs")
    write_directory(folder, "llama", num_hidden_layers=2)
    write_tokenizer(folder, ["word1 word2 word3"])
    return folder


def test_a_directory_becomes_a_run_that_writes_text(directory, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(["convert", str(directory), "--out", str(run)]) == 0
    assert "a run with the weights of a llama model" in capsys.readouterr().out
    checkpoint = newest(run)
    assert checkpoint is not None
    assert checkpoint.step == 0
    words = ["--prompt", "word1", "--max-tokens", "8", "--temperature", "0", "--json"]
    assert main(["generate", str(run), *words]) == 0
    written = json.loads(capsys.readouterr().out)["token_ids"]
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(directory)
    ids = transformers.PreTrainedTokenizerFast.from_pretrained(directory)("word1")["input_ids"]
    continued = theirs.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)
    expected = continued[0, len(ids) :].tolist()
    assert written == expected
    # And back, with the tokenizer and the template that it had.
    assert main(["convert", str(run), "--out", str(tmp_path / "back")]) == 0
    for name in ("tokenizer.json", "chat_template.jinja", "tokenizer_config.json"):
        assert (tmp_path / "back" / name).read_text() == (directory / name).read_text()


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """What the command says when it does not do what it was asked."""
    assert main(["convert", *map(str, words)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err
    return printed.err


def test_what_cannot_be_converted(run, directory, tmp_path, capsys):
    out = tmp_path / "out"
    assert "neither a checkpoint" in refused(capsys, tmp_path, "--out", out)
    assert "no such folder" in refused(capsys, tmp_path / "absent", "--out", out)
    assert "keeps its weights in fp32" in refused(
        capsys, directory, "--out", out, "--dtype", "bf16"
    )
    assert "for the weights of a run" in refused(
        capsys, directory, "--out", out, "--allow-not-finite"
    )
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert "something in it" in refused(capsys, run, "--out", tmp_path / "full")
    (tmp_path / "file").touch()
    assert "a file" in refused(capsys, run, "--out", tmp_path / "file")
    assert not out.exists()
    assert not list(tmp_path.glob("*.partial"))
    before = sorted(directory.rglob("*"))
    assert "a folder with config.json" in refused(capsys, directory, "--out", directory)
    assert sorted(directory.rglob("*")) == before
    # As earlier versions have made one of it.
    both = shutil.copytree(directory, tmp_path / "both")
    for name in ("config.toml", "checkpoints"):
        (both / name).symlink_to(run / name)
    assert "checkpoints of a run, and config.json" in refused(capsys, both, "--out", out)
    assert main(["generate", str(both)]) == 2
    assert "checkpoints of a run, and config.json" in capsys.readouterr().err


@pytest.mark.parametrize("number", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_by_name_or_written_when_asked_for(
    number, run, tmp_path, capsys, monkeypatch
):
    read = conversion._model_of

    def diverged(*given: Any) -> LanguageModel:
        model = read(*given)
        with torch.no_grad():
            next(p for name, p in model.named_parameters() if "norm" in name)[3] = number
        return model

    monkeypatch.setattr(conversion, "_model_of", diverged)
    out = tmp_path / "out"
    said = refused(capsys, run, "--out", out)
    assert "model.layers.0.input_layernorm.weight" in said
    assert "1 of 32 numbers are NaN or infinite" in said
    assert not list(tmp_path.iterdir())
    assert main(["convert", str(run), "--out", str(out), "--allow-not-finite"]) == 0
    with safe_open(out / "model.safetensors", "pt") as file:
        written = file.get_tensor("model.layers.0.input_layernorm.weight")
    assert written.isfinite().tolist() == [place != 3 for place in range(32)]


def test_a_model_of_no_family_is_refused(train, tmp_path, capsys):
    words = ["model.pattern=G", "train.steps=1", "train.eval_every=end", "sample.prompt=''"]
    assert train(tmp_path / "run", *(w for item in words for w in ("--set", item))) == 0
    capsys.readouterr()
    said = refused(capsys, tmp_path / "run", "--out", tmp_path / "out")
    assert "model.norm_zero_centred" in said
    assert "qwen3_next" in said
    assert not (tmp_path / "out").exists()
