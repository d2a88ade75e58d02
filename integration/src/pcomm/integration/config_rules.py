"""Whether a configuration fits together and fits a number of ranks: integers only, no torch.

Every rank runs the same checks on the same numbers before it enters a collective, so a mistake
is the same error everywhere and nothing hangs. What one key may be on its own, `config` says.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Literal

from pcomm.core.errors import ConfigError, TopologyError, UnsupportedError
from pcomm.integration.config import (
    Config,
    ModelConfig,
    ParallelConfig,
    Resolved,
    ResolvedModel,
    ResolvedParallel,
    ResolvedTrain,
    TrainConfig,
)

__all__ = ["check_shards", "expert_blocks", "mixers", "resolve_model", "validate"]


# 256 bytes and the end of a document, for a tokenizer that is trained with the model.
_LEAST_VOCABULARY = 257


def validate(config: Config, world_size: int) -> Resolved:
    """`config` with a number in place of every `auto`, if it can run on `world_size` ranks.

    Keep the configuration that came in for the run's folder: with `dp = "auto"` it can be resumed
    on another number of ranks.

    Raises:
        ConfigError: Two sizes do not divide, or two keys do not fit together.
        TopologyError: The axes do not multiply to `world_size`.
        UnsupportedError: Two features cannot be used together.
    """
    if config.data.vocabulary < _LEAST_VOCABULARY and not config.model.from_:
        raise ConfigError(
            "data.vocabulary",
            found=f"the value {config.data.vocabulary}",
            why="A tokenizer has an id for each of 256 bytes and for the end of a document.",
            fix=f"Set data.vocabulary to at least {_LEAST_VOCABULARY}.",
        )
    model = resolve_model(config.model)
    parallel = _resolve_parallel(config.parallel, world_size)
    _check_experts(model, parallel)
    check_shards(model, config.data.vocabulary, parallel)
    train = _resolve_batch(config.train, parallel)
    return Resolved(**{**_values(config), "model": model, "parallel": parallel, "train": train})


def mixers(model: ModelConfig) -> str:
    """The mixer letter of each block: `pattern` repeated to `layers` letters.

    Raises:
        ConfigError: `layers` is no multiple of the pattern's length.
    """
    _must_divide(
        "model.layers",
        ("model.layers", model.layers),
        ("the length of model.pattern", len(model.pattern)),
        "The pattern is repeated as a whole until it fills the layers.",
    )
    return model.pattern * (model.layers // len(model.pattern))


def expert_blocks(model: ModelConfig) -> tuple[bool, ...]:
    """Which blocks have experts instead of an MLP: the last of each `moe_every` blocks."""
    return tuple(
        model.experts > 0 and number % model.moe_every == 0 for number in range(1, model.layers + 1)
    )


def _values(part: Any) -> dict[str, Any]:
    return {item.name: getattr(part, item.name) for item in fields(part)}


def _given(value: int | Literal["auto"], derived: int) -> int:
    return derived if value == "auto" else value


def resolve_model(model: ModelConfig) -> ResolvedModel:
    """`model` with a number in place of every `auto`, on any number of ranks.

    Raises:
        ConfigError: Two sizes do not divide, or two keys do not fit together.
    """
    mixers(model)
    kv_heads = _given(model.kv_heads, model.heads)
    _must_divide(
        "model.kv_heads",
        ("model.heads", model.heads),
        ("model.kv_heads", kv_heads),
        "Each key and value head serves the same number of query heads.",
    )
    if model.head_dim == "auto":
        _must_divide(
            "model.head_dim",
            ("model.width", model.width),
            ("model.heads", model.heads),
            'With model.head_dim = "auto" the heads share the width evenly.',
        )
    head_dim = _given(model.head_dim, model.width // model.heads)
    _must_divide(
        "model.head_dim",
        ("the width of one head", head_dim),
        ("a pair", 2),
        "Rotary positions turn the numbers of a head in pairs.",
    )
    _check_rotation(model, head_dim)
    _check_time_steps(model)
    # 8/3 keeps the gated MLP's three matrices as large as the plain MLP's two of 4 widths.
    wide = -(-8 * model.width // (3 * 64)) * 64
    mlp_width = model.mlp_width if model.mlp_width == "none" else _given(model.mlp_width, wide)
    mamba_head_dim = _given(model.mamba_head_dim, head_dim)
    derived = {
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "mlp_width": mlp_width,
        "expert_width": _expert_width(model, mlp_width),
        "gdn_key_heads": _given(model.gdn_key_heads, kv_heads),
        "gdn_value_heads": _given(model.gdn_value_heads, model.heads),
        "gdn_key_dim": _given(model.gdn_key_dim, head_dim),
        "gdn_value_dim": _given(model.gdn_value_dim, head_dim),
        "mamba_heads": _given(model.mamba_heads, max(1, 2 * model.width // mamba_head_dim)),
        "mamba_head_dim": mamba_head_dim,
    }
    resolved = ResolvedModel(**{**_values(model), **derived})
    if "G" in model.pattern:
        _must_divide(
            "model.gdn_value_heads",
            ("model.gdn_value_heads", resolved.gdn_value_heads),
            ("model.gdn_key_heads", resolved.gdn_key_heads),
            "Each key head of a GDN block serves the same number of value heads.",
        )
    if "M" in model.pattern:
        _must_divide(
            "model.mamba_heads",
            ("model.mamba_heads", resolved.mamba_heads),
            ("model.mamba_groups", resolved.mamba_groups),
            "Each group of a Mamba-2 block serves the same number of heads.",
        )
    return resolved


def _check_rotation(model: ModelConfig, head_dim: int) -> None:
    """The part of a head that is turned consists of pairs, and frequencies are in order."""
    turned = head_dim * model.rotary_fraction
    if turned != int(turned) or int(turned) % 2 or not turned:
        raise ConfigError(
            "model.rotary_fraction",
            found=f"{model.rotary_fraction} of a head of {head_dim} numbers, which is {turned:g}",
            why="Rotary positions turn the numbers of a head in pairs.",
            fix="Choose a fraction that gives an even number of them, such as 0.5 or 1.0.",
        )
    if model.rope_scaling == "llama3" and model.rope_low_frequency >= model.rope_high_frequency:
        raise ConfigError(
            "model.rope_low_frequency",
            found=f"the value {model.rope_low_frequency}, and model.rope_high_frequency is "
            f"{model.rope_high_frequency}",
            why="Pairs between the two frequencies are slowed by a part of the factor.",
            fix="Set model.rope_low_frequency below model.rope_high_frequency.",
        )


def _check_time_steps(model: ModelConfig) -> None:
    limit = model.mamba_max_time_step
    if limit != "none" and model.mamba_min_time_step > limit:
        raise ConfigError(
            "model.mamba_min_time_step",
            found=f"{model.mamba_min_time_step}, and model.mamba_max_time_step is {limit}",
            why="Every time step lies between the two.",
            fix="Set model.mamba_min_time_step to model.mamba_max_time_step or less.",
        )


def _expert_width(model: ModelConfig, mlp_width: int | Literal["none"]) -> int:
    if model.expert_width != "auto":
        return model.expert_width
    if mlp_width != "none":
        return mlp_width
    if model.experts:
        raise ConfigError(
            "model.expert_width",
            found="'auto', and model.mlp_width is 'none'",
            why="With 'auto' an expert is as wide as the MLP, and there is none.",
            fix="Set model.expert_width to a number.",
        )
    return model.width


def _resolve_parallel(parallel: ParallelConfig, world_size: int) -> ResolvedParallel:
    if parallel.cp_strategy == "docs" and parallel.sequence and parallel.tp > 1:
        raise UnsupportedError(
            "parallel.cp_strategy",
            found="'docs' with parallel.sequence = true",
            why="That strategy sends the hidden states of whole documents, and with "
            "parallel.sequence each rank of tp has only some of a document's tokens.",
            fix="Set parallel.sequence = false, or parallel.cp_strategy to 'auto' or 'heads'.",
        )
    named = f"dp {parallel.dp}, tp {parallel.tp}, cp {parallel.cp}"
    others = parallel.tp * parallel.cp
    dp = _given(parallel.dp, world_size // others)
    if dp * others != world_size:
        raise TopologyError(
            "parallel",
            found=f"{named} for {world_size} ranks",
            why="Each rank has one place in the grid, so dp x tp x cp must equal the number of "
            'ranks, and with dp = "auto" the ranks must be a multiple of tp x cp.',
            fix=f'Start a multiple of {others} ranks and set parallel.dp = "auto", or change '
            "parallel.tp or parallel.cp.",
        )
    if parallel.data == "replicate" and parallel.zero != ParallelConfig().zero:
        raise ConfigError(
            "parallel.zero",
            found=f"the value {parallel.zero} with parallel.data = 'replicate'",
            why="Every rank holds all parameters then, so no stage of sharding is in force.",
            fix="Set parallel.data to 'shard', or leave parallel.zero away.",
        )
    shard_ranks = _shard_ranks(parallel, dp * parallel.cp)
    return ResolvedParallel(**{**_values(parallel), "dp": dp, "shard_ranks": shard_ranks})


def _shard_ranks(parallel: ParallelConfig, num_ranks: int) -> int:
    """Over how many ranks each replica of the parameters is spread."""
    given = parallel.shard_ranks
    if parallel.data != "hybrid":
        derived = num_ranks if parallel.data == "shard" else 1
        if given not in ("auto", derived):
            raise ConfigError(
                "parallel.shard_ranks",
                found=f"the value {given} with parallel.data = {parallel.data!r}",
                why="Only with 'hybrid' are there several replicas, each shared by some ranks.",
                fix="Set parallel.data to 'hybrid', or leave parallel.shard_ranks away.",
            )
        return derived
    if given == "auto":
        raise ConfigError(
            "parallel.shard_ranks",
            found="no value with parallel.data = 'hybrid'",
            why="Ranks that are close share a replica, and only you know how many these are.",
            fix="Set it to the ranks of dp x cp on one node, or parallel.data to 'shard'.",
        )
    _must_divide(
        "parallel.shard_ranks",
        ("the number of ranks of dp x cp", num_ranks),
        ("parallel.shard_ranks", given),
        "Each replica is shared by as many ranks.",
    )
    return given


def _check_experts(model: ResolvedModel, parallel: ResolvedParallel) -> None:
    """Experts and the ranks that share them; the others' keys do nothing without experts."""
    if not model.experts:
        if parallel.ep > 1:
            raise ConfigError(
                "parallel.ep",
                found=f"the value {parallel.ep}, and model.experts is 0",
                why="These ranks share the experts of a layer, and the model has none.",
                fix="Set parallel.ep to 1, or model.experts to a multiple of it.",
            )
        return
    if model.experts_per_token > model.experts:
        raise ConfigError(
            "model.experts_per_token",
            found=f"the value {model.experts_per_token}, and model.experts is {model.experts}",
            why="A token goes to as many different experts.",
            fix=f"Set model.experts_per_token to {model.experts} or less.",
        )
    if not any(expert_blocks(model)):
        raise ConfigError(
            "model.moe_every",
            found=f"the value {model.moe_every}, and model.layers is {model.layers}",
            why="The last of each moe_every blocks has experts, so no block would have any.",
            fix=f"Set model.moe_every to {model.layers} or less, or model.experts to 0.",
        )
    _must_divide(
        "parallel.ep",
        ("model.experts", model.experts),
        ("parallel.ep", parallel.ep),
        "Each of these ranks holds as many experts.",
    )
    _must_divide(
        "parallel.ep",
        ("dp x cp x tp, the number of ranks,", parallel.dp * parallel.cp * parallel.tp),
        ("parallel.ep", parallel.ep),
        "The ranks that share experts are some of those that share the batch and the layers.",
    )


