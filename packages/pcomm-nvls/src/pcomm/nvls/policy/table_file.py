"""The JSON form of the table: read strictly, and written so that a row is a line of a diff."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pcomm.core.errors import ConfigError, PcommError, near_misses
from pcomm.nvls.policy.bands import Band, Row

__all__ = ["read_bands", "write_bands"]

_T = TypeVar("_T")

_VERSION = 1
_FILE: dict[str, type] = {"version": int, "about": str, "bands": list}
_BAND: dict[str, type] = {
    "architectures": list,
    "operations": list,
    "world_sizes": list,
    "rows": list,
}
_ROW: dict[str, type] = {
    "algorithm": str,
    "max_bytes": int,
    "num_blocks": int,
    "num_warps": int,
    "source": str,
}


def read_bands(path: Path) -> tuple[str, tuple[Band, ...]]:
    """The text about a table, and its bands.

    Raises:
        ConfigError: The file cannot be read, is no JSON, has another version, or has keys or
            values that are unknown, missing, given twice or of another type.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_doubles)
    except (OSError, ValueError, RecursionError) as error:
        raise _wrong(path, f"{type(error).__name__}: {error}", "Give a JSON file.") from None
    _check_keys(path, "the file", content, _FILE)
    if content["version"] != _VERSION:
        fix = f"Write it again in version {_VERSION}, or install another pcomm-nvls."
        raise _wrong(path, f"version {content['version']}", fix)
    bands = [_band(path, f"bands[{i}]", band) for i, band in enumerate(content["bands"])]
    return content["about"], tuple(bands)


def write_bands(path: Path, about: str, bands: Sequence[Band]) -> None:
    """Write the file anew, beside the old one and then in its place."""
    begin = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        begin.write_text(_text(about, bands), encoding="utf-8")
        begin.replace(path)
    finally:
        begin.unlink(missing_ok=True)


def _text(about: str, bands: Sequence[Band]) -> str:
    heads = []
    for band in bands:
        head = {name: getattr(band, name) for name in _BAND if name != "rows"}
        rows = ",\n".join(f"   {json.dumps(asdict(row))}" for row in band.rows)
        keys = ",\n".join(f"  {json.dumps(key)}: {json.dumps(head[key])}" for key in head)
        heads.append(f' {{\n{keys},\n  "rows": [\n{rows}\n  ]\n }}')
    told = f'{{\n"version": {_VERSION},\n"about": {json.dumps(about)},\n"bands": [\n'
    return told + ",\n".join(heads) + "\n]\n}\n"


def _band(path: Path, place: str, content: Any) -> Band:
    _check_keys(path, place, content, _BAND)
    for key, kind in (("architectures", str), ("operations", str), ("world_sizes", int)):
        if not all(type(value) is kind for value in content[key]):
            found = f"{place}.{key} = {content[key]}"
            raise _wrong(path, found, f"Give a list of values of type {kind.__name__}.")
    if len(content["world_sizes"]) != 2:
        found = f"{place}.world_sizes = {content['world_sizes']}"
        raise _wrong(path, found, "Give two numbers: the least and the largest number of ranks.")
    rows = []
    for i, row in enumerate(content["rows"]):
        _check_keys(path, f"{place}.rows[{i}]", row, _ROW)
        rows.append(_made(path, f"{place}.rows[{i}]", partial(Row, **row)))
    lists = {key: tuple(value) for key, value in content.items()}
    return _made(path, place, partial(Band, **{**lists, "rows": tuple(rows)}))


def _made(path: Path, place: str, make: Callable[[], _T]) -> _T:
    try:
        return make()
    except PcommError as error:
        raise _wrong(path, f"{place}: {error.found}", error.fix) from None


def _check_keys(path: Path, place: str, content: Any, known: dict[str, type]) -> None:
    if not isinstance(content, dict):
        raise _wrong(path, f"{place} is {content!r}", "Give an object with keys.")
    for key in content:
        if key not in known:
            raise _wrong(path, f"{place} has the key {key!r}", near_misses(key, known))
    for key, kind in known.items():
        if key not in content:
            raise _wrong(path, f"{place} has no {key!r}", f"Add {key!r}.")
        # Not isinstance: true is an int, and no number of bytes.
        if type(content[key]) is not kind:
            found = f"{place}.{key} = {content[key]!r}"
            raise _wrong(path, found, f"Give a value of type {kind.__name__}.")


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        double = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {double!r} stands twice in one object")
    return content


def _wrong(path: Path, found: str, fix: str) -> ConfigError:
    return ConfigError(
        f"Table {path}",
        found=found,
        why="Ranks choose alike only from a table that means one thing, so it is read strictly.",
        fix=fix,
    )
