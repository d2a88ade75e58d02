"""The configuration: every key where it is explained, and resolved forms."""

from __future__ import annotations

import keyword
from collections.abc import Iterator, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from pcomm.integration.config.strict_section import INT64, UNICODE, listed, one_or_listed, section

__all__ = [
    "SECTIONS",
    "WHOLE_STAGE",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "Dtype",
    "Key",
    "MetricsConfig",
    "ModelConfig",
    "ParallelConfig",
    "Resolved",
    "ResolvedModel",
    "ResolvedParallel",
    "ResolvedTrain",
    "SampleConfig",
    "TrainConfig",
    "attribute_of",
    "given",
    "keys",
    "section",
    "values_of",
]


Count = Annotated[NonNegativeInt, INT64]
Size = Annotated[PositiveInt, INT64]
AutoSize = Size | Literal["auto"]
Stage = Annotated[int, Field(ge=1, le=3)]
AutoStage = Stage | Literal["auto"]
Share = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, UNICODE]
Suffix = Annotated[str, UNICODE, Field(pattern=r"^\.[^./\\\s]+$")]
Dtype = Literal["fp32", "bf16"]

WHOLE_STAGE: Final = 3
"""What `parallel.zero` is where it is "auto"."""


@section("model")
class ModelConfig:
    """The shape of the model, and what its weights start from."""

    from_: Text = ""
    """Hugging Face directory whose model, weights and tokenizer the run starts with. The keys below
    are then those of its config.json; one that says something else is an error. Empty: a new
    model."""

    pattern: Annotated[str, Field(pattern="^[AMG]+$")] = "A"
    """Mixer of each block, repeated to fill `layers`: A attention, M Mamba-2, G Gated DeltaNet."""

    layers: Annotated[int, Field(gt=0, le=2**16)] = 4
    """Number of blocks."""

    width: Size = 256
    """Width of the residual stream."""

    heads: Size = 4
    """Query heads of an attention block."""

    kv_heads: AutoSize = "auto"
    """Key and value heads, a divisor of `heads`. auto: as many as `heads`."""

    head_dim: AutoSize = "auto"
    """Width of one head. auto: `width` / `heads`."""

    mlp_width: Size | Literal["auto", "none"] = "auto"
    """Hidden width of the MLP. auto: 8/3 of `width`, up to a multiple of 64. none: blocks without
    experts have a mixer and its norm, as in Mamba-2, and nothing else."""

    experts: Count = 0
    """Experts in each block that has them instead of an MLP."""

    experts_per_token: Size = 2
    """How many of them each token goes to."""

    expert_width: AutoSize = "auto"
    """Hidden width of an expert. auto: that of `mlp_width`."""

    expert_weights: Literal["auto", "normalised", "probability"] = "auto"
    """Factor of an expert's result: the router's probability, or that over the sum of the token's
    experts. auto: normalised, and the probability where a token has one expert."""

    shared_expert_width: Count = 0
    """Hidden width of the expert that all tokens pass; 0 is no such expert."""

    shared_expert_gate: bool = False
    """Multiply its result by a number between 0 and 1 for each token, as in Qwen3-Next."""

    moe_every: Size = 1
    """Every n-th block has experts, the last of each n blocks."""

    balance_loss: NonNegativeFloat = 0.01
    """Weight of the loss that spreads tokens evenly over the experts."""

    gdn_key_heads: AutoSize = "auto"
    """Key heads of a GDN block. auto: as many as `kv_heads`."""

    gdn_value_heads: AutoSize = "auto"
    """Its value heads, a multiple. auto: as many as `heads`."""

    gdn_key_dim: AutoSize = "auto"
    """Width of a GDN key. auto: that of `head_dim`."""

    gdn_value_dim: AutoSize = "auto"
    """Width of a GDN value. auto: that of `head_dim`."""

    mamba_heads: AutoSize = "auto"
    """Heads of a Mamba-2 block. auto: twice `width` in heads."""

    mamba_head_dim: AutoSize = "auto"
    """Width of one of them. auto: that of `head_dim`."""

    mamba_groups: Size = 1
    """Groups that share input and output matrices."""

    mamba_state_dim: Size = 64
    """Rows of a Mamba-2 state."""

    mamba_conv_bias: bool = True
    """Add a bias in the convolution of a Mamba-2 block."""

    mamba_min_time_step: NonNegativeFloat = 0.0
    """Shortest time step of a Mamba-2 head."""

    mamba_max_time_step: PositiveFloat | Literal["none"] = "none"
    """Longest time step of a Mamba-2 head. none: no limit."""

    conv_width: Size = 4
    """Tokens that the convolution of a GDN or Mamba-2 block sees."""

    qk_norm: bool = False
    """Normalise queries and keys before the rotation."""

    qkv_bias: bool = False
    """Add a bias to queries, keys and values, as in Qwen2."""

    attention_gate: bool = False
    """Multiply the result of attention by numbers between 0 and 1 that the block's input decides,
    as in Qwen3-Next."""

    tie_embeddings: bool = False
    """Use the embedding's weights as the output head."""

    rope_theta: PositiveFloat = 10_000.0
    """Base of the rotary positions."""

    rotary_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of a head that rotary positions turn: its first numbers."""

    rope_scaling: Literal["none", "linear", "llama3"] = "none"
    """How the rotary positions are stretched for contexts longer than those first trained with:
    linear turns all pairs slower, llama3 only those that turn slowly, as in Llama 3.1."""

    rope_factor: PositiveFloat = 1.0
    """Factor by which they turn slower."""

    rope_low_frequency: PositiveFloat = 1.0
    """With llama3: pairs with fewer turns in the original context are slowed by all of it."""

    rope_high_frequency: PositiveFloat = 4.0
    """With llama3: pairs with more turns in the original context are not slowed."""

    rope_original_context: Size = 8192
    """With llama3: tokens of the context first trained with."""

    norm_eps: NonNegativeFloat = 1e-5
    """Added to the mean square in each RMSNorm."""

    norm_zero_centred: bool = False
    """Keep the weights of the norms as what is added to 1, as in Qwen3-Next."""

    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights."""