def check_shards(model: ResolvedModel, vocabulary: int, parallel: ResolvedParallel) -> None:
    """Refuse ranks that cannot split each dimension of the mixers that the pattern has evenly.

    Raises:
        ConfigError: A dimension is no multiple of the ranks.
    """
    tp = parallel.tp
    by_mixer = {
        "A": (
            ("model.heads", model.heads, "query heads"),
            ("model.kv_heads", model.kv_heads, "key and value heads"),
        ),
        "G": (
            ("model.gdn_key_heads", model.gdn_key_heads, "key heads of a GDN block"),
            ("model.gdn_value_heads", model.gdn_value_heads, "value heads of a GDN block"),
        ),
        "M": (
            ("model.mamba_heads", model.mamba_heads, "heads of a Mamba-2 block"),
            ("model.mamba_groups", model.mamba_groups, "groups of a Mamba-2 block"),
        ),
    }
    everywhere = [("data.vocabulary", vocabulary, "rows of the embedding")]
    if any(expert_blocks(model)):
        shared = model.shared_expert_width
        everywhere.append(("model.shared_expert_width", shared, "columns of the shared expert"))
    if not all(expert_blocks(model)) and model.mlp_width != "none":
        everywhere.append(("model.mlp_width", model.mlp_width, "columns of the MLP"))
    for key, size, part in (
        *(row for letter, rows in by_mixer.items() if letter in model.pattern for row in rows),
        *everywhere,
    ):
        _must_divide(
            key, (key, size), ("parallel.tp", tp), f"Each rank of tp holds as many {part}."
        )
    if parallel.cp_strategy == "heads":
        for letter, ((key, size, _), *others) in by_mixer.items():
            # Output heads are what cp shares: queries, values, and those of Mamba-2.
            key, size, _ = others[0] if letter == "G" else (key, size, "")
            if letter in model.pattern:
                _must_divide(
                    key,
                    (f"{key} on each rank of tp", size // tp),
                    ("parallel.cp", parallel.cp),
                    "With parallel.cp_strategy = 'heads' each rank of cp works on as many heads; "
                    "the other strategies need no heads to divide.",
                )


def _resolve_batch(train: TrainConfig, parallel: ResolvedParallel) -> ResolvedTrain:
    row = ("train.sequence_length", train.sequence_length)
    _must_divide(
        "train.global_batch_tokens",
        ("train.global_batch_tokens", train.global_batch_tokens),
        row,
        "A batch consists of whole rows.",
    )
    rows = train.global_batch_tokens // train.sequence_length
    _must_divide(
        "train.global_batch_tokens",
        (f"its number of rows of {train.sequence_length} tokens", rows),
        ("parallel.dp", parallel.dp),
        "Each data-parallel replica takes as many rows of the batch.",
    )
    local = train.global_batch_tokens // parallel.dp
    micro = _given(train.micro_batch_tokens, local)
    _must_divide(
        "train.micro_batch_tokens",
        ("train.micro_batch_tokens", micro),
        row,
        "A micro-batch consists of whole rows.",
    )
    _must_divide(
        "train.micro_batch_tokens",
        (f"the share of each of {parallel.dp} replicas, in tokens", local),
        ("train.micro_batch_tokens", micro),
        "The share is computed in micro-batches of one size.",
    )
    _must_divide(
        "parallel.cp",
        ("the number of tokens of a micro-batch", micro),
        ("parallel.cp", parallel.cp),
        "Each rank of cp holds as many tokens between the layers.",
    )
    if parallel.sequence:
        _must_divide(
            "parallel.sequence",
            ("the number of tokens of a micro-batch on a rank of cp", micro // parallel.cp),
            ("parallel.tp", parallel.tp),
            "Each rank of tp holds as many tokens between the layers.",
        )
    return ResolvedTrain(**{**_values(train), "micro_batch_tokens": micro})


def _must_divide(asked: str, whole: tuple[str, int], parts: tuple[str, int], why: str) -> None:
    (whole_name, size), (parts_name, count) = whole, parts
    if size % count:
        down, up = size // count * count, -(-size // count) * count
        nearest = f"{down} or {up}" if down else f"{up}"
        raise ConfigError(
            asked,
            found=f"{whole_name} is {size}, {parts_name} is {count}, and {size} is no multiple "
            f"of {count}",
            why=why,
            fix=f"Change one of the two; for {count} the nearest is {nearest}.",
        )
