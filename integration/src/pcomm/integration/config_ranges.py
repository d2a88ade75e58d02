"""What each number of a configuration may be, on its own: integers and words, no torch.

Bounds that involve two keys are in `config_rules`.
"""

from __future__ import annotations

from collections.abc import Callable

from pcomm.core.errors import ConfigError
from pcomm.integration.config import Config

__all__ = ["check_ranges"]

# A test and its words.
_Rule = tuple[Callable[[float], bool], str]
_AT_LEAST_0: _Rule = (lambda value: value >= 0, "at least 0")
_AT_LEAST_1: _Rule = (lambda value: value >= 1, "at least 1")
_ABOVE_0: _Rule = (lambda value: value > 0, "more than 0")
_SHARE: _Rule = (lambda value: 0 <= value < 1, "at least 0 and less than 1")
_RATIO: _Rule = (lambda value: 0 <= value <= 1, "between 0 and 1")
_STAGE: _Rule = (lambda value: value in (1, 2, 3), "1, 2 or 3")
_SEED: _Rule = (lambda value: 0 <= value < 2**63, "between 0 and 2**63 - 1")
# 256 bytes and the end of a document. The trainer of the tokenizer reserves memory for every id at
# once, and the process dies where there is none; the largest vocabularies in use have 2**20.
_VOCABULARY: _Rule = (
    lambda value: 257 <= value <= 2**20,
    f"at least 257 (256 bytes, one end) and at most {2**20}",
)

_RULES: dict[str, _Rule] = {
    "model.layers": _AT_LEAST_1,
    "model.width": _AT_LEAST_1,
    "model.heads": _AT_LEAST_1,
    "model.kv_heads": _AT_LEAST_0,
    "model.head_dim": _AT_LEAST_0,
    "model.mlp_width": _AT_LEAST_0,
    "model.experts": _AT_LEAST_0,
    "model.experts_per_token": _AT_LEAST_1,
    "model.expert_width": _AT_LEAST_0,
    "model.shared_expert_width": _AT_LEAST_0,
    "model.moe_every": _AT_LEAST_1,
    "model.balance_loss": _AT_LEAST_0,
    "model.gdn_key_heads": _AT_LEAST_0,
    "model.gdn_value_heads": _AT_LEAST_0,
    "model.gdn_key_dim": _AT_LEAST_0,
    "model.gdn_value_dim": _AT_LEAST_0,
    "model.mamba_heads": _AT_LEAST_0,
    "model.mamba_head_dim": _AT_LEAST_0,
    "model.mamba_groups": _AT_LEAST_0,
    "model.mamba_state_dim": _AT_LEAST_1,
    "model.conv_width": _AT_LEAST_1,
    "model.rope_theta": _ABOVE_0,
    "model.norm_eps": _AT_LEAST_0,
    "model.init_std": _ABOVE_0,
    "parallel.dp": _AT_LEAST_0,
    "parallel.tp": _AT_LEAST_1,
    "parallel.cp": _AT_LEAST_1,
    "parallel.ep": _AT_LEAST_1,
    "parallel.shard_ranks": _AT_LEAST_0,
    "parallel.zero": _STAGE,
    "train.steps": _AT_LEAST_1,
    "train.seed": _SEED,
    "train.sequence_length": _AT_LEAST_1,
    "train.global_batch_tokens": _AT_LEAST_1,
    "train.micro_batch_tokens": _AT_LEAST_0,
    "train.learning_rate": _AT_LEAST_0,
    "train.min_learning_rate_ratio": _RATIO,
    "train.warmup_steps": _AT_LEAST_0,
    "train.rewarm_steps": _AT_LEAST_0,
    "train.weight_decay": _AT_LEAST_0,
    "train.clip_norm": _AT_LEAST_0,
    "train.skip_limit": _AT_LEAST_1,
    "train.eval_every": _AT_LEAST_0,
    "train.eval_tokens": _AT_LEAST_0,
    "data.vocabulary": _VOCABULARY,
    "data.held_out": _SHARE,
    "checkpoint.every": _AT_LEAST_0,
    "checkpoint.keep": _AT_LEAST_0,
    "sample.max_tokens": _AT_LEAST_0,
    "sample.temperature": _AT_LEAST_0,
}


def check_ranges(config: Config) -> None:
    """Refuse a number that is out of its range.

    Raises:
        ConfigError: Names the first such key, and what its value has to be.
    """
    for key, rule in _RULES.items():
        section, name = key.split(".")
        _check_range(key, getattr(getattr(config, section), name), rule)
    for beta in config.train.betas:
        _check_range("train.betas", beta, _SHARE)


def _check_range(key: str, value: float, rule: _Rule) -> None:
    holds, words = rule
    if not holds(value):
        raise ConfigError(
            key,
            found=f"the value {value!r}",
            why=f"It has to be {words}.",
            fix=f"Set {key} to a value that is {words}.",
        )
