"""`pcomm generate`: the text of a run."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from integration_support.huggingface_directories import write_directory
from pcomm.core.cli import main
from pcomm.core.testing.programs import PATIENCE_S, scaled_s
from pcomm.inference import SamplingParams
from pcomm.integration.llm import LLM
from pcomm.integration.llm.loading import load_text


@pytest.fixture(scope="module")
def run(train: Callable[..., int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learnt enough to end a document now and then."""
    out = tmp_path_factory.mktemp("generate") / "run"
    overrides = [
        "train.steps=40",
        "train.eval_every=end",
        "checkpoint.every=end",
        "sample.prompt=''",
    ]
    assert train(out, *(word for item in overrides for word in ("--set", item))) == 0
    return out


def test_the_installed_command_prints_one_json_object(run, start):
    words = ["--prompt", "word1", "--max-tokens", 5, "--temperature", 0.5, "--seed", 3, "--json"]
    process = start("pcomm", "generate", run, *words)
    printed, logged = process.communicate(timeout=scaled_s(PATIENCE_S))
    assert (process.returncode, logged) == (0, "")
    text = json.loads(printed)
    speed = text.pop("speed")
    assert text.keys() == {"prompt", "text", "num_tokens", "finish_reason", "token_ids"}
    assert speed.keys() == {"seconds", "decode", "host_us"}
    assert speed["host_us"].keys() == {"schedule", "batch", "model", "sample", "outputs"}
    decode = speed["decode"]
    # The first token comes with the prompt.
    assert (decode["steps"], decode["num_requests"]) == (text["num_tokens"] - 1, 1)
    floor_ms = 1e3 * decode["moved"]["total"] / max(decode["bandwidth"].values())
    assert decode["floor_ms"] == pytest.approx(floor_ms)
    assert decode["ratio"] == pytest.approx(floor_ms / decode["step_ms"])
    assert text["prompt"] == "word1"
    params = SamplingParams(max_tokens=5, temperature=0.5, seed=3)
    with LLM(run) as llm:
        (written,) = llm.generate("word1", params)
    assert (text["text"], text["token_ids"]) == (written.text, list(written.token_ids))


