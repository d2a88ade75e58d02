"""TOML and overrides: what is read, what is refused, and the way back."""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
import tomllib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pcomm.core.errors import ConfigError, TopologyError
from pcomm.integration import recipes
from pcomm.integration.config.rules import validate
from pcomm.integration.config.sections import (
    Config,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
    keys,
)
from pcomm.integration.config.toml import apply_overrides, from_dict, load_config, to_dict, to_toml


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
        ("data.path=a*.txt", "data", "path", ("a*.txt",)),
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
        ("[model]\nsteps = 1\n", ["model.steps", "another section", "train.steps"]),
        ("train = 3\n", ["train", "the value 3", "[train]"]),
        ("[train]\nsteps = 1.0\n", ["train.steps", "1.0", "a valid integer", "Optimizer steps."]),
        ("[train]\nsteps = true\n", ["train.steps", "True", "a valid integer"]),
        ("[train]\nsteps = '9'\n", ["train.steps", "'9'", "a valid integer", "train.steps = 200"]),
        ("[parallel]\nsequence = 1\n", ["parallel.sequence", "a valid boolean"]),
        ("[train]\ndtype = 'fp8'\n", ["train.dtype", "'fp8'", "'auto', 'fp32' or 'bf16'"]),
        ("[train]\nlearning_rate = true\n", ["learning_rate", "True", "a valid number"]),
        ("[train]\nlearning_rate = inf\n", ["learning_rate", "inf", "a finite number"]),
        ("[train]\nlearning_rate = nan\n", ["learning_rate", "nan", "a finite number"]),
        (f"[train]\nclip_norm = 1{'0' * 400}\n", ["clip_norm", "a valid number", "000..."]),
        (f"[train]\nsteps = 0x{'f' * 4000}\n", ["train.steps", "more digits", "64 bits"]),
        (f"[train]\nwarmpu_steps = 0x{'f' * 4000}\n", ["more digits", "'warmup_steps'"]),
        (f"train = 0x{'f' * 4000}\n", ["more digits", "[train]"]),
        (f"[train]\nsteps = {'1' * 5000}\n", ["not TOML", "5000 digits"]),
        (f"[data]\npath = {'[' * 5000}", ["not TOML", "recursion"]),
        ("[parallel]\ndata = 0\n", ["parallel.data", 'parallel.data = "replicate"']),
        ("[model]\npattern = 5\n", ["model.pattern", 'model.pattern = "A"']),
        ("[sample]\nprompt = true\n", ["sample.prompt", 'sample.prompt = "def"']),
        ("[train.more]\nsteps = 1\n", ["train.more", "a key that section 'train' does not have"]),
        ("[train]\nbetas = [0.9]\n", ["train.betas", "item 1: Field required"]),
        ("[train]\nbetas = [0.9, 'x']\n", ["train.betas", "item 1", "a valid number"]),
        ("[data]\npath = ''\n", ["data.path", "a valid tuple"]),
        ("[data]\npath = [1]\n", ["data.path", "item 0: Input should be a valid string"]),
        ("[data]\ntext_key = 5\n", ["data.text_key", 'data.text_key = "text"']),
        ("[data]\ntext_key = 2026-01-01\n", ["date(2026, 1, 1)", 'text_key = "text"']),
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
        (f"train.steps={'1' * 5000}", "a valid integer"),
        (f"data.path={'[' * 5000}", "recursion"),
        ("train.dtype=BF16", "'auto', 'fp32' or 'bf16'"),
        ("train.eval_every=None", "'end' or 'none'"),
        ("parallel.cp_strategy=head", "'heads', 'docs'"),
        ("train.betas=0.9", "train.betas = [0.9, 0.95]"),
        ("train.betas=0.9,0.95", "train.betas = [0.9, 0.95]"),
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


@settings(max_examples=40, deadline=None)
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
    for other in ("0", "every"):
        with pytest.raises(ConfigError, match=f"Input should be '{word}'"):
            apply_overrides(Config(), [f"{key}={other}"])


def test_python_is_told_the_same_in_four_parts():
    with pytest.raises(ConfigError, match=r"parallel\.tp: the value 0") as raised:
        ParallelConfig(tp=0)
    assert "Tensor-parallel ranks, which share every layer." in raised.value.why
    with pytest.raises(ConfigError, match="Did you mean 'layers'"):
        ModelConfig(layer=3)
    with pytest.raises(ConfigError, match=r"model\.self: the value 3"):
        ModelConfig(self=3)


@pytest.mark.parametrize("value", [None, {"layers": 3}, TrainConfig(), ModelConfig])
def test_a_section_is_an_instance_of_its_class(value):
    for make in (lambda: Config(model=value), lambda: replace(Config(), model=value)):
        with pytest.raises(ConfigError, match=r"^model: the value .*") as raised:
            make()
        assert "an instance of ModelConfig" in raised.value.why
    with pytest.raises(ConfigError, match=r"^modle: .*\n.*\nDid you mean 'model'"):
        Config(modle=ModelConfig())


@pytest.mark.parametrize("values", [{0.9, 0.5}, {0.9: 0, 0.5: 0}.keys(), iter([0.9, 0.5])])
def test_what_has_no_order_or_is_read_once_is_no_list(values):
    with pytest.raises(ConfigError, match=r"train\.betas: Input should be a valid tuple"):
        TrainConfig(betas=values)
    with pytest.raises(ConfigError, match=r"data\.path: Input should be a valid tuple"):
        DataConfig(path=values)


# Beside the edges of ranges, what Python or numpy would take for a number or for nothing.
STRANGE = [
    *(0, -1, 2**63 - 1, 2**63, -(2**63), 10**400, 16**5000, True, False),
    *(0.0, -0.0, 0.5, 1.0, 5e-324, 1e308, math.nan, math.inf, np.int64(0), np.zeros(2), 1j),
    *("auto", "all", "end", "none", "None", "4", "", "A", "AMG", None, [], [1], (), {}, b"A"),
]


@pytest.mark.parametrize("key", [f"{key.section}.{key.name}" for key in keys()])
def test_every_value_of_a_key_is_taken_or_refused_by_name(key):
    section, name = key.split(".")
    tiny, told = recipes.tiny(), []
    for value in STRANGE:
        try:
            part = replace(getattr(tiny, section), **{name: value})
        except ConfigError as error:
            told.append((error.asked, error.why.partition(": ")[0]))
            continue
        config = replace(tiny, **{section: part})
        assert from_dict(tomllib.loads(to_toml(config))) == config
        assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
        assert hash(copy.copy(config)) == hash(config)
        # It may still not fit the others, which is told as well.
        with contextlib.suppress(ConfigError, TopologyError):
            validate(config, 2)
    assert told, "no key takes all of them"
    assert set(told) == {(key, key)}


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
