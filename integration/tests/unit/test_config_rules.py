"""Which configurations run, on how many ranks, and what the others are told."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from pcomm.core.errors import ConfigError, TopologyError, UnsupportedError
from pcomm.integration import recipes
from pcomm.integration.config.model_rules import expert_blocks, mixers
from pcomm.integration.config.rules import validate
from pcomm.integration.config.sections import Config, ModelConfig, keys
from pcomm.integration.config.toml import apply_overrides, load_config

CONFIGS = Path(__file__).parents[2] / "configs"


def _tiny(*overrides: str) -> Config:
    return apply_overrides(recipes.tiny(), overrides)


def test_derived_sizes_are_filled_in_and_what_is_given_stays():
    config = validate(_tiny("model.width=96", "model.kv_heads=auto", "model.mlp_width=auto"), 2)
    # 8/3 of 96 is 256, which is a multiple of 64 already.
    assert config.model.mlp_width == 256
    assert (config.model.kv_heads, config.model.head_dim) == (4, 24)
    assert config.parallel.dp == 2
    assert config.train.micro_batch_tokens == 128
    assert config.parallel.shard_ranks == 1
    assert validate(_tiny("parallel.data=shard", "parallel.cp=2"), 4).parallel.shard_ranks == 4
    for width, expected in ((8, 64), (24, 64), (32, 128), (256, 704)):
        wide = validate(_tiny(f"model.width={width}", "model.mlp_width=auto"), 1)
        assert wide.model.mlp_width == expected
    asked = _tiny("model.head_dim=6", "parallel.dp=2", "train.micro_batch_tokens=64")
    config = validate(asked, 2)
    assert config.model.head_dim == 6
    assert config.parallel.dp == 2
    assert config.train.micro_batch_tokens == 64
    assert validate(config, 2) == config
    assert mixers(ModelConfig(pattern="AA", layers=4)) == "AAAA"


def test_experts_are_as_wide_as_the_mlp_and_stand_in_every_nth_block():
    config = validate(_tiny("model.experts=4", "model.layers=5", "model.moe_every=2"), 1)
    assert config.model.expert_width == 64
    assert expert_blocks(config.model) == (False, True, False, True, False)
    assert expert_blocks(validate(_tiny(), 1).model) == (False, False)
    # Ranks of every axis can share them.
    asked = _tiny("model.experts=8", "parallel.tp=2", "parallel.cp=2", "parallel.ep=8")
    assert validate(asked, 8).parallel.ep == 8


def test_a_width_that_no_block_has_need_not_divide():
    asked = _tiny("model.experts=4", "model.mlp_width=65", "parallel.tp=2")
    assert validate(asked, 2).model.mlp_width == 65
    config = validate(_tiny("model.mlp_width=none", "parallel.tp=2"), 2)
    assert config.model.mlp_width == "none"
    assert validate(config, 2) == config


@pytest.mark.parametrize(
    ("overrides", "world_size", "kind", "parts"),
    [
        (["model.pattern=GGGA"], 1, ConfigError, ["model.layers is 2", "is 4"]),
        (["model.pattern=M", "parallel.tp=2"], 2, ConfigError, ["model.mamba_groups is 1"]),
        (["model.pattern=G", "model.gdn_key_heads=3"], 1, ConfigError, ["is 3", "key head"]),
        (["model.pattern=M", "model.mamba_groups=5"], 1, ConfigError, ["is 5", "Each group"]),
        (["model.pattern=AX"], 1, ConfigError, ["'AX'", "G Gated DeltaNet"]),
        (["model.pattern="], 1, ConfigError, ["the value ''", "A attention"]),
        (["model.pattern=AAA"], 1, ConfigError, ["model.layers is 2", "is 3", "nearest is 3"]),
        (["parallel.zero=4"], 1, ConfigError, ["parallel.zero", "less than or equal to 3"]),
        (["parallel.shard_ranks=2"], 2, ConfigError, ["parallel.data = 'replicate'"]),
        (["parallel.zero=2"], 2, ConfigError, ["parallel.zero", "no stage of sharding"]),
        (
            ["parallel.data=shard", "parallel.shard_ranks=1"],
            2,
            ConfigError,
            ["the value 1 with parallel.data = 'shard'", "hybrid"],
        ),
        (["parallel.data=hybrid"], 2, ConfigError, ["parallel.shard_ranks", "no value"]),
        (
            ["parallel.data=hybrid", "parallel.shard_ranks=3"],
            4,
            ConfigError,
            ["ranks of dp x cp is 4", "shard_ranks is 3"],
        ),
        (["parallel.cp=3"], 3, ConfigError, ["parallel.cp is 3", "256", "255 or 258"]),
        (
            ["parallel.cp=4", "parallel.cp_strategy=heads", "model.heads=6", "model.kv_heads=6",
             "model.head_dim=8"],
            4,
            ConfigError,
            ["model.heads on each rank of tp is 6", "parallel.cp is 4", "other strategies"],
        ),
        (
            ["parallel.cp=4", "parallel.cp_strategy=heads", "model.pattern=G",
             "model.gdn_key_heads=1", "model.gdn_value_heads=2"],
            4,
            ConfigError,
            ["model.gdn_value_heads on each rank of tp is 2"],
        ),
        (
            ["parallel.cp=2", "parallel.tp=2", "parallel.sequence=true",
             "parallel.cp_strategy=docs"],
            4,
            UnsupportedError,
            ["parallel.cp_strategy", "'docs'", "parallel.sequence = false"],
        ),
        (
            ["parallel.failed=['dp=0,tp=1']", "parallel.tp=2"],
            3,
            ConfigError,
            ["parallel.dp", "'auto'"],
        ),
        (
            ["parallel.failed=['dp=0,tp=1']", "parallel.tp=2", "parallel.dp=2"],
            4,
            TopologyError,
            ["without 1 failed ranks, for 4 ranks", "Start 3 ranks"],
        ),
        (
            ["parallel.failed=['dp=0,tp=1']", "parallel.tp=2", "parallel.dp=2",
             "parallel.data=shard"],
            3,
            UnsupportedError,
            ["parallel.data", "'replicate'; tp, cp and parallel.sequence work"],
        ),
        (
            ["parallel.failed=['dp=0,tp=1']", "parallel.tp=2", "parallel.dp=2", "parallel.ep=3",
             "model.experts=3"],
            3,
            UnsupportedError,
            ["parallel.ep", "Set parallel.ep = 1"],
        ),
        (
            ["parallel.failed=['dp=0,tp=2']", "parallel.tp=3", "parallel.dp=2"],
            5,
            ConfigError,
            ["model.kv_heads: the value 2, and parallel.tp is 3", "at least one"],
        ),
        (
            ["parallel.failed=['dp=0,cp=0,tp=1']", "parallel.tp=2", "parallel.dp=2",
             "parallel.cp=2"],
            7,
            ConfigError,
            ["left and would be idle: ['dp=0,cp=1,tp=1']", "Add them"],
        ),
        (
            ["parallel.failed=['dp=0,tp=0', 'dp=0,tp=1']", "parallel.tp=2", "parallel.dp=2"],
            2,
            TopologyError,
            ["parallel.failed = ['dp=0,tp=0', 'dp=0,tp=1']", "all 2 ranks have failed"],
        ),
        (
            ["parallel.failed=['dp=0,cp=0,tp=1','dp=0,cp=1,tp=1']", "parallel.tp=2",
             "parallel.dp=2", "parallel.cp=2", "parallel.cp_strategy=heads", "model.heads=3",
             "model.kv_heads=3", "model.head_dim=8"],
            6,
            ConfigError,
            ["model.heads on a rank of tp=1 is 3", "parallel.cp is 2"],
        ),
        (
            ["parallel.failed=['dp=0,tp=1']", "parallel.tp=2", "parallel.dp=2",
             "train.global_batch_tokens=32"],
            3,
            ConfigError,
            ["1 rows of 32 tokens for 2 replicas", "at least 64"],
        ),
        (
            ["parallel.failed=['dp=0,tp=9']", "parallel.tp=2", "parallel.dp=2"],
            3,
            TopologyError,
            ["parallel.failed = ['dp=0,tp=9']", "axis 'tp' has size 2", "0 to 1"],
        ),
        (
            ["parallel.failed=['dp=0']", "parallel.tp=2", "parallel.dp=2"],
            3,
            TopologyError,
            ["parallel.failed = ['dp=0']", "no coordinate for tp"],
        ),
        (
            ["parallel.failed=['tp0']", "parallel.tp=2", "parallel.dp=2"],
            3,
            ConfigError,
            ["parallel.failed = ['tp0']", "the item 'tp0'"],
        ),
        (["parallel.ep=2"], 2, ConfigError, ["parallel.ep: the value 2", "model.experts is 0"]),
        (["model.experts=6", "parallel.ep=4"], 4, ConfigError, ["experts is 6", "ep is 4"]),
        (["model.experts=6", "parallel.ep=3"], 4, ConfigError, ["ranks, is 4", "parallel.ep is 3"]),
        (["model.experts=1"], 1, ConfigError, ["experts_per_token: the value 2", "1 or less"]),
        (["model.experts=4", "model.moe_every=3"], 1, ConfigError, ["moe_every", "layers is 2"]),
        (
            ["model.experts=4", "model.shared_expert_width=5", "parallel.tp=2"],
            2,
            ConfigError,
            ["shared_expert_width is 5", "parallel.tp is 2"],
        ),
        (["parallel.dp=3"], 4, TopologyError, ["dp 3, tp 1", "4 ranks"]),
        (["parallel.tp=2"], 3, TopologyError, ["tp 2", "3 ranks", "multiple of 2"]),
        (["parallel.tp=2"], 1, TopologyError, ["tp 2", "1 ranks"]),
        (["model.heads=3", "model.width=33", "model.kv_heads=2"], 1, ConfigError, ["heads is 3"]),
        (["model.width=33"], 1, ConfigError, ["model.head_dim", "33", "4", "32 or 36"]),
        (["model.head_dim=5"], 1, ConfigError, ["width of one head is 5", "pairs"]),
        (["model.width=20"], 1, ConfigError, ["width of one head is 5"]),
        (
            ["parallel.tp=4", "model.heads=6", "model.kv_heads=6", "model.width=48"],
            4,
            ConfigError,
            ["model.heads is 6", "parallel.tp is 4", "query heads"],
        ),
        (["parallel.tp=4"], 4, ConfigError, ["model.kv_heads is 2", "parallel.tp is 4"]),
        (["parallel.tp=2", "model.mlp_width=65"], 2, ConfigError, ["mlp_width is 65"]),
        (["parallel.tp=2", "data.vocabulary=321"], 2, ConfigError, ["vocabulary is 321"]),
        (["train.global_batch_tokens=100"], 1, ConfigError, ["100", "sequence_length is 32"]),
        ([], 3, ConfigError, ["rows of 32 tokens is 8", "parallel.dp is 3", "to 192 or 288,"]),
        ([], 500, ConfigError, ["parallel.dp is 500", "train.global_batch_tokens to 16000,"]),
        (["parallel.tp=2"], 1, TopologyError, ["tp 2, cp 1 for 1 ranks", "such as --ranks 2"]),
        (["train.micro_batch_tokens=48"], 1, ConfigError, ["micro_batch_tokens is 48", "is 32"]),
        (["train.micro_batch_tokens=96"], 1, ConfigError, ["is 256", "micro_batch_tokens is 96"]),
        (
            ["parallel.tp=2", "parallel.sequence=true", "train.sequence_length=33",
             "train.global_batch_tokens=99"],
            2,
            ConfigError,
            ["parallel.sequence", "99", "parallel.tp is 2"],
        ),
        (["model.rotary_fraction=0.3"], 1, ConfigError, ["0.3 of a head of 8", "in pairs"]),
        (["model.rotary_fraction=0.125"], 1, ConfigError, ["which is 1", "in pairs"]),
        (
            ["model.rope_scaling=llama3", "model.rope_low_frequency=4"],
            1,
            ConfigError,
            ["model.rope_low_frequency", "model.rope_high_frequency is 4.0"],
        ),
        (
            ["model.mamba_min_time_step=0.1", "model.mamba_max_time_step=0.05"],
            1,
            ConfigError,
            ["model.mamba_min_time_step", "0.05"],
        ),
        (
            ["model.mlp_width=none", "model.experts=4"],
            1,
            ConfigError,
            ["model.expert_width", "model.mlp_width is 'none'"],
        ),
        (["train.betas=[0.9, 1.0]"], 1, ConfigError, ["train.betas", "item 1", "less than 1"]),
        (["data.vocabulary=256"], 1, ConfigError, ["data.vocabulary", "256", "at least 257"]),
        (["data.vocabulary=1048577"], 1, ConfigError, ["data.vocabulary", "or equal to 1048576"]),
        (["data.held_out=1"], 1, ConfigError, ["data.held_out", "the value 1\n", "less than 1"]),
        (["train.seed=-1"], 1, ConfigError, ["train.seed", "-1"]),
    ],
)  # fmt: skip
def test_what_cannot_run(overrides, world_size, kind, parts):
    with pytest.raises(kind) as raised:
        validate(_tiny(*overrides), world_size)
    for part in parts:
        assert part in str(raised.value)


def test_every_number_has_a_lower_bound():
    words = ("auto", "all", "end")
    numbers = [
        f"{key.section}.{key.name}"
        for key in keys()
        if key.name not in ("cp_strategy", "expert_weights", "dtype", "cache")
        and (type(key.default) in (int, float) or key.default in words)
    ]
    assert len(numbers) == 62
    for name in numbers:
        with pytest.raises(ConfigError, match=f"{name}: the value -1\n.*greater than"):
            _tiny(f"{name}=-1")


def test_configuration_needs_neither_torch_nor_numpy():
    code = (
        "import sys, pcomm.integration.config.rules, pcomm.integration.config.toml\n"
        "import pcomm.integration.recipes\n"
        "print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ended.stdout == "[]\n"


@pytest.mark.parametrize("vocabulary", [257, 1 << 20])
def test_the_smallest_and_the_largest_vocabulary(vocabulary):
    assert validate(_tiny(f"data.vocabulary={vocabulary}"), 1).data.vocabulary == vocabulary


def test_recipes_are_those_of_the_files_and_run_on_the_ranks_that_tests_take():
    # A wheel's tests have no such folder.
    for name in ("quickstart", "moe") if CONFIGS.is_dir() else ():
        assert load_config(CONFIGS / f"{name}.toml") == getattr(recipes, name)()
    for ranks in (1, 2):
        assert validate(recipes.quickstart(), ranks).parallel.dp == ranks
    for words in ([], ["parallel.tp=2"], ["parallel.tp=2", "parallel.sequence=true"]):
        resolved = validate(_tiny(*words), 4).parallel
        assert resolved.dp * resolved.tp == 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().model.layers = 3  # type: ignore[misc]
