"""The sections, their keys and the recipes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from pcomm.integration import recipes
from pcomm.integration.config.rules import validate
from pcomm.integration.config.sections import Config, keys
from pcomm.integration.config.toml import load_config

CONFIGS = Path(__file__).parents[2] / "configs"

CONTRACT = [
    "model.pattern",
    "model.layers",
    "model.width",
    "parallel.dp",
    "parallel.tp",
    "parallel.cp",
    "parallel.ep",
    "parallel.sequence",
    "train.steps",
    "train.seed",
    "train.dtype",
    "train.sequence_length",
    "train.global_batch_tokens",
    "data.path",
]


def test_every_key_is_explained_in_a_sentence():
    for key in keys():
        assert key.help.endswith("."), key
        assert key.help[0].isupper() or key.help[0].isdigit(), key


def test_the_keys_that_others_build_on_exist():
    assert set(CONTRACT) <= {f"{key.section}.{key.name}" for key in keys()}


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().model.layers = 3  # type: ignore[misc]


@pytest.mark.parametrize("name", ["quickstart", "moe"])
def test_a_file_says_what_its_recipe_says(name):
    if not CONFIGS.is_dir():
        pytest.skip("the wheel does not carry configs/")
    assert load_config(CONFIGS / f"{name}.toml") == getattr(recipes, name)()


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_quickstart_runs_on_one_and_two_ranks(world_size):
    assert validate(recipes.quickstart(), world_size).parallel.dp == world_size


@pytest.mark.parametrize(
    "parallel",
    [{}, {"tp": 2}, {"tp": 2, "sequence": True}],
    ids=["dp4", "dp2-tp2", "dp2-tp2-sequence"],
)
def test_the_tiny_recipe_fits_four_ranks_in_every_arrangement(parallel):
    tiny = recipes.tiny()
    config = dataclasses.replace(tiny, parallel=dataclasses.replace(tiny.parallel, **parallel))
    resolved = validate(config, 4).parallel
    assert resolved.dp * resolved.tp == 4
