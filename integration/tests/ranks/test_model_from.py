"""`model.from`: a run that starts with the weights of a Hugging Face directory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from integration_support.huggingface_directories import write_directory, write_tokenizer
from integration_support.short_runs import train_quietly, write_words
from pcomm.core.cli import main
from pcomm.core.errors import ConfigError, PcommError
from pcomm.core.testing import ranks
from pcomm.integration.commands.conversion import directory_to_run, run_to_directory
from pcomm.integration.config.toml import apply_overrides, load_config
from pcomm.integration.huggingface.model_from import start_config
from pcomm.integration.train.run import Outcome

# Nothing is learnt at a rate of 0, so the weights come out as they went in.
SHORT = [
    "train.steps=1",
    "train.sequence_length=32",
    "train.global_batch_tokens=64",
    "train.eval_every=end",
    "train.eval_tokens=64",
    "train.learning_rate=0.0",
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_words(tmp_path_factory.mktemp("words"))


@pytest.fixture(scope="module")
def directory(text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of attention, Gated DeltaNet and experts, in bf16, but for the decays."""
    # Not for the whole file: the ranks load it, too, and need no transformers.
    pytest.importorskip("transformers", reason="transformers writes the directory")
    folder = tmp_path_factory.mktemp("directory")
    write_directory(
        folder,
        "qwen3_next",
        dtype=torch.bfloat16,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
    )
    file = folder / "model.safetensors"
    mixed = {
        name: tensor.float() if name.endswith("A_log") else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(mixed, file, metadata={"format": "pt"})
    write_tokenizer(folder, [file.read_text() for file in Path(text).parent.glob("*.txt")])
    return folder


def train(run_dir: Path, text: str, *overrides: str) -> Outcome:
    """A run of a new configuration, in which the shape of the model is not said."""
    config = load_config(overrides=[f"data.path=['{text}']", *SHORT, *overrides])
    return train_quietly(config, run_dir)


def assert_same_weights(first: Path, second: Path) -> None:
    before, after = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype
        assert torch.equal(tensor, after[name]), name


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


@ranks(2)
def start_on_two_ranks(
    rank: int, directory: Path, text: str, run_dir: Path, keys: list[str]
) -> None:
    train(run_dir, text, f"model.from={directory}", *keys)


@pytest.mark.parametrize(
    "keys",
    [["parallel.tp=2", "parallel.ep=2"], ["parallel.data=shard", "parallel.ep=2"]],
    ids=["tp and ep", "shards and ep"],
)
def test_weights_reach_every_rank_and_come_back(keys, directory, text, tmp_path, rank_pool):
    start_on_two_ranks(
        rank_pool=rank_pool, directory=directory, text=text, run_dir=tmp_path / "run", keys=keys
    )
    assert run_to_directory(tmp_path / "run", tmp_path / "out") == "qwen3_next"
    assert_same_weights(directory, tmp_path / "out")
    assert config_of(directory) == config_of(tmp_path / "out")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_text() == (directory / name).read_text()


def test_a_run_goes_on_when_the_directory_is_gone(directory, text, tmp_path):
    source, run = tmp_path / "source", tmp_path / "run"
    shutil.copytree(directory, source)
    start = f"model.from={source}"
    assert train(run, text, start).steps == 1
    shutil.rmtree(source)
    assert train(run, text, start, "train.steps=2").steps == 2
    saved = load_config(run / "config.toml")
    assert train_quietly(saved, run).steps == 2
    with pytest.raises(ConfigError, match="no such folder"):
        train(tmp_path / "another", text, start)
    assert not (tmp_path / "another").exists()


def test_a_converted_directory_is_a_run_of_no_steps(directory, text, tmp_path):
    run = tmp_path / "run"
    assert directory_to_run(directory, run) == "qwen3_next"
    run_to_directory(run, tmp_path / "unchanged")
    assert_same_weights(directory, tmp_path / "unchanged")
    with pytest.raises(ConfigError, match="a run with a checkpoint"):
        directory_to_run(directory, run)
    config = apply_overrides(load_config(run / "config.toml"), [f"data.path=['{text}']", *SHORT])
    # Any batches and any seed: the run has seen none.
    config = apply_overrides(config, ["train.seed=5", "train.steps=2"])
    assert train_quietly(config, run).steps == 2
    run_to_directory(run, tmp_path / "trained", dtype=torch.float32, max_shard_bytes=200_000)
    assert len(list((tmp_path / "trained").glob("model-*.safetensors"))) > 1
    # From now on the batches are those of the run.
    with pytest.raises(ConfigError, match=r"train\.seed was 5 and is 6"):
        train_quietly(apply_overrides(config, ["train.seed=6"]), run)


def test_a_refused_restart_leaves_tokenizer_and_settings(directory, text, tmp_path):
    """And a run that begins anew without a directory forgets the one that was there."""
    run, other = tmp_path / "run", tmp_path / "other"
    train(run, text, f"model.from={directory}")
    shutil.copytree(directory, other)
    settings = {"eos_token": "<s>"}
    (other / "tokenizer_config.json").write_text(json.dumps(settings))
    write_tokenizer(other, ["nothing in common"], vocabulary=270)

    def kept() -> dict[str, bytes]:
        files = [run / "tokenizer.json", *sorted((run / "huggingface").iterdir())]
        return {str(file): file.read_bytes() for file in files}

    before = kept()
    config = load_config(overrides=["data.path=['/nowhere/*.txt']", *SHORT, f"model.from={other}"])
    with pytest.raises(ConfigError, match=r"data\.path"):
        train_quietly(config, run, must_restart=True)
    assert kept() == before
    assert train(run, text, f"model.from={directory}", "train.steps=2").steps == 2
    new = ["model.layers=1", "model.width=32", "data.vocabulary=300"]
    config = load_config(overrides=[f"data.path=['{text}']", *SHORT, *new])
    assert train_quietly(config, run, must_restart=True).steps == 1
    assert not (run / "huggingface").exists()
    assert run_to_directory(run, tmp_path / "out") == "llama"


def test_training_changes_the_weights(directory, text, tmp_path):
    """The comparisons above can fail."""
    train(
        tmp_path / "run",
        text,
        f"model.from={directory}",
        "train.learning_rate=0.01",
        "train.warmup_steps=0",
    )
    run_to_directory(tmp_path / "run", tmp_path / "out")
    with pytest.raises(AssertionError, match=r"model\.layers"):
        assert_same_weights(directory, tmp_path / "out")


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("model.width=64", "model.width is 64, and theirs is 48"),
        ("model.pattern=GGGA", "model.pattern is 'GGGA', and theirs is 'GA'"),
        ("data.vocabulary=512", "data.vocabulary is 512, and theirs is 300"),
    ],
)
def test_a_key_that_contradicts_is_an_error(override, part, directory, text, tmp_path):
    with pytest.raises(ConfigError, match=r"model\.from") as raised:
        train(tmp_path / "run", text, f"model.from={directory}", override)
    assert part in str(raised.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("key", ["model.layers=4", "model.qk_norm=false", "data.vocabulary=2048"])
def test_a_default_that_was_written_counts_for_the_command(key, directory, tmp_path, capsys):
    """`pcomm train` knows what was written; a `Config` in Python knows values alone."""
    file = tmp_path / "run.toml"
    file.write_text(f"[model]\nfrom = '{directory}'\nkv_heads = 'auto'\n")
    words = ["train", "--config", str(file), "--out", str(tmp_path / "run"), "--set", key]
    assert main(words) == 2
    assert f"{key.partition('=')[0]} is " in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_keys_that_agree_are_taken(directory, tmp_path):
    keys = [f"model.from={directory}", "model.width=48", "model.init_std=0.5", "model.kv_heads=2"]
    config = start_config(apply_overrides(load_config(), keys), tmp_path)
    assert (config.model.layers, config.model.pattern, config.model.init_std) == (2, "GA", 0.5)
    assert start_config(config, tmp_path) == config


SPOILT = {
    "no tokenizer": lambda folder: (folder / "tokenizer.json").unlink(),
    "no end": lambda folder: (
        (folder / "tokenizer_config.json").unlink(),
        (folder / "generation_config.json").unlink(missing_ok=True),
    ),
    "missing tensor": lambda folder: save_file(
        {"model.norm.weight": torch.zeros(48)}, folder / "model.safetensors"
    ),
}
PARTS = {
    "no tokenizer": "no tokenizer.json",
    "no end": "no eos_token_id",
    "missing tensor": "no tensor lm_head.weight",
}


@ranks(2)
def refuse_on_two_ranks(rank: int, source: Path, text: str, run_dir: Path, part: str) -> None:
    with pytest.raises(PcommError) as raised:
        train(run_dir, text, f"model.from={source}", "parallel.tp=2")
    assert part in str(raised.value)


@pytest.mark.parametrize("name", SPOILT)
def test_a_directory_that_no_run_can_start_from_is_refused_on_all_ranks(
    name, directory, text, tmp_path, rank_pool
):
    source = tmp_path / "source"
    shutil.copytree(directory, source)
    SPOILT[name](source)
    refuse_on_two_ranks(
        rank_pool=rank_pool, source=source, text=text, run_dir=tmp_path / "run", part=PARTS[name]
    )
