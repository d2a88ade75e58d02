"""Whether a configuration can run on so many ranks, and what it resolves to there."""

from __future__ import annotations

from dataclasses import replace

from pcomm.core.errors import ConfigError, TopologyError, UnsupportedError
from pcomm.integration.config.model_rules import (
    expert_blocks,
    must_divide,
    must_share_heads,
    output_heads,
    resolve_model,
    split_dimensions,
)
from pcomm.integration.config.nonuniform import (
    check_ranks_left,
    plan_without_failed,
    resolve_with_failed,
)
from pcomm.integration.config.sections import (
    WHOLE_STAGE,
    Config,
    DataConfig,
    Dtype,
    MetricsConfig,
    ParallelConfig,
    Resolved,
    ResolvedModel,
    ResolvedParallel,
    ResolvedTrain,
    TrainConfig,
    given,
    values_of,
)
from pcomm.ntp import NtpPlan

__all__ = ["check_shards", "validate", "validate_resilient"]


# 256 bytes and the end of a document, for a tokenizer that is trained with the model.
_LEAST_VOCABULARY = 257

# Keys of `parallel` that do nothing where no rank may die.
_OF_RESILIENT = ("lost_replica", "copies")

_OWN_SUFFIXES = (".jsonl", ".parquet", ".gz", ".zst")


