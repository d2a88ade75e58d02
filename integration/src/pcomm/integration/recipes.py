"""Configurations to start from, as Python functions: change one with `dataclasses.replace`."""

from __future__ import annotations

from dataclasses import replace

from pcomm.integration.config.sections import (
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    SampleConfig,
    TrainConfig,
)

__all__ = ["moe", "quickstart", "tiny"]


def quickstart() -> Config:
    """A GPT of 4 million parameters that learns to write Python on two CPU ranks in minutes.

    `configs/quickstart.toml` says the same in TOML.
    """
    return Config(
        model=ModelConfig(layers=4, width=256, heads=4),
        train=TrainConfig(
            steps=240,
            sequence_length=256,
            global_batch_tokens=2048,
            learning_rate=3e-3,
            warmup_steps=24,
            eval_every=60,
            eval_tokens=32_768,
        ),
        data=DataConfig(vocabulary=2048),
        checkpoint=CheckpointConfig(every=120),
        # A prompt without a space at its end: words begin with theirs, as most tokens do.
        sample=SampleConfig(prompt="    def", max_tokens=150, temperature=0.6),
    )


def moe() -> Config:
    """The quick start with 8 experts in every second block; a token meets 2 and a shared one.

    `configs/moe.toml` says the same in TOML.
    """
    base = quickstart()
    experts = ModelConfig(
        layers=4,
        width=256,
        heads=4,
        experts=8,
        experts_per_token=2,
        expert_width=256,
        shared_expert_width=256,
        moe_every=2,
    )
    return replace(base, model=experts)


def tiny() -> Config:
    """The smallest GPT that still has every part: for tests, which run it for a few steps.

    Two layers of width 32 with 4 query and 2 key heads, so that a tensor-parallel degree of 2
    divides everything.
    """
    return Config(
        model=ModelConfig(layers=2, width=32, heads=4, kv_heads=2, mlp_width=64),
        train=TrainConfig(
            steps=4,
            sequence_length=32,
            global_batch_tokens=256,
            warmup_steps=2,
            eval_every=2,
            eval_tokens=512,
        ),
        data=DataConfig(vocabulary=320),
        checkpoint=CheckpointConfig(every=2),
        sample=SampleConfig(max_tokens=8),
    )
