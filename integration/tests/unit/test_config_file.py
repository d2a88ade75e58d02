"""TOML and overrides: what is read, what is refused, and the way back."""

from __future__ import annotations

import tomllib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pcomm.core.errors import ConfigError
from pcomm.integration import recipes
from pcomm.integration.config import Config, ModelConfig, ParallelConfig
from pcomm.integration.config_file import (
    apply_overrides,
    from_dict,
    load_config,
    to_dict,
    to_toml,
)


def _written(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_changes_what_it_mentions_and_nothing_else(tmp_path):
    path = _written(tmp_path, '[train]\nsteps = 7\ndtype = "bf16"\n[data]\npath = ["a.txt"]\n')
    config = load_config(path, base=recipes.tiny())
    expected = recipes.tiny()
    expected = replace(
        expected,
        train=replace(expected.train, steps=7, dtype="bf16"),
        data=replace(expected.data, path=("a.txt",)),
    )
    assert config == expected


def test_overrides_come_after_the_file_and_in_order(tmp_path):
    path = _written(tmp_path, "[train]\nsteps = 7\n")
    overrides = ["train.steps=8", "train.steps=9", "train.seed = 3"]
    config = load_config(path, overrides=overrides)
    assert (config.train.steps, config.train.seed) == (9, 3)


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("sample.prompt=def main", "sample", "prompt", "def main"),
        ("sample.prompt=", "sample", "prompt", ""),
        ("sample.prompt=a=b", "sample", "prompt", "a=b"),
        ('sample.prompt="12"', "sample", "prompt", "12"),
        ("sample.prompt=x\nsteps = 3", "sample", "prompt", "x\nsteps = 3"),
        ("train.dtype=bf16", "train", "dtype", "bf16"),
        ("train.learning_rate=1", "train", "learning_rate", 1.0),
        ("train.betas=[0, 0.5]", "train", "betas", (0.0, 0.5)),
        ('data.path=["a", "b*"]', "data", "path", ("a", "b*")),
        ("data.path=[]", "data", "path", ()),
        ("parallel.sequence=true", "parallel", "sequence", True),
    ],
)
def test_an_override_is_read_as_toml_or_as_a_bare_word(override, section, key, value):
    found = getattr(getattr(apply_overrides(Config(), [override]), section), key)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[trian]\nsteps = 1\n", ["trian", "'train'"]),
        ("steps = 1\n", ["steps", "train.steps"]),
        ("zzz = 1\n", ["zzz", "Known here", "'sample'"]),
        ("[train]\nstesp = 1\n", ["train.stesp", "'steps'"]),
        ("[parallel]\ncp_mode = 'docs'\n", ["parallel.cp_mode", "Write parallel.cp_strategy"]),
        ("[model]\nsteps = 1\n", ["model.steps", "another section", "train.steps"]),
        ("train = 3\n", ["train", "the value 3", "[train]"]),
        ("[train]\nsteps = 1.0\n", ["train.steps", "1.0", "a valid integer", "Optimizer steps."]),
        ("[train]\nsteps = true\n", ["train.steps", "True", "a valid integer"]),
        ("[train]\nsteps = '9'\n", ["train.steps", "'9'", "a valid integer", "train.steps = 200"]),
        ("[parallel]\nsequence = 1\n", ["parallel.sequence", "a valid boolean"]),
        ("[train]\ndtype = 'fp8'\n", ["train.dtype", "'fp8'", "'fp32' or 'bf16'"]),
        ("[train]\nlearning_rate = true\n", ["learning_rate", "True", "a valid number"]),
        ("[train]\nlearning_rate = inf\n", ["learning_rate", "inf", "a finite number"]),
        ("[train]\nlearning_rate = nan\n", ["learning_rate", "nan", "a finite number"]),
        (f"[train]\nclip_norm = 1{'0' * 400}\n", ["clip_norm", "a valid number"]),
        ("[train]\nbetas = [0.9]\n", ["train.betas", "item 1: Field required"]),
        ("[train]\nbetas = [0.9, 'x']\n", ["train.betas", "item 1", "a valid number"]),
        ("[data]\npath = 'a.txt'\n", ["data.path", "'a.txt'", 'data.path = ["a.txt"]']),
        ("[data]\npath = [1]\n", ["data.path", "item 0: Input should be a valid string"]),
        ("[data]\ntext_key = 5\n", ["data.text_key", 'data.text_key = "5"']),
        ("[data]\ntext_key = 2026-01-01\n", ["data.text_key", "date(2026, 1, 1)"]),
        ("[train\n", ["not TOML", "line 1"]),
    ],
)
def test_what_a_file_must_not_say(tmp_path, text, parts):
    path = _written(tmp_path, text)
    with pytest.raises(ConfigError) as raised:
        load_config(path)
    for part in [*parts, str(path)]:
        assert part in str(raised.value)