@section("parallel")
class ParallelConfig:
    """How the ranks share the work. Losses do not depend on it, except by rounding."""

    dp: AutoSize = "auto"
    """Data-parallel replicas. auto: what the other axes leave of the world size."""

    tp: Size = 1
    """Tensor-parallel ranks, which share every layer."""

    cp: Size = 1
    """Context-parallel ranks, which share the tokens of each sequence."""

    cp_strategy: Literal["auto", "heads", "docs", "state", "gather"] = "auto"
    """How they share them, see pcomm-gdn-cp; auto takes what costs least, batch by batch."""

    ep: Size = 1
    """Ranks that share the experts of a layer; taken from those of dp, cp and tp."""

    data: Literal["replicate", "shard", "hybrid"] = "replicate"
    """What ranks of dp and cp hold: all parameters, shards of them, or shards of replicas."""

    shard_ranks: AutoSize = "auto"
    """Ranks of dp x cp that share a replica, to be given with `data = hybrid`. auto: one with
    `replicate`, all with `shard`."""

    zero: AutoStage = "auto"
    """What shards keep whole: 1 parameters and gradients, 2 parameters in a step, 3 nothing. auto:
    3, and 1 with `--resilient`, which has no other."""

    sequence: bool = False
    """Split the tokens between the layers over the `tp` ranks, too."""

    failed: Annotated[tuple[Text, ...], BeforeValidator(listed)] = ()
    """Ranks of the grid that are not there, such as "dp=0,tp=3": their replicas train with the
    ranks of tp that are left, and with as much less of the batch. Then `dp` is a number, and as
    many processes fewer are started."""

    lost_replica: Literal["absorb", "shrink"] = "absorb"
    """With `--resilient`, what becomes of the rows of a replica that is lost whole. absorb: the
    others take them, so that the batch stays. shrink: the batch is smaller until the replica is
    back; its rows come in a later step, and a run of as many steps reads fewer tokens."""

    copies: Size = 2
    """With `--resilient` and `data = shard`, ranks that have each part of the optimizer's state, on
    different hosts where there are as many. A death costs no step while one of them is left."""


