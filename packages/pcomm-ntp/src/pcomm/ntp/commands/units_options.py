"""Units from the options of a command: from a JSON file, or from the sizes of a model."""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pcomm.core.errors import ConfigError, near_misses
from pcomm.ntp.commands.option_files import text_of
from pcomm.ntp.planning.units import KINDS, Units

__all__ = ["add_units_options", "units_from_json", "units_of_options"]


def add_units_options(parser: argparse.ArgumentParser) -> None:
    """`--units`, or `--heads`, `--kv-heads`, `--head-dim`, `--mlp`, `--vocabulary`."""
    parser.add_argument(
        "--units",
        type=Path,
        metavar="FILE",
        help="JSON of the units of parameters, such as "
        '{"*.qkv.weight": {"kind": "gqa", "q": 32, "kv": 8, "dim": 128}}',
    )
    sizes = parser.add_argument_group("sizes of a model, instead of --units")
    sizes.add_argument("--heads", type=int, metavar="N", help="number of query heads")
    sizes.add_argument(
        "--kv-heads", type=int, metavar="N", help="number of key heads; without it --heads"
    )
    sizes.add_argument(
        "--head-dim", type=int, default=128, metavar="N", help="rows of a head (%(default)s)"
    )
    sizes.add_argument("--mlp", type=int, metavar="N", help="columns of the gated MLP")
    sizes.add_argument("--vocabulary", type=int, metavar="N", help="rows of the vocabulary")


def units_of_options(arguments: argparse.Namespace) -> dict[str, Units]:
    """The units that the options name.

    Attention and MLP are weighted by their multiplications for a token, where the heads together
    are as wide as the model. The vocabulary, which is there once and not in each layer, has no
    weight.

    Raises:
        ConfigError: No units, both a file and sizes, or sizes that no model has.
    """
    sizes = {name: getattr(arguments, name) for name in ("heads", "kv_heads", "mlp", "vocabulary")}
    given = [f"--{name.replace('_', '-')}" for name, size in sizes.items() if size is not None]
    if arguments.units is not None and given:
        raise ConfigError(
            f"pcomm plan --units {arguments.units}",
            found=f"{' '.join(given)} as well",
            why="The file describes all units, and the sizes would describe them again.",
            fix="Leave one of the two away.",
        )
    if arguments.units is not None:
        return units_from_json(text_of(arguments.units, "--units", "the units of parameters"))
    if given in ([], ["--kv-heads"]):
        raise ConfigError(
            "pcomm plan: units",
            found="neither --units nor --heads, --mlp or --vocabulary",
            why="How a cut comes out depends on what stays whole, such as heads.",
            fix="Give the sizes of the model, such as --heads 32 --kv-heads 8 --mlp 11008.",
        )
    heads, mlp = sizes["heads"] or 0, sizes["mlp"] or 0
    key_heads = heads if sizes["kv_heads"] is None else sizes["kv_heads"]
    dim, found = arguments.head_dim, {}
    if sizes["heads"] is not None:
        # Queries and the output are as wide as all heads, keys and values as the key heads.
        work = max(0, 2 * (heads + key_heads) * dim)
        found["attention"] = Units.gqa(q=heads, kv=key_heads, dim=dim, work=work)
    if sizes["mlp"] is not None:
        found["mlp"] = Units.gated(mlp, work=max(0, 3 * mlp))
    if sizes["vocabulary"] is not None:
        found["vocabulary"] = Units.vocab(sizes["vocabulary"])
    return found


def units_from_json(text: str) -> dict[str, Units]:
    """Units by name or pattern, from an object of objects.

    Each inner object has a `kind`, which is a class method of `Units`, and its arguments.

    Raises:
        ConfigError: Text of another form, or sizes that no parameter has.
    """
    try:
        found = json.loads(text)
    except ValueError as error:
        raise _not_units(f"no JSON: {error}") from error
    if not isinstance(found, dict) or not found:
        raise _not_units(f"{found!r} at the top")
    return {name: _one(name, entry) for name, entry in found.items()}


def _one(name: str, entry: Any) -> Units:
    if not isinstance(entry, dict):
        raise _not_units(f"{entry!r} for {name!r}")
    given = dict(entry)
    kind = given.pop("kind", None)
    if not isinstance(kind, str) or kind not in KINDS:
        raise ConfigError(
            f"units of {name!r}: kind {kind!r}",
            found=f"kinds {', '.join(KINDS)}",
            why="The kind says which positions belong together.",
            fix=near_misses(str(kind), KINDS),
        )
    make: Callable[..., Units] = getattr(Units, kind)
    wanted = inspect.signature(make).parameters
    if unknown := sorted(set(given) - set(wanted)):
        raise ConfigError(
            f"units of {name!r}: {unknown[0]!r}",
            found=f"{kind} has {', '.join(wanted) or 'no arguments'}",
            why="The arguments are those of the class method of Units.",
            fix=near_misses(unknown[0], wanted),
        )
    missing = [n for n, own in wanted.items() if own.default is own.empty and n not in given]
    wrong = [n for n, value in given.items() if not _is_size(value, is_list=n == "sections")]
    if missing or wrong:
        what = f"no {missing[0]!r}" if missing else f"{wrong[0]}={given[wrong[0]]!r}"
        raise ConfigError(
            f"units of {name!r}: {kind}",
            found=what,
            why="Sizes are whole numbers, sections a list of them, and none but work and block "
            "may be left away.",
            fix=f"Give {(missing or wrong)[0]!r} as a whole number, or a list of them.",
        )
    return make(**given)


def _is_size(value: object, *, is_list: bool) -> bool:
    if is_list:
        return isinstance(value, list) and all(_is_size(one, is_list=False) for one in value)
    return isinstance(value, int) and not isinstance(value, bool)


def _not_units(found: str) -> ConfigError:
    return ConfigError(
        "pcomm plan --units",
        found=found,
        why="Units are an object whose keys are names of parameters, or patterns.",
        fix='Write them like {"*.fc1.weight": {"kind": "gated", "columns": 11008}}.',
    )
