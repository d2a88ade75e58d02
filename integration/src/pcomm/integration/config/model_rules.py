"""Which blocks a model has, and whether its sizes fit together, on any number of ranks."""

from __future__ import annotations

from typing import Literal

from pcomm.core.errors import ConfigError
from pcomm.integration.config.sections import ModelConfig, ResolvedModel, given, values_of

__all__ = [
    "expert_blocks",
    "mixer_units",
    "mixers",
    "must_divide",
    "must_share_heads",
    "output_heads",
    "resolve_model",
    "split_dimensions",
]


def mixers(model: ModelConfig) -> str:
    """The mixer letter of each block: `pattern` repeated to `layers` letters.

    Raises:
        ConfigError: `layers` is no multiple of the pattern's length.
    """
    must_divide(
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


def split_dimensions(model: ResolvedModel, vocabulary: int) -> list[tuple[str, int, str]]:
    """What tensor-parallel ranks share of this model: key, number, and what it counts."""
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
    found = [row for letter, rows in by_mixer.items() if letter in model.pattern for row in rows]
    found.append(("data.vocabulary", vocabulary, "rows of the embedding"))
    if any(expert_blocks(model)):
        shared = model.shared_expert_width
        found.append(("model.shared_expert_width", shared, "columns of the shared expert"))
    if not all(expert_blocks(model)) and model.mlp_width != "none":
        found.append(("model.mlp_width", model.mlp_width, "columns of the MLP"))
    return found


def mixer_units(model: ResolvedModel) -> dict[str, int]:
    """Number of units that ranks of tp share in each kind of mixer, by its letter.

    A unit stays whole: a key head with the heads that it serves, or a group of Mamba-2.
    """
    units = {"A": model.kv_heads, "G": model.gdn_key_heads, "M": model.mamba_groups}
    return {letter: count for letter, count in units.items() if letter in model.pattern}


def output_heads(model: ResolvedModel) -> list[tuple[str, str, int]]:
    """Heads that ranks of cp share with strategy `heads`: letter of the mixer, key, number."""
    rows = (
        ("A", "model.heads", model.heads),
        ("G", "model.gdn_value_heads", model.gdn_value_heads),
        ("M", "model.mamba_heads", model.mamba_heads),
    )
    return [row for row in rows if row[0] in model.pattern]


def must_share_heads(key: str, where: str, heads: int, cp: int) -> None:
    """Refuse ranks of cp that cannot share heads evenly, as strategy `heads` needs.

    Args:
        key: Key of the heads in the configuration; see `output_heads`.
        where: Rank of tp that has them.
        heads: Number of heads there.
        cp: Number of ranks of cp.

    Raises:
        ConfigError: `heads` is no multiple of `cp`.
    """
    must_divide(
        key,
        (f"{key} on {where}", heads),
        ("parallel.cp", cp),
        "With parallel.cp_strategy = 'heads' each rank of cp works on as many heads; "
        "the other strategies need no heads to divide.",
    )


def resolve_model(model: ModelConfig) -> ResolvedModel:
    """`model` with a number in place of every `auto`, on any number of ranks.

    Raises:
        ConfigError: Two sizes do not divide, or two keys do not fit together.
    """
    mixers(model)
    kv_heads = given(model.kv_heads, model.heads)
    must_divide(
        "model.kv_heads",
        ("model.heads", model.heads),
        ("model.kv_heads", kv_heads),
        "Each key and value head serves the same number of query heads.",
    )
    if model.head_dim == "auto":
        must_divide(
            "model.head_dim",
            ("model.width", model.width),
            ("model.heads", model.heads),
            'With model.head_dim = "auto" the heads share the width evenly.',
        )
    head_dim = given(model.head_dim, model.width // model.heads)
    must_divide(
        "model.head_dim",
        ("the width of one head", head_dim),
        ("a pair", 2),
        "Rotary positions turn the numbers of a head in pairs.",
    )
    _check_rotation(model, head_dim)
    _check_time_steps(model)
    # 8/3 keeps the gated MLP's three matrices as large as the plain MLP's two of 4 widths.
    wide = -(-8 * model.width // (3 * 64)) * 64
    mlp_width = model.mlp_width if model.mlp_width == "none" else given(model.mlp_width, wide)
    mamba_head_dim = given(model.mamba_head_dim, head_dim)
    derived = {
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "mlp_width": mlp_width,
        "expert_width": _expert_width(model, mlp_width),
        "gdn_key_heads": given(model.gdn_key_heads, kv_heads),
        "gdn_value_heads": given(model.gdn_value_heads, model.heads),
        "gdn_key_dim": given(model.gdn_key_dim, head_dim),
        "gdn_value_dim": given(model.gdn_value_dim, head_dim),
        "mamba_heads": given(model.mamba_heads, max(1, 2 * model.width // mamba_head_dim)),
        "mamba_head_dim": mamba_head_dim,
    }
    resolved = ResolvedModel(**{**values_of(model), **derived})
    if "G" in model.pattern:
        must_divide(
            "model.gdn_value_heads",
            ("model.gdn_value_heads", resolved.gdn_value_heads),
            ("model.gdn_key_heads", resolved.gdn_key_heads),
            "Each key head of a GDN block serves the same number of value heads.",
        )
    if "M" in model.pattern:
        must_divide(
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


def must_divide(asked: str, whole: tuple[str, int], parts: tuple[str, int], why: str) -> None:
    """Refuse a size that is no multiple of another one; local.

    Args:
        asked: Name of the key, for the error.
        whole: Name and value of the size.
        parts: Name and value of what has to divide it.
        why: The reason, for the error.
    """
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