@section("train")
class TrainConfig:
    """Length, batch and optimizer of a training run."""

    steps: Size = 200
    """Optimizer steps."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Decides the weights and the order of the documents."""

    dtype: Literal["auto", "fp32", "bf16"] = "fp32"
    """Compute type; bf16 is autocast over fp32. Shards are then gathered in bf16 where forward
    reads no more; gradients are always summed in fp32, since each sum in bf16 rounds again. auto:
    bf16 where the GPU or processor of every rank has instructions for it and a product is faster
    with them, else fp32; a run that goes on keeps what its checkpoint was trained in."""

    residual: Literal["fp32", "compute"] = "fp32"
    """Type of the sum that blocks add to. compute: that of `dtype`, which with bf16 halves what is
    kept and moved between blocks, and rounds each sum to 8 bits."""

    recompute: bool = False
    """Compute each block again in backward and keep its input alone: the same numbers from less
    memory, in more time. What ranks send in a forward of layers they send again."""

    compile: bool = False
    """Compile each block with torch.compile; the first step then takes its time. Attention, the
    cores of recurrent mixers and what ranks exchange stay outside of the graphs."""

    sequence_length: Size = 256
    """Tokens in a row; attention sees at most one row."""

    global_batch_tokens: Size = 8192
    """Tokens in one optimizer step, over all ranks."""

    micro_batch_tokens: AutoSize = "auto"
    """Tokens that one rank computes at once. auto: its whole share of the batch."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """adamw, or muon: torch's Muon for the matrices of the layers in blocks (queries, keys and
    values are three), and AdamW for the embedding, the head, norms, experts and all else. Muon
    needs whole matrices, so parameters may not be split over ranks."""

    learning_rate: NonNegativeFloat = 1e-3
    """AdamW's learning rate at the end of the warm-up."""

    muon_learning_rate: NonNegativeFloat = 0.02
    """That of Muon, which follows the same schedule. For a matrix of more rows than columns it is
    multiplied by the root of their ratio, as Keller Jordan does."""

    muon_momentum: Share = 0.95
    """Muon's momentum, of Nesterov's kind."""

    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """What follows the warm-up: half a cosine or a straight line down to the last step; wsd, the
    same rate and a decay over the last `decay_steps`; or the same rate throughout, which lets a run
    be made longer at any time."""

    min_learning_rate_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """What the schedule leaves of it at the last step."""

    decay_steps: AutoSize = "auto"
    """With wsd: steps of the decay, which ends with the last step. auto: a fifth of `steps`."""

    decay_type: Literal["linear", "cosine", "sqrt"] = "linear"
    """With wsd: form of the decay, where p goes from 0 to 1: 1 - p, (1 + cos(pi p)) / 2, or
    1 - sqrt(p)."""

    warmup_steps: Count = 20
    """Steps over which the learning rate rises from 0; a shorter run ends on the way."""

    rewarm_steps: Count = 0
    """When a run goes on with another schedule, as after more `steps`: so many steps lead from the
    old learning rate to the new one. Over 0 steps it jumps, which is said."""

    weight_decay: NonNegativeFloat = 0.1
    """Decay of either optimizer, for matrices only."""

    betas: Annotated[tuple[Share, Share], BeforeValidator(listed)] = (0.9, 0.95)
    """AdamW's two decay rates of the averages."""

    peak_tflops: PositiveFloat | Literal["auto"] = "auto"
    """What the device of one rank can do in `dtype`, in 10^12 operations a second, as its data
    sheet says; the rows tell the share that the run reaches of it (MFU). auto: what a product of
    two large matrices reaches at the start."""

    clip_norm: PositiveFloat | Literal["none"] = 1.0
    """Largest global norm of the gradient. none: no clipping."""

    on_nan: Literal["stop", "skip"] = "stop"
    """What to do when the loss or the gradient is not a finite number: stop and keep the last good
    checkpoint, or leave out that step's update on all ranks and go on."""

    skip_limit: Size = 10
    """With `on_nan = skip`: so many steps skipped in a row end the run."""

    eval_every: Size | Literal["end", "none"] = 100
    """Steps between evaluations, with one after the last step. end: only that one. none: no
    evaluation; `data.held_out = 0` then leaves all text to training."""

    eval_tokens: Size | Literal["all"] = 65_536
    """Held-out tokens of an evaluation. all: all there are."""

    sample_every: Count = 0
    """Steps between samples, which continue the prompts of `[sample]` in `samples.jsonl`. 0: one
    sample at the end."""

    profile_steps: Annotated[tuple[Size, Size] | Literal["none"], BeforeValidator(listed)] = "none"
    """First and last step that torch's profiler records, from 1, such as [10, 12]. Each rank writes
    a trace into `profile` in the run's folder, and on a GPU its allocations. none: nothing."""


@section("data")
class DataConfig:
    """Which text is learnt, and how it becomes tokens."""

    path: Annotated[tuple[Text, ...], BeforeValidator(one_or_listed)] = ()
    """Files, folders or globs; one alone needs no list. Of a folder all files below it that can be
    read: those of `text_suffixes`, .jsonl and .parquet, and all but the last as .gz or .zst, too.
    Empty: the source of Python's own library."""

    weights: Annotated[tuple[PositiveFloat, ...], BeforeValidator(listed)] = ()
    """Share of the rows that each entry of `path` gets, in their order, such as [3, 1]; they need
    not add up to 1. Empty: each document once an epoch."""

    text_suffixes: Annotated[tuple[Suffix, ...], BeforeValidator(one_or_listed)] = (
        *(".txt", ".md", ".rst", ".tex", ".py", ".c", ".h", ".cpp", ".go", ".java"),
        *(".js", ".ts", ".rs", ".sh"),
    )
    """Endings of files of plain text, each of which is one document."""

    encoding: Text = "utf-8"
    """How they are written. With utf-8 a byte order mark at the beginning decides instead."""

    errors: Literal["strict", "replace", "ignore"] = "strict"
    """Bytes that `encoding` does not have: an error, the sign U+FFFD, or left out; the run says in
    how many files."""

    cache: Text = "auto"
    """Folder in which tokens are kept for other runs on the same text. auto: what `PCOMM_CACHE`
    says, else pcomm in the user's cache folder. none: no such folder."""

    text_key: Text = "text"
    """Key of the text in a .jsonl line, column in a .parquet file."""

    # The trainer of the tokenizer reserves memory for every id at once, and the process dies where
    # there is none; the largest vocabularies in use have 2**20.
    vocabulary: Annotated[int, Field(ge=1, le=2**20)] = 2048
    """Token ids: 256 bytes, the end of a document, and merges. With `model.from` that of its
    model."""

    held_out: Share = 0.05
    """Share of the documents kept for evaluation."""


