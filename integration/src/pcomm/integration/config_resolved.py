"""A configuration that fits a number of ranks: every size is a number, as `validate` makes it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Literal

from pydantic import Field

from pcomm.integration.config import Config, ModelConfig, ParallelConfig, Size, TrainConfig
from pcomm.integration.config_errors import section

__all__ = ["Resolved", "ResolvedModel", "ResolvedParallel", "ResolvedTrain", "given", "values_of"]


@section("model")
class ResolvedModel(ModelConfig):
    """`ModelConfig` in which every size is a number."""

    kv_heads: Size = Field(...)
    head_dim: Size = Field(...)
    mlp_width: Size | Literal["none"] = Field(...)
    expert_width: Size = Field(...)
    gdn_key_heads: Size = Field(...)
    gdn_value_heads: Size = Field(...)
    gdn_key_dim: Size = Field(...)
    gdn_value_dim: Size = Field(...)
    mamba_heads: Size = Field(...)
    mamba_head_dim: Size = Field(...)


@section("parallel")
class ResolvedParallel(ParallelConfig):
    """`ParallelConfig` of a known number of ranks."""

    dp: Size = Field(...)
    shard_ranks: Size = Field(...)


@section("train")
class ResolvedTrain(TrainConfig):
    """`TrainConfig` of a known number of ranks."""

    micro_batch_tokens: Size = Field(...)


@section("")
class Resolved(Config):
    """A `Config` that fits a number of ranks, without `auto`; see `config_rules.validate`."""

    model: ResolvedModel = Field(...)
    parallel: ResolvedParallel = Field(...)
    train: ResolvedTrain = Field(...)


def values_of(part: Any) -> dict[str, Any]:
    """Values of a section by the names of its keys; sections in it stay as they are."""
    return {item.name: getattr(part, item.name) for item in fields(part)}


def given(value: int | Literal["auto"], derived: int) -> int:
    """`value`, or `derived` in place of `auto`."""
    return derived if value == "auto" else value