def validate(config: Config, world_size: int) -> Resolved:
    """`config` with a value in place of every `auto`, if it can run on `world_size` ranks.

    Of `train.dtype` it is fp32, since no device is asked here; a run asks it before.

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
    _check_text(config.data)
    _check_best(config)
    _check_wandb(config.metrics)
    model = resolve_model(config.model)
    parallel = _resolve_parallel(config.parallel, world_size)
    _check_experts(model, parallel)
    _check_optimizer(config.train, parallel)
    if parallel.failed:
        plan = plan_without_failed(model, config.data.vocabulary, parallel)
        check_ranks_left(plan, model, parallel, world_size)
        train = resolve_batch_shares(config.train, plan)
    else:
        check_shards(model, config.data.vocabulary, parallel)
        train = resolve_batch(config.train, parallel)
    return Resolved(**{**values_of(config), "model": model, "parallel": parallel, "train": train})


def _resolve_parallel(parallel: ParallelConfig, world_size: int) -> ResolvedParallel:
    if parallel.cp_strategy == "docs" and parallel.sequence and parallel.tp > 1:
        raise UnsupportedError(
            "parallel.cp_strategy",
            found="'docs' with parallel.sequence = true",
            why="That strategy sends the hidden states of whole documents, and with "
            "parallel.sequence each rank of tp has only some of a document's tokens.",
            fix="Set parallel.sequence = false, or parallel.cp_strategy to 'auto' or 'heads'.",
        )
    for key in _OF_RESILIENT:
        if (value := getattr(parallel, key)) != getattr(ParallelConfig(), key):
            raise ConfigError(
                f"parallel.{key}",
                found=f"the value {value!r} without --resilient",
                why="A run that is not resilient ends when a rank dies.",
                fix="Start it with --resilient, or leave the key away.",
            )
    if parallel.failed:
        return resolve_with_failed(parallel)
    named = f"dp {parallel.dp}, tp {parallel.tp}, cp {parallel.cp}"
    others = parallel.tp * parallel.cp
    dp = given(parallel.dp, world_size // others)
    if dp * others != world_size:
        raise TopologyError(
            "parallel",
            found=f"{named} for {world_size} ranks",
            why="Each rank has one place in the grid, so dp x tp x cp must equal the number of "
            'ranks, and with dp = "auto" the ranks must be a multiple of tp x cp.',
            fix=f"Start a multiple of {others} ranks, such as --ranks {others}, and set "
            'parallel.dp = "auto", or change parallel.tp or parallel.cp.',
        )
    zero = given(parallel.zero, WHOLE_STAGE)
    # Which a run of before has in its config.toml, as it was the default.
    if parallel.data == "replicate" and zero != WHOLE_STAGE:
        raise ConfigError(
            "parallel.zero",
            found=f"the value {parallel.zero} with parallel.data = 'replicate'",
            why="Every rank holds all parameters then, so no stage of sharding is in force.",
            fix="Set parallel.data to 'shard', or leave parallel.zero away.",
        )
    shard_ranks = _shard_ranks(parallel, dp * parallel.cp)
    resolved = {"dp": dp, "shard_ranks": shard_ranks, "zero": zero}
    return ResolvedParallel(**{**values_of(parallel), **resolved})


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
    must_divide(
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
    must_divide(
        "parallel.ep",
        ("model.experts", model.experts),
        ("parallel.ep", parallel.ep),
        "Each of these ranks holds as many experts.",
    )
    must_divide(
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
    for key, size, part in split_dimensions(model, vocabulary):
        must_divide(key, (key, size), ("parallel.tp", tp), f"Each rank of tp holds as many {part}.")
    if parallel.cp_strategy == "heads":
        for _, key, size in output_heads(model):
            must_share_heads(key, "each rank of tp", size // tp, parallel.cp)


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


def resolve_batch_shares(train: TrainConfig, plan: NtpPlan) -> ResolvedTrain:
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
    _check_decay(train)
    _check_profile(train)
    dtype: Dtype = "fp32" if train.dtype == "auto" else train.dtype
    return ResolvedTrain(**{**values_of(train), "dtype": dtype, "micro_batch_tokens": micro})


def _check_optimizer(train: TrainConfig, parallel: ResolvedParallel) -> None:
    """Refuse Muon where ranks have parts of a matrix, and its keys without it."""
    default = TrainConfig()
    keys = ("muon_learning_rate", "muon_momentum")
    given = [key for key in keys if getattr(train, key) != getattr(default, key)]
    if train.optimizer == "adamw" and given:
        raise ConfigError(
            f"train.{given[0]}",
            found=f"the value {getattr(train, given[0])!r} with train.optimizer = 'adamw'",
            why="AdamW does not read it.",
            fix="Set train.optimizer to 'muon', or leave it away.",
        )
    split = {"parallel.tp": parallel.tp, f"parallel.data = {parallel.data!r}": parallel.shard_ranks}
    for key, ranks in split.items():
        if train.optimizer == "muon" and ranks > 1:
            raise UnsupportedError(
                "train.optimizer = 'muon'",
                found=f"{key} over {ranks} ranks",
                why="Muon makes the momentum of a whole matrix orthogonal, and each of these ranks "
                "has a part of it.",
                fix="Set parallel.tp = 1 and parallel.data = 'replicate', or train.optimizer to "
                "'adamw'; parallel.cp and parallel.ep work with both.",
            )


def _check_best(config: Config) -> None:
    """Refuse to keep the best checkpoint where there is nothing to compare."""
    train, every = config.train, config.checkpoint.every
    if not config.checkpoint.keep_best:
        return
    found = ""
    if train.eval_every == "none" or not config.data.held_out:
        found = f"train.eval_every = {train.eval_every!r}, data.held_out = {config.data.held_out}"
    elif every != "end" and (train.eval_every == "end" or every % train.eval_every):
        found = f"checkpoint.every = {every} with train.eval_every = {train.eval_every!r}"
    if found:
        raise ConfigError(
            "checkpoint.keep_best",
            found=f"the value True with {found}",
            why="Checkpoints are compared by what an evaluation at the same step has found.",
            fix="Evaluate, and set checkpoint.every to a multiple of train.eval_every.",
        )


def _check_wandb(metrics: MetricsConfig) -> None:
    """Refuse a project for what is switched off: the run would be looked for in vain."""
    if metrics.wandb == "none" and metrics.wandb_project != MetricsConfig().wandb_project:
        raise ConfigError(
            "metrics.wandb_project",
            found=f"the value {metrics.wandb_project!r} with metrics.wandb = 'none'",
            why="Only with Weights & Biases is there a project.",
            fix="Set metrics.wandb to 'online' or 'offline', or leave metrics.wandb_project away.",
        )


def _check_text(data: DataConfig) -> None:
    """Refuse weights of other sources, and encodings and endings that mean nothing."""
    if data.weights and len(data.weights) != len(data.path):
        raise ConfigError(
            "data.weights",
            found=f"{len(data.weights)} weights, and {len(data.path)} entries of data.path",
            why="Each entry of data.path is a source, and has one weight.",
            fix="Give one number above 0 for each entry, or leave data.weights away.",
        )
    if own := [suffix for suffix in data.text_suffixes if suffix.lower() in _OWN_SUFFIXES]:
        raise ConfigError(
            "data.text_suffixes",
            found=f"the ending {own[0]!r}",
            why="It is no ending of plain text, and says how its files are read.",
            fix="Leave it away: such files are read without it.",
        )
    try:
        # What Python calls a codec may also turn bytes into bytes.
        "".encode(data.encoding)
    except (LookupError, ValueError) as error:
        raise ConfigError(
            "data.encoding",
            found=f"the value {data.encoding!r}: {error}",
            why="It is no encoding of text that Python knows.",
            fix="Write for example 'utf-8', 'utf-16', 'latin-1', 'cp1252' or 'gb18030'.",
        ) from error


def _check_profile(train: TrainConfig) -> None:
    """Refuse a range of steps that the run does not have."""
    if train.profile_steps == "none":
        return
    first, last = train.profile_steps
    if not first <= last <= train.steps:
        raise ConfigError(
            "train.profile_steps",
            found=f"the value [{first}, {last}] with train.steps = {train.steps}",
            why="They are the first and the last step that are recorded.",
            fix=f"Give two steps from 1 to {train.steps}, the first one first.",
        )


def _check_decay(train: TrainConfig) -> None:
    """Refuse a decay that is too long for the run, or that its schedule does not have."""
    decay, default = train.decay_steps, TrainConfig()
    given = [
        f"train.{key} = {value!r}"
        for key, value in (("decay_steps", decay), ("decay_type", train.decay_type))
        if value != getattr(default, key)
    ]
    if train.schedule != "wsd" and given:
        raise ConfigError(
            given[0].partition(" ")[0],
            found=f"{' and '.join(given)} with train.schedule = {train.schedule!r}",
            why="Only the schedule wsd has a decay of its own; the others decay all the time, or "
            "never.",
            fix="Set train.schedule to 'wsd', or leave them away.",
        )
    if train.schedule == "wsd" and decay != "auto" and train.warmup_steps + decay > train.steps:
        raise ConfigError(
            "train.decay_steps",
            found=f"the value {decay} with train.warmup_steps = {train.warmup_steps} and "
            f"train.steps = {train.steps}",
            why="The rate rises, stays and falls one after the other.",
            fix=f"Set train.decay_steps to {max(1, train.steps - train.warmup_steps)} or less, or "
            "train.warmup_steps lower.",
        )


def validate_resilient(config: Config, world_size: int) -> Resolved:
    """`validate` of a run that goes on without ranks that die. Local.

    Args:
        config: The configuration as the user wrote it.
        world_size: Number of ranks with which the run starts. Those beyond dp x cp x tp are spare,
            where `dp` is a number.

    Raises:
        UnsupportedError: A key has a value that such a run cannot have.
        PcommError: An error of `validate`.
    """
    asked = config.parallel
    if asked.dp != "auto":
        world_size = min(world_size, asked.dp * asked.cp * asked.tp)
    own = {key: getattr(asked, key) for key in _OF_RESILIENT}
    usual = {key: getattr(ParallelConfig(), key) for key in _OF_RESILIENT}
    resolved = validate(replace(config, parallel=replace(asked, failed=(), **usual)), world_size)
    is_sharded = asked.data == "shard"
    resolved = replace(resolved, parallel=replace(resolved.parallel, **own, zero=1))
    if not is_sharded and asked.copies != usual["copies"]:
        raise ConfigError(
            "parallel.copies",
            found=f"the value {asked.copies} with parallel.data = {asked.data!r}",
            why="Every replica has all of the optimizer's state then.",
            fix="Set parallel.data to 'shard', or leave parallel.copies away.",
        )
    _refuse_keys(config, resolved)
    return resolved


def _refuse_keys(config: Config, resolved: Resolved) -> None:
    """Refuse what a resilient run cannot have, and name the first of the values that it can."""
    asked, train, parallel = config.parallel, resolved.train, resolved.parallel
    for key, value, allowed, why in (
        (
            "parallel.data",
            asked.data,
            ("shard", "replicate"),
            "Each part of the optimizer's state is on some of all replicas, and not of a few.",
        ),
        (
            "parallel.zero",
            asked.zero,
            ("auto", 1),
            "A shard of parameters or gradients is lost with its rank.",
        ),
        ("parallel.ep", parallel.ep, (1,), "An expert would be lost with its rank."),
        (
            "parallel.failed",
            list(asked.failed),
            ([],),
            "Ranks that die are found while the run goes on.",
        ),
        (
            "parallel.cp_strategy",
            "heads" if parallel.cp_strategy == "heads" else "auto",
            ("auto",),
            "Heads need not divide any more among ranks of cp once ranks of tp are gone.",
        ),
        (
            "checkpoint.keep_best",
            resolved.checkpoint.keep_best,
            (False,),
            "Such a run saves before it evaluates.",
        ),
        (
            "metrics.wandb",
            resolved.metrics.wandb,
            ("none",),
            "Ranks take turns in writing, and one that waits for a server would count as dead.",
        ),
        (
            "train.on_nan",
            train.on_nan,
            ("stop",),
            "Ranks that join could not know what was skipped.",
        ),
        (
            "train.compile",
            train.compile,
            (False,),
            "The others would wait while a rank that joins compiles.",
        ),
        (
            "train.profile_steps",
            train.profile_steps,
            ("none",),
            "A rank that dies writes no file.",
        ),
        (
            "train.optimizer",
            train.optimizer,
            ("adamw",),
            "Once ranks of tp are gone, replicas have different parts of a matrix.",
        ),
        (
            "model.from",
            config.model.from_,
            ("",),
            "A rank that joins takes its weights from the others or from a checkpoint. First make "
            "the directory the run's first checkpoint, with pcomm convert.",
        ),
    ):
        if value not in allowed:
            raise UnsupportedError(
                f"pcomm train --resilient: {key}",
                found=f"the value {value!r}",
                why=why,
                fix=f"Set {key} = {allowed[0]!r}, or train without --resilient.",
            )