@section("checkpoint")
class CheckpointConfig:
    """When the run is saved, so that it can be resumed."""

    every: Size | Literal["end"] = 100
    """Steps between checkpoints. end: only after the last step."""

    keep: Size | Literal["all"] = 2
    """How many of the newest checkpoints stay. all: every one."""

    keep_best: bool = False
    """Keep, beside these, the checkpoint with the fewest bits per byte of those that were evaluated
    when they were saved."""

    asynchronous: bool = True
    """Write the files while training goes on."""


@section("metrics")
class MetricsConfig:
    """Where the numbers of a run go, beside `metrics.jsonl`, and TensorBoard if it is installed."""

    wandb: Literal["none", "online", "offline"] = "none"
    """Weights & Biases, by the package `wandb`: online sends as the run goes on, offline keeps the
    numbers in the run's folder for `wandb sync`. What it needs is asked when the run starts; where
    that fails the run goes on, and says so. A dry run asks nothing."""

    wandb_project: Annotated[str, UNICODE, Field(min_length=1)] = "pcomm"
    """Its project; the run has the name of its folder. `WANDB_API_KEY`, `WANDB_ENTITY` and other
    variables of the client count."""


@section("sample")
class SampleConfig:
    """The texts that are written at the end of a run, and in it with `train.sample_every`."""

    prompt: Text = "def"
    """Text to continue. Empty: no sample."""

    prompts: Annotated[tuple[Text, ...], BeforeValidator(listed)] = ()
    """More texts to continue."""

    max_tokens: Count = 128
    """Most tokens to write."""

    temperature: NonNegativeFloat = 0.8
    """0 takes the likeliest token; more is more surprising."""


SECTIONS: Mapping[str, type[Any]] = MappingProxyType(
    {
        "model": ModelConfig,
        "parallel": ParallelConfig,
        "train": TrainConfig,
        "data": DataConfig,
        "checkpoint": CheckpointConfig,
        "metrics": MetricsConfig,
        "sample": SampleConfig,
    }
)
"""The class of each section, in their order."""


@section("")
class Config:
    """Everything a run can be told."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = Field(default_factory=MetricsConfig)
    sample: SampleConfig = Field(default_factory=SampleConfig)


class Key(NamedTuple):
    """One key of the configuration, as the loader and the documentation see it."""

    section: str
    name: str
    default: object
    help: str

    @property
    def attribute(self) -> str:
        """Name of the dataclass field, which differs where the key is a word of Python."""
        return attribute_of(self.name)


def keys() -> Iterator[Key]:
    """Every key there is, in the order of the sections."""
    for name, cls in SECTIONS.items():
        for item in fields(cls):
            info = cls.__pydantic_fields__[item.name]
            yield Key(name, item.name.rstrip("_"), info.default, " ".join(info.description.split()))


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
    zero: Stage = WHOLE_STAGE


@section("train")
class ResolvedTrain(TrainConfig):
    """`TrainConfig` of a known number of ranks."""

    dtype: Dtype = Field(...)
    micro_batch_tokens: Size = Field(...)


@section("")
class Resolved(Config):
    """A `Config` that fits a number of ranks, without `auto`; see `validate` of the rules."""

    model: ResolvedModel = Field(...)
    parallel: ResolvedParallel = Field(...)
    train: ResolvedTrain = Field(...)


def attribute_of(key: str) -> str:
    """The dataclass field of a key: its name, with a `_` behind it where that is Python's word."""
    return f"{key}_" if keyword.iskeyword(key) else key


def values_of(part: Any) -> dict[str, Any]:
    """Values of a section by the names of its keys; sections in it stay as they are."""
    return {item.name: getattr(part, item.name) for item in fields(part)}


def given(value: int | Literal["auto"], derived: int) -> int:
    """`value`, or `derived` in place of `auto`."""
    return derived if value == "auto" else value
