"""Reads a `Config` from TOML and from `--set section.key=value`, strictly, and writes it back.

An unknown key, a wrong type or a value out of TOML's grammar is an error that names the key; the
only value that changes its type on the way is an int given for a float.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from pcomm.core.errors import ConfigError, near_misses
from pcomm.integration.config import Config, Key, keys
from pcomm.integration.config_values import convert, expected_type, name_of_type, toml_value

__all__ = ["apply_overrides", "from_dict", "load_config", "to_dict", "to_toml"]

# Keys of files that an earlier version has written, and what each is called now.
_RENAMED = {"parallel.cp_mode": "parallel.cp_strategy"}


def load_config(
    path: Path | None = None, *, overrides: Sequence[str] = (), base: Config | None = None
) -> Config:
    """The configuration of a TOML file and of `section.key=value` overrides, which come last.

    Args:
        path: A TOML file. What it does not mention keeps the value of `base`.
        overrides: What `--set` was given, in order.
        base: Where to start. The defaults if absent.

    Raises:
        ConfigError: The file cannot be read or parsed, a key is unknown, a value has another type.
    """
    config = base if base is not None else Config()
    if path is not None:
        config = from_dict(_read_toml(path), base=config, source=str(path))
    return apply_overrides(config, overrides)


def from_dict(
    values: Mapping[str, object], *, base: Config | None = None, source: str = "configuration"
) -> Config:
    """`base` with the sections and keys of `values` replaced.

    Raises:
        ConfigError: A section or key is unknown, or a value has another type; names `source`.
    """
    config = base if base is not None else Config()
    sections = [item.name for item in fields(Config)]
    table = {(key.section, key.name): key for key in keys()}
    for section, content in values.items():
        if section not in sections:
            raise _unknown_section(section, sections, source)
        if not isinstance(content, Mapping):
            raise ConfigError(
                f"{source}: {section}",
                found=f"the value {content!r}",
                why=f"'{section}' is a section, and its keys stand below a line `[{section}]`.",
                fix=f"Write `[{section}]`, then the keys, one a line.",
            )
        for name, value in content.items():
            config = _with_value(config, section, name, value, source, table)
    return config


def apply_overrides(config: Config, overrides: Sequence[str]) -> Config:
    """`config` with `section.key=value` overrides applied in order.

    The value is read as TOML; what is not TOML counts as a bare word, that is, as a string.

    Raises:
        ConfigError: An override has another form, names an unknown key, or has another type.
    """
    for override in overrides:
        name, equals, text = override.partition("=")
        section, dot, key = name.strip().partition(".")
        if not (equals and dot and section and key):
            raise ConfigError(
                f"--set {override}",
                found="no `section.key=value`",
                why="An override names one key of one section and gives its new value.",
                fix="Write for example `--set train.steps=200`.",
            )
        value = _parse_value(text.strip(), override)
        config = from_dict({section: {key: value}}, base=config, source=f"--set {override}")
    return config


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """Sections and keys as plain dicts, lists and scalars, ready for JSON; see `from_dict`."""
    plain: dict[str, dict[str, Any]] = {}
    for key in keys():
        value = getattr(getattr(config, key.section), key.name)
        listed = list(value) if isinstance(value, tuple) else value
        plain.setdefault(key.section, {})[key.name] = listed
    return plain


def to_toml(config: Config) -> str:
    """A TOML text that `load_config` reads back as `config`, each key below its explanation."""
    lines: list[str] = []
    section = ""
    for key in keys():
        if key.section != section:
            section = key.section
            lines += ["", f"[{section}]"] if lines else [f"[{section}]"]
        value = getattr(getattr(config, key.section), key.name)
        lines += [f"# {key.help}", f"{key.name} = {toml_value(value)}"]
    return "\n".join(lines) + "\n"


def _read_toml(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"configuration file {path}",
            found=error.strerror or str(error),
            why="The file cannot be read.",
            fix="Give the path of a TOML file, or leave it out and use the defaults.",
        ) from error
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError
        raise ConfigError(
            f"configuration file {path}",
            found=str(error),
            why="The file is not TOML.",
            fix='Repair the line that is named; text stands in quotes: `prompt = "def "`.',
        ) from error


def _parse_value(text: str, override: str) -> object:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError as error:
        if text[:1] in {'"', "'", "[", "{"}:
            # It began as a TOML string or list, so taking it as a bare word would hide a typo.
            raise ConfigError(
                f"--set {override}",
                found=f"the value `{text}`: {error}",
                why="It begins like a TOML string, list or table, and does not end like one.",
                fix="Close it, and protect it from the shell: `--set 'data.path=[\"a.txt\"]'`.",
            ) from error
        return text
    # A line break in the text may have smuggled in a second key.
    return parsed["value"] if list(parsed) == ["value"] else text


def _with_value(
    config: Config,
    section: str,
    name: str,
    value: object,
    source: str,
    table: Mapping[tuple[str, str], Key],
) -> Config:
    key = table.get((section, name))
    if key is None:
        elsewhere = [f"{s}.{n}" for s, n in table if n == name]
        fix = (
            f"'{name}' belongs to another section: {' or '.join(elsewhere)}."
            if elsewhere
            else near_misses(name, [n for s, n in table if s == section])
        )
        if renamed := _RENAMED.get(f"{section}.{name}"):
            fix = f"Write {renamed}, the new name of this key; its values are the same."
        raise ConfigError(
            f"{source}: {section}.{name}",
            found=f"the value {value!r} for a key that section '{section}' does not have",
            why="An unknown key would change nothing, and the run would not be the one meant.",
            fix=fix,
        )
    checked = _checked(value, key, source)
    return replace(config, **{section: replace(getattr(config, section), **{name: checked})})


def _checked(value: object, key: Key, source: str) -> object:
    found = convert(value, key.annotation)
    if found is not None:
        return found
    raise ConfigError(
        f"{source}: {key.section}.{key.name}",
        found=f"{value!r}, which is {name_of_type(value)}",
        why=f"The key takes {expected_type(key.annotation)}, and nothing is converted unasked.",
        fix=f"Write for example `{key.section}.{key.name} = {_example(value, key)}`.",
    )


def _example(value: object, key: Key) -> str:
    wrapped = convert([value], key.annotation)
    if wrapped is None and key.annotation is str and not isinstance(value, list | Mapping):
        wrapped = str(value)
    return toml_value(key.default if wrapped is None else wrapped)


def _unknown_section(section: str, sections: Sequence[str], source: str) -> ConfigError:
    owners = [f"{key.section}.{section}" for key in keys() if key.name == section]
    return ConfigError(
        f"{source}: {section}",
        found=f"a section or key '{section}' that does not exist",
        why=f"The sections are {', '.join(sections)}, and every key stands in one of them.",
        fix=f"Write {' or '.join(owners)}." if owners else near_misses(section, sections),
    )