def generate(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["generate", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_a_seed_decides_the_text_and_temperature_0_or_one_token_leaves_nothing_to_chance(
    run, capsys
):
    words = [run, "--prompt", "word", "--max-tokens", 30]
    texts = [generate(capsys, *words, "--seed", seed) for seed in (0, 1, 2, 0)]
    assert texts[0] == texts[3]
    assert len(set(texts)) == 3
    assert all(text.startswith("word") for text in texts)
    greedy = generate(capsys, *words, "--temperature", 0)
    assert len(greedy) > len("word")
    for option in (["--temperature", 0], ["--top-k", 1], ["--top-p", 1e-9]):
        assert generate(capsys, *words, "--temperature", 5, "--seed", 4, *option) == greedy
    # Without a prompt it writes all the same.
    text = json.loads(generate(capsys, run, "--max-tokens", 20, "--seed", 1, "--json"))
    assert text["prompt"] == ""
    assert "word" in text["text"]


def test_the_text_ends_at_the_end_of_the_document_or_at_the_limit(run):
    settings = [SamplingParams(max_tokens=40, seed=seed) for seed in range(12)]
    with LLM(run) as llm:
        texts = llm.generate(["word1 word2"] * len(settings), settings)
        tokenizer = llm.loaded.tokenizer
    assert {text.finish_reason for text in texts} == {"stop", "length"}
    for text in texts:
        assert "<|end|>" not in text.text
        if text.finish_reason == "length":
            assert len(text.token_ids) == 40
        else:
            assert 1 <= len(text.token_ids) <= 40
            assert len(tokenizer.encode(text.text)) <= len(text.token_ids) - 1


def test_token_ids_are_a_prompt_like_the_text_they_stand_for(run, capsys):
    settings = ["--max-tokens", 12, "--temperature", 0, "--json"]
    from_text = json.loads(generate(capsys, run, "--prompt", "word1 word2", *settings))
    del from_text["speed"]
    tokenizer = load_text(run).tokenizer
    ids = ",".join(map(str, tokenizer.encode("word1 word2")))
    from_ids = json.loads(generate(capsys, run, "--prompt-ids", ids, *settings))
    del from_ids["speed"]
    assert from_ids == from_text
    assert from_text["num_tokens"] == len(from_text["token_ids"]) <= 12
    assert tokenizer.decode(from_text["token_ids"]) == from_text["text"]


def test_a_stop_string_ends_what_is_shown_before_it(run, capsys):
    words = [run, "--prompt", "word1", "--max-tokens", 40, "--temperature", 0]
    whole = generate(capsys, *words).removeprefix("word1").removesuffix("\n")
    stop = whole[7:10]
    shown = generate(capsys, *words, "--stop", "\0", "--stop", stop)
    assert shown == "word1" + whole[: whole.index(stop)] + "\n"


def test_text_is_shown_while_it_is_written(run, monkeypatch):
    """What a reader has seen after each token is all of the text that is certain by then."""
    shown: list[object] = []
    monkeypatch.setattr("builtins.print", lambda text="", **_: shown.append(text))
    words = ["--prompt", "word1", "--max-tokens", "9", "--temperature", "0"]
    assert main(["generate", str(run), *words]) == 0
    prompt, *parts, newline, summary = shown
    assert (prompt, newline) == ("word1", "")
    assert re.fullmatch(r"9 tokens, [\d.]+ tokens/s", str(summary))
    assert len(parts) == 9
    assert all(parts)


def test_two_ranks_write_what_one_does(run, capfd):
    settings = "--prompt word1 --max-tokens 20 --temperature 0.5"
    words = ["generate", str(run), *settings.split()]
    assert main(words) == 0
    alone, alone_said = capfd.readouterr()
    assert re.fullmatch(r"\d+ tokens?, [\d.]+ tokens/s\n", alone_said)
    assert main([*words, "--ranks", "2", "--stats"]) == 0
    printed, logged = capfd.readouterr()
    assert printed == alone
    # One rank says how fast it was, and of its share alone.
    (line,) = logged.splitlines()
    assert re.fullmatch(
        r"\d+ tokens, [\d.]+ tokens/s; a decode step [\d.]+ [mu]s, floor [\d.]+ [mu]s "
        r"\([\d.]+ [kM]B at [\d.]+ [GM]B/s\), ratio [\d.e-]+; "
        r"host: schedule \d+ us, batch \d+ us, model \d+ us, sample \d+ us, outputs \d+ us",
        line,
    )


def test_a_directory_of_transformers_is_a_model_too(run, tmp_path, capsys):
    pytest.importorskip("transformers", reason="transformers writes the directory")
    theirs = write_directory(tmp_path, "llama", vocab_size=320, eos_token_id=None)
    shutil.copy(run / "tokenizer.json", tmp_path)
    tokens = [7, 300, 12]
    words = ["--prompt-ids", "7,300,12", "--max-tokens", 8, "--temperature", 0, "--json"]
    text = json.loads(generate(capsys, tmp_path, *words))
    for _ in range(8):
        with torch.inference_mode():
            tokens.append(int(theirs(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert text["token_ids"] == tokens[3:]
    for ranks in (1, 2):
        with LLM(tmp_path, ranks=ranks, memory_bytes=2**22) as llm:
            assert llm.loaded.num_parameters == theirs.num_parameters()
            assert llm.dtype == theirs.dtype


# -- what cannot be written from -------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["generate", *map(str, words)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert len(captured.err.splitlines()) >= 3
    return captured.err


NUMBERS = (
    *("--max-tokens=0", "--temperature=-1", "--temperature=nan", "--top-k=-1", "--ranks=0"),
    *("--top-p=0.0", "--top-p=1.5", "--prompt-ids=1,x", "--prompt-ids=1,-2", "--prompt-ids="),
)


def test_a_folder_without_a_run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests").mkdir()
    assert f"model {tmp_path}: neither a checkpoint" in refused(capsys, tmp_path)
    absent = tmp_path / "absent"
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    hub = Path("HuggingFaceTB/SmolLM2-135M")
    for path, found, told in (
        (absent, "no such folder", "NAME --local-dir DIR"),
        (hub, "no such folder", f"{hub} --local-dir models/SmolLM2-135M"),
        # A run that is not there is no model of the hub, nor is what lies beside other folders.
        (Path("runs/nope"), "no such folder", "NAME --local-dir DIR"),
        (Path("tests/nope"), "no such folder", "NAME --local-dir DIR"),
        (tmp_path / "tiny.gguf", "a GGUF file", "NAME --local-dir DIR"),
    ):
        message = refused(capsys, path)
        assert f"model {path}: {found}" in message
        assert f"hf download {told}" in message
        assert "GGUF is not read" in message


@pytest.mark.parametrize(
    ("words", "told"),
    [
        *((words, f"pcomm generate {words.replace('=', ' ')}") for words in NUMBERS),
        (f"--seed={2**64}", "--seed 18446744073709551616"),
        # Bytes of the command line that are no UTF-8 arrive as lone surrogates.
        ("--prompt=\udcff", "generate --prompt"),
        ("--stop=\udcff", "generate --stop"),
        ("--prompt-ids=1,320", "320"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(run, capsys, words, told):
    assert told in refused(capsys, run, words)


def test_a_prompt_that_fills_the_context_is_refused_and_a_text_ends_with_it(run, capsys):
    """Which is 2,048 tokens where training saw fewer; with a seed as `SamplingParams` takes it."""
    ids = ",".join(["5"] * 2047)
    assert main(["generate", str(run), "--prompt-ids", ids, "--json", "--seed=-1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_tokens"] == 1
    message = refused(capsys, run, f"--prompt-ids={ids},5")
    assert "prompt: 2048 tokens, and a context of 2048" in message
    message = refused(capsys, run, "--prompt-ids=5,5,5,5", "--max-model-len=4")
    assert "prompt: 4 tokens, and a context of 4" in message


def test_a_configuration_of_another_model(run, tmp_path, capsys):
    for name in ("checkpoints", "tokenizer.json"):
        (tmp_path / name).symlink_to(run / name)
    text = (run / "config.toml").read_text()
    (tmp_path / "config.toml").write_text(text.replace("width = 32", "width = 64"))
    message = refused(capsys, tmp_path)
    assert "mixer.output.weight of shape (64, 64): shape (32, 32) under that name" in message
