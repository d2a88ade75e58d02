"""How a batch is shared by replicas, and computed in micro-batches: integers only, no torch."""

from __future__ import annotations

from pcomm.core.errors import ConfigError
from pcomm.integration.config import TrainConfig
from pcomm.integration.config_errors import must_divide
from pcomm.integration.config_resolved import (
    ResolvedParallel,
    ResolvedTrain,
    given,
    values_of,
)
from pcomm.ntp import Plan

__all__ = ["resolve_batch", "resolve_batch_shares"]


def resolve_batch(train: TrainConfig, parallel: ResolvedParallel) -> ResolvedTrain:
    """`train` of replicas that take as many rows each. Local.

    Raises:
        ConfigError: Rows, replicas, micro-batches and the ranks that share tokens do not divide.
    """
    rows = _rows(train)
    if rows % parallel.dp:
        step = parallel.dp * train.sequence_length
        down = train.global_batch_tokens // step * step
        nearest = f"{down} or {down + step}" if down else f"{step}"
        raise ConfigError(
            "train.global_batch_tokens",
            found=f"its number of rows of {train.sequence_length} tokens is {rows}, parallel.dp "
            f"is {parallel.dp}, and {rows} is no multiple of {parallel.dp}",
            why="Each data-parallel replica takes as many rows of the batch.",
            fix=f"Set train.global_batch_tokens to {nearest}, or start another number of ranks.",
        )
    local = train.global_batch_tokens // parallel.dp
    resolved = _with_micro_batches(train, local)
    micro = resolved.micro_batch_tokens
    must_divide(
        "train.micro_batch_tokens",
        (f"the share of each of {parallel.dp} replicas, in tokens", local),
        ("train.micro_batch_tokens", micro),
        "The share is computed in micro-batches of one size.",
    )
    must_divide(
        "parallel.cp",
        ("the number of tokens of a micro-batch", micro),
        ("parallel.cp", parallel.cp),
        "Each rank of cp holds as many tokens between the layers.",
    )
    if parallel.sequence:
        must_divide(
            "parallel.sequence",
            ("the number of tokens of a micro-batch on a rank of cp", micro // parallel.cp),
            ("parallel.tp", parallel.tp),
            "Each rank of tp holds as many tokens between the layers.",
        )
    return resolved


def resolve_batch_shares(train: TrainConfig, plan: Plan) -> ResolvedTrain:
    """`train` of replicas that take whole rows by their speeds. Local.

    Nothing else divides there: what is missing of a micro-batch is filled up.

    Raises:
        ConfigError: The batch or a micro-batch does not consist of whole rows, or there are fewer
            rows than replicas.
    """
    rows, replicas = _rows(train), len(plan.degrees)
    if rows < replicas:
        raise ConfigError(
            "train.global_batch_tokens",
            found=f"{rows} rows of {train.sequence_length} tokens for {replicas} replicas",
            why="Each replica computes at least one row of the batch.",
            fix=f"Set it to at least {replicas * train.sequence_length}.",
        )
    shares = plan.token_shares(train.global_batch_tokens, multiple=train.sequence_length)
    return _with_micro_batches(train, max(shares))


def _rows(train: TrainConfig) -> int:
    """Number of rows of the global batch."""
    must_divide(
        "train.global_batch_tokens",
        ("train.global_batch_tokens", train.global_batch_tokens),
        ("train.sequence_length", train.sequence_length),
        "A batch consists of whole rows.",
    )
    return train.global_batch_tokens // train.sequence_length


def _with_micro_batches(train: TrainConfig, share: int) -> ResolvedTrain:
    """`train` with micro-batches of whole rows; `share` is the number of tokens of "auto"."""
    micro = given(train.micro_batch_tokens, share)
    must_divide(
        "train.micro_batch_tokens",
        ("train.micro_batch_tokens", micro),
        ("train.sequence_length", train.sequence_length),
        "A micro-batch consists of whole rows.",
    )
    return ResolvedTrain(**{**values_of(train), "micro_batch_tokens": micro})
