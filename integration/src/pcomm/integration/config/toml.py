"""TOML and `--set` to a configuration, and back."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pcomm.core.errors import ConfigError, near_misses
from pcomm.integration.config.sections import SECTIONS, Config, attribute_of, keys
from pcomm.integration.config.strict_section import shown, toml_value

__all__ = ["apply_overrides", "from_dict", "given_keys", "load_config", "to_dict", "to_toml"]


def load_config(
    path: Path | None = None, *, overrides: Sequence[str] = (), base: Config | None = None
) -> Config:
    """The configuration of a TOML file and of `section.key=value` overrides, which come last.

    Args:
        path: A TOML file. What it does not mention keeps the value of `base`.
        overrides: Words that `--set` was given, in order.
        base: The configuration to start from; None for the defaults.

    Raises:
        ConfigError: The file cannot be read or parsed, a key is unknown, or a value is none of its
            key's.
    """
    config = base if base is not None else Config()
    if path is not None:
        config = from_dict(_read_toml(path), base=config, source=str(path))
    return apply_overrides(config, overrides)


def given_keys(path: Path | None = None, overrides: Sequence[str] = ()) -> frozenset[str]:
    """The keys, as `section.key`, that a file and overrides give a value, be it the default.

    Args:
        path: A TOML file that `load_config` has read.
        overrides: Words that it was given.

    Raises:
        ConfigError: The file cannot be read or parsed.
    """
    content = {} if path is None else _read_toml(path)
    in_file = (
        f"{section}.{name}"
        for section, values in content.items()
        if isinstance(values, Mapping)
        for name in values
    )
    return frozenset(in_file) | {override.partition("=")[0].strip() for override in overrides}


def from_dict(
    values: Mapping[str, object], *, base: Config | None = None, source: str = "configuration"
) -> Config:
    """`base` with the sections and keys of `values` replaced.

    Raises:
        ConfigError: A section or key is unknown, or a value is none of its key's; names `source`.
    """
    config = base if base is not None else Config()
    errors: list[ConfigError] = []
    for section, content in values.items():
        if section not in SECTIONS:
            raise _unknown_section(section, source)
        if not isinstance(content, Mapping):
            raise ConfigError(
                f"{source}: {section}",
                found=f"the value {shown(content)}",
                why=f"'{section}' is a section, and its keys stand below a line `[{section}]`.",
                fix=f"Write `[{section}]`, then the keys, one a line.",
            )
        _check_names(section, content, source)
        try:
            fields = {attribute_of(name): value for name, value in content.items()}
            part = replace(getattr(config, section), **fields)
            config = replace(config, **{section: part})
        except ConfigError as error:
            errors.append(error)
    if errors:
        raise ConfigError(
            f"{source}: {', '.join(error.asked for error in errors)}",
            found="; ".join(error.found for error in errors),
            why="\n".join(error.why for error in errors),
            fix="\n".join(error.fix for error in errors),
        )
    return config


def apply_overrides(config: Config, overrides: Sequence[str]) -> Config:
    """`config` with `section.key=value` overrides applied in order.

    The value is read as TOML; what is not TOML counts as a bare word, that is, as a string.

    Raises:
        ConfigError: An override has another form, names an unknown key, or a value that is none of
            its key's.
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
        value = getattr(getattr(config, key.section), key.attribute)
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
        value = getattr(getattr(config, key.section), key.attribute)
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
    # TOMLDecodeError, UnicodeDecodeError, a number that is too long, and brackets in brackets.
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"configuration file {path}",
            found=str(error),
            why="The file is not TOML.",
            fix='Repair the line that is named; text stands in quotes: `prompt = "def "`.',
        ) from error


def _parse_value(text: str, override: str) -> object:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError) as error:
        if text[:1] in {'"', "'", "[", "{"}:
            # It began as a TOML string or list, so taking it as a bare word would hide a typo.
            raise ConfigError(
                f"--set {override}",
                found=f"the value `{text:.200}`: {error}",
                why="It begins like a TOML string, list or table, and does not end like one.",
                fix="Close it, and protect it from the shell: `--set 'data.path=[\"a.txt\"]'`.",
            ) from error
        return text
    # A line break in the text may have smuggled in a second key.
    return parsed["value"] if list(parsed) == ["value"] else text


def _check_names(section: str, content: Mapping[str, object], source: str) -> None:
    """Refuse keys that the section does not have."""
    known = [(key.section, key.name) for key in keys()]
    for name, value in content.items():
        if (section, name) in known:
            continue
        elsewhere = [f"{other}.{key}" for other, key in known if key == name]
        fix = (
            f"'{name}' belongs to another section: {' or '.join(elsewhere)}."
            if elsewhere
            else near_misses(str(name), [key for other, key in known if other == section])
        )
        raise ConfigError(
            f"{source}: {section}.{name}",
            found=f"the value {shown(value)} for a key that section '{section}' does not have",
            why="An unknown key would change nothing, and the run would not be the one meant.",
            fix=fix,
        )


def _unknown_section(section: str, source: str) -> ConfigError:
    owners = [f"{key.section}.{section}" for key in keys() if key.name == section]
    return ConfigError(
        f"{source}: {section}",
        found=f"a section or key '{section}' that does not exist",
        why=f"The sections are {', '.join(SECTIONS)}, and every key stands in one of them.",
        fix=f"Write {' or '.join(owners)}." if owners else near_misses(str(section), SECTIONS),
    )