def test_a_file_that_is_missing_or_no_text(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.toml: No such file"):
        load_config(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"a = '\xff'")
    with pytest.raises(ConfigError, match="not TOML"):
        load_config(tmp_path / "binary.toml")


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("train.steps", "section.key=value"),
        ("steps=3", "section.key=value"),
        (".steps=3", "section.key=value"),
        ("train.=3", "section.key=value"),
        ("train.stepz=3", "'steps'"),
        ("train.a.b=3", "train.a.b"),
        ("train.steps=many", "a valid integer"),
        ("train.steps=", "a valid integer"),
        ("data.path=a.txt", 'data.path = ["a.txt"]'),
        ("data.path=[a.txt", "does not end like one"),
        ('sample.prompt="open', "does not end like one"),
        ("sample.prompt=\udcff", "bytes that are no UTF-8"),
    ],
)
def test_what_an_override_must_not_say(override, part):
    with pytest.raises(ConfigError) as raised:
        apply_overrides(Config(), [override])
    assert f"--set {override}" in str(raised.value)
    assert part in str(raised.value)


TEXT = st.text(st.characters(exclude_categories=["Cs"]))
RATE = st.floats(min_value=0, allow_nan=False, allow_infinity=False)
SHARE = st.floats(min_value=0, max_value=1, exclude_max=True)


@settings(deadline=None)
@given(prompt=TEXT, paths=st.lists(TEXT), rate=RATE, betas=st.tuples(SHARE, SHARE))
def test_every_config_survives_toml_and_dict(prompt, paths, rate, betas):
    base = recipes.tiny()
    config = replace(
        base,
        sample=replace(base.sample, prompt=prompt),
        data=replace(base.data, path=tuple(paths)),
        train=replace(base.train, learning_rate=rate, betas=betas),
    )
    assert from_dict(tomllib.loads(to_toml(config))) == config
    assert from_dict(to_dict(config)) == config


def test_what_0_stood_for_in_earlier_files_is_named_for_all_keys_at_once(tmp_path):
    keys = {"kv_heads": "auto", "head_dim": "auto", "mlp_width": "auto", "mamba_heads": "auto"}
    model = "[model]\n" + "".join(f"{key} = 0\n" for key in keys)
    path = _written(tmp_path, f"{model}[parallel]\ndp = 0\n[checkpoint]\nkeep = 0\n")
    with pytest.raises(ConfigError) as raised:
        load_config(path)
    for key, word in keys.items():
        assert f'Write `model.{key} = "{word}"`' in raised.value.fix
    assert 'Write `parallel.dp = "auto"`' in raised.value.fix
    assert 'Write `checkpoint.keep = "all"`' in raised.value.fix


@pytest.mark.parametrize(
    ("key", "word"),
    [
        ("model.kv_heads", "auto"),
        ("parallel.dp", "auto"),
        ("parallel.shard_ranks", "auto"),
        ("train.micro_batch_tokens", "auto"),
        ("train.clip_norm", "none"),
        ("train.eval_every", "end"),
        ("train.eval_tokens", "all"),
        ("checkpoint.every", "end"),
        ("checkpoint.keep", "all"),
    ],
)
def test_a_word_says_what_is_no_number(key, word):
    section, name = key.split(".")
    config = apply_overrides(Config(), [f"{key}={word}"])
    assert getattr(getattr(config, section), name) == word
    with pytest.raises(ConfigError, match=f'Write `{key} = "{word}"`, which is what 0 stood for'):
        apply_overrides(Config(), [f"{key}=0"])
    with pytest.raises(ConfigError, match=f"Input should be '{word}'"):
        apply_overrides(Config(), [f"{key}=every"])


def test_python_is_told_the_same_in_four_parts():
    with pytest.raises(ConfigError, match=r"parallel\.tp: the value 0") as raised:
        ParallelConfig(tp=0)
    assert "Tensor-parallel ranks, which share every layer." in raised.value.why
    with pytest.raises(ConfigError, match="Did you mean 'layers'"):
        ModelConfig(layer=3)


def test_the_written_file_explains_each_key():
    text = to_toml(Config())
    assert "# Optimizer steps.\nsteps = 200\n" in text
    assert text.startswith("[model]\n")
    assert "\n\n[parallel]\n" in text


def test_a_key_that_is_a_word_of_python_has_its_own_name(tmp_path):
    config = load_config(_written(tmp_path, '[model]\nfrom = "a/b"\n'))
    assert config.model.from_ == "a/b"
    assert apply_overrides(config, ["model.from=c d"]).model.from_ == "c d"
    assert to_dict(config)["model"]["from"] == "a/b"
    assert '\nfrom = "a/b"\n' in to_toml(config)
    assert load_config(_written(tmp_path, to_toml(config))) == config
    with pytest.raises(ConfigError, match=r"model\.from_.*\n.*\nDid you mean 'from'"):
        from_dict({"model": {"from_": "a"}})
    with pytest.raises(
        ConfigError, match=r"^model\.from: the value 3\n|: model\.from: the value 3"
    ):
        from_dict({"model": {"from": 3}})
