"""What a run can be told: one frozen dataclass per section, each key explained where it stands.

A `Config` is a value. Recipes build it in Python, `config_file` reads it from TOML and from
`--set`, and `config_rules.validate` says whether it fits a number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Literal, NamedTuple, TypeVar, get_type_hints

__all__ = [
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "Key",
    "ModelConfig",
    "ParallelConfig",
    "SampleConfig",
    "TrainConfig",
    "keys",
]

T = TypeVar("T")


def _key(default: T, help: str) -> T:
    # Typed as its default, so that mypy sees the field's type and not dataclasses' Field.
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class ModelConfig:
    """The shape of the model. Sizes given as 0 are derived from the others."""

    pattern: str = _key(
        "A", "Mixer of each block, repeated to fill `layers`: A attention, M Mamba-2, G GDN."
    )
    layers: int = _key(4, "Number of blocks.")
    width: int = _key(256, "Width of the residual stream.")
    heads: int = _key(4, "Query heads of an attention block.")
    kv_heads: int = _key(0, "Key and value heads, a divisor of `heads`. 0: as many as `heads`.")
    head_dim: int = _key(0, "Width of one head. 0: `width` / `heads`.")
    mlp_width: int = _key(0, "Hidden width of the MLP. 0: 8/3 of `width`, up to a multiple of 64.")
    experts: int = _key(0, "Experts in each block that has them instead of an MLP. 0: none.")
    experts_per_token: int = _key(2, "How many of them each token goes to.")
    expert_width: int = _key(0, "Hidden width of an expert. 0: that of `mlp_width`.")
    shared_expert_width: int = _key(0, "Hidden width of the expert that all tokens pass. 0: none.")
    moe_every: int = _key(1, "Every n-th block has experts, the last of each n blocks.")
    balance_loss: float = _key(0.01, "Weight of the loss that spreads tokens evenly. 0: none.")
    gdn_key_heads: int = _key(0, "Key heads of a GDN block. 0: as many as `kv_heads`.")
    gdn_value_heads: int = _key(0, "Its value heads, a multiple. 0: as many as `heads`.")
    gdn_key_dim: int = _key(0, "Width of a GDN key. 0: that of `head_dim`.")
    gdn_value_dim: int = _key(0, "Width of a GDN value. 0: that of `head_dim`.")
    mamba_heads: int = _key(0, "Heads of a Mamba-2 block. 0: twice `width` in heads.")
    mamba_head_dim: int = _key(0, "Width of one of them. 0: that of `head_dim`.")
    mamba_groups: int = _key(0, "Groups that share input and output matrices. 0: one.")
    mamba_state_dim: int = _key(64, "Rows of a Mamba-2 state.")
    conv_width: int = _key(4, "Tokens that the convolution of a GDN or Mamba-2 block sees.")
    qk_norm: bool = _key(False, "Normalise queries and keys before the rotation.")
    tie_embeddings: bool = _key(False, "Use the embedding's weights as the output head.")
    rope_theta: float = _key(10_000.0, "Base of the rotary positions.")
    norm_eps: float = _key(1e-5, "Added to the mean square in each RMSNorm.")
    init_std: float = _key(0.02, "Standard deviation of the initial weights.")


@dataclass(frozen=True)
class ParallelConfig:
    """How the ranks share the work. Losses do not depend on it, except by rounding."""

    dp: int = _key(0, "Data-parallel replicas. 0: what the other axes leave of the world size.")
    tp: int = _key(1, "Tensor-parallel ranks, which share every layer.")
    cp: int = _key(1, "Context-parallel ranks, which share the tokens of each sequence.")
    cp_strategy: Literal["auto", "heads", "docs", "state", "gather"] = _key(
        "auto",
        "How they share them, see pcomm-gdn-cp; auto takes what costs least, batch by batch.",
    )
    ep: int = _key(1, "Ranks that share the experts of a layer; taken from those of dp, cp and tp.")
    data: Literal["replicate", "shard", "hybrid"] = _key(
        "replicate",
        "What ranks of dp and cp hold: all parameters, shards of them, or shards of replicas.",
    )
    shard_ranks: int = _key(0, "With `data = hybrid`: ranks of dp x cp that share a replica.")
    zero: int = _key(
        3, "What shards keep whole: 1 parameters and gradients, 2 parameters in a step, 3 nothing."
    )
    sequence: bool = _key(False, "Split the tokens between the layers over the `tp` ranks, too.")


@dataclass(frozen=True)
class TrainConfig:
    """Length, batch and optimizer of a training run."""

    steps: int = _key(200, "Optimizer steps.")
    seed: int = _key(0, "Decides the weights and the order of the documents.")
    dtype: Literal["fp32", "bf16"] = _key(
        "fp32",
        "Compute type; bf16 is autocast over fp32. Shards are then gathered in bf16 where forward "
        "reads no more; gradients are always summed in fp32, since each sum in bf16 rounds again.",
    )
    sequence_length: int = _key(256, "Tokens in a row; attention sees at most one row.")
    global_batch_tokens: int = _key(8192, "Tokens in one optimizer step, over all ranks.")
    micro_batch_tokens: int = _key(
        0, "Tokens one rank computes at once; 0: its whole share of the batch."
    )
    learning_rate: float = _key(1e-3, "Learning rate at the end of the warm-up.")
    schedule: Literal["cosine", "constant"] = _key(
        "cosine",
        "What follows the warm-up: half a cosine that ends with the last step, or the same rate "
        "throughout, which lets a run be made longer at any time.",
    )
    min_learning_rate_ratio: float = _key(0.1, "What the cosine leaves of it at the last step.")
    warmup_steps: int = _key(
        20, "Steps over which the learning rate rises from 0; a shorter run ends on the way."
    )
    rewarm_steps: int = _key(
        0,
        "When a run goes on with another schedule, as after more `steps`: so many steps lead from "
        "the old learning rate to the new one. 0: it jumps, which is said.",
    )
    weight_decay: float = _key(0.1, "AdamW's decay, for matrices only.")
    betas: tuple[float, float] = _key((0.9, 0.95), "AdamW's two decay rates of the averages.")
    clip_norm: float = _key(1.0, "Largest global norm of the gradient. 0: no clipping.")
    on_nan: Literal["stop", "skip"] = _key(
        "stop",
        "What to do when the loss or the gradient is not a finite number: stop and keep the last "
        "good checkpoint, or leave out that step's update on all ranks and go on.",
    )
    skip_limit: int = _key(10, "With `on_nan = skip`: so many steps skipped in a row end the run.")
    eval_every: int = _key(100, "Steps between evaluations. 0: only after the last step.")
    eval_tokens: int = _key(65_536, "Held-out tokens of an evaluation. 0: all there are.")


@dataclass(frozen=True)
class DataConfig:
    """Which text is learnt, and how it becomes tokens."""

    path: tuple[str, ...] = _key(
        (), "Files or globs: .txt, .jsonl, .parquet. Empty: the source of Python's own library."
    )
    text_key: str = _key("text", "Key of the text in a .jsonl line, column in a .parquet file.")
    vocabulary: int = _key(2048, "Token ids: 256 bytes, the end of a document, and merges.")
    held_out: float = _key(0.05, "Share of the documents kept for evaluation.")


@dataclass(frozen=True)
class CheckpointConfig:
    """When the run is saved, so that it can be resumed."""

    every: int = _key(100, "Steps between checkpoints. 0: only after the last step.")
    keep: int = _key(2, "How many of the newest checkpoints stay. 0: all.")
    asynchronous: bool = _key(True, "Write the files while training goes on.")


@dataclass(frozen=True)
class SampleConfig:
    """The text that is written at the end of a run."""

    prompt: str = _key("def", "Text to continue. Empty: no sample.")
    max_tokens: int = _key(128, "Most tokens to write.")
    temperature: float = _key(0.8, "0 takes the likeliest token; more is more surprising.")


@dataclass(frozen=True)
class Config:
    """Everything a run can be told."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)


class Key(NamedTuple):
    """One key of the configuration, as the loader and the documentation see it."""

    section: str
    name: str
    annotation: object
    default: object
    help: str


def keys() -> Iterator[Key]:
    """Every key there is, in the order of the sections."""
    for section, cls in get_type_hints(Config).items():
        annotations = get_type_hints(cls)
        for item in fields(cls):
            help = str(item.metadata["help"])
            yield Key(section, item.name, annotations[item.name], item.default, help)
