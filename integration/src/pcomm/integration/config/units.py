"""Units of the parameters of each mixer and MLP: what ranks that are left share unevenly."""

from __future__ import annotations

from collections.abc import Iterator

from pcomm.integration.config.model_rules import expert_blocks, mixers
from pcomm.integration.config.sections import ResolvedModel
from pcomm.ntp import Units

__all__ = ["units_of_model"]


def units_of_model(config: ResolvedModel, vocabulary: int) -> dict[str, Units]:
    """The units of every split parameter, by its name or a pattern of names, for `pcomm.ntp.plan`.

    They are those of the model's own layouts: a key head with the query heads that read it or the
    value heads that it serves, a group of Mamba-2 with its heads, a column of an MLP, a row of the
    vocabulary. Parameters that are not listed are whole on every rank. The work of units is the
    number of weights that a token meets in them. Local; integers only.

    Args:
        config: The shape of the model.
        vocabulary: Number of token ids.
    """
    table = vocabulary * config.width
    found = {"embedding.weight": Units.vocab(vocabulary, work=table * config.tie_embeddings)}
    if not config.tie_embeddings:
        found["head.weight"] = Units.vocab(vocabulary, work=table)
    letters, experts = mixers(config), expert_blocks(config)
    for letter in sorted(set(letters)):
        numbers = [i for i, other in enumerate(letters) if other == letter]
        # One pattern for all blocks where they are alike; a number for each in a hybrid.
        is_only = len(numbers) == len(letters)
        for place in ["*"] if is_only else numbers:
            blocks = len(numbers) if is_only else 1
            for name, units in _mixer(letter, config, blocks):
                found[f"blocks.{place}.mixer.{name}"] = units
    if config.mlp_width != "none" and not all(experts):
        blocks = experts.count(False)
        found |= _mlp("blocks.*.mlp", config.mlp_width, config.width, blocks)
    if config.shared_expert_width and any(experts):
        blocks, width = experts.count(True), config.shared_expert_width
        found |= _mlp("blocks.*.mlp.shared", width, config.width, blocks)
    return found


def _mlp(prefix: str, hidden: int, width: int, blocks: int) -> dict[str, Units]:
    each = hidden * width * blocks
    return {
        f"{prefix}.gate_up.weight": Units.gated(hidden, work=2 * each),
        f"{prefix}.down.weight": Units.columns(hidden, work=each),
    }


def _mixer(letter: str, config: ResolvedModel, blocks: int) -> Iterator[tuple[str, Units]]:
    """Units of the parameters of a mixer, by their names in it."""
    if letter == "A":
        yield from _attention(config, blocks)
    elif letter == "G":
        yield from _gated_delta_net(config, blocks)
    else:
        yield from _mamba2(config, blocks)


def _attention(config: ResolvedModel, blocks: int) -> Iterator[tuple[str, Units]]:
    heads, key = config.kv_heads, config.head_dim
    queries = config.heads // heads * key
    sections = (queries, key, key, *((queries,) if config.attention_gate else ()))
    yield from _projections("qkv", heads, sections, queries, config.width * blocks)
    if config.qkv_bias:
        yield "qkv.bias", Units.fused(heads, sections=sections, work=0)


def _gated_delta_net(config: ResolvedModel, blocks: int) -> Iterator[tuple[str, Units]]:
    heads, key = config.gdn_key_heads, config.gdn_key_dim
    served = config.gdn_value_heads // heads
    value = served * config.gdn_value_dim
    sections = (key, key, value, value, served, served)
    yield from _projections("input", heads, sections, value, config.width * blocks)
    yield "conv_weight", Units.fused(heads, sections=(key, key, value), work=0)
    for name in ("a_log", "dt_bias"):
        yield name, Units.fused(heads, sections=(served,), work=0)


def _mamba2(config: ResolvedModel, blocks: int) -> Iterator[tuple[str, Units]]:
    groups, state = config.mamba_groups, config.mamba_state_dim
    sharing = config.mamba_heads // groups
    inner = sharing * config.mamba_head_dim
    sections = (inner, inner, state, state, sharing)
    yield from _projections("input", groups, sections, inner, config.width * blocks)
    convolved = ("conv_weight", "conv_bias") if config.mamba_conv_bias else ("conv_weight",)
    for name in convolved:
        yield name, Units.fused(groups, sections=(inner, state, state), work=0)
    for name in ("a_log", "dt_bias", "d"):
        yield name, Units.fused(groups, sections=(sharing,), work=0)
    yield "norm_weight", Units.fused(groups, sections=(inner,), work=0)


def _projections(
    name: str, count: int, sections: tuple[int, ...], out: int, weights: int
) -> Iterator[tuple[str, Units]]:
    """Units of the projection from the stream, and of the one back into it.

    Args:
        name: Name of the first one.
        count: Number of units.
        sections: Rows of a unit in each section of the first projection.
        out: Columns of a unit in the second one.
        weights: Weights of one row or column, over all blocks that share the pattern.
    """
    into = Units.fused(count, sections=sections, work=count * sum(sections) * weights)
    yield f"{name}.weight", into
    back = Units.fused(count, sections=(out,), work=count * out * weights)
    yield "output.weight", back
