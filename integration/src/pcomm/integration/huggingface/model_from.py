"""`model.from`: what a run keeps of a directory, and a model to go on with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers

from pcomm.core.errors import ConfigError
from pcomm.integration.config.model_rules import resolve_model
from pcomm.integration.config.sections import Config, keys
from pcomm.integration.files import atomic_write
from pcomm.integration.huggingface.config_json import TRAINING, read_model
from pcomm.integration.huggingface.directory import CONFIG, ModelDirectory, open_directory
from pcomm.integration.huggingface.tokenizer import (
    GENERATION,
    SETTINGS,
    TOKENIZER,
    end_ids,
    read_tokenizer,
)

__all__ = [
    "DTYPES_FILE",
    "KEPT",
    "check_one_model",
    "directory_config",
    "end_ids_of_run",
    "forget_directory",
    "has_directory",
    "kept_directory",
    "placed_files",
    "start_config",
]


KEPT = (
    GENERATION,
    SETTINGS,
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files beside `config.json` and `tokenizer.json` that are kept, and written again."""

DTYPES_FILE = "dtypes.json"
"""The file of a run that says which dtypes the weights had."""

_FOLDER = "huggingface"


def check_one_model(folder: Path) -> None:
    """Refuse a folder that is a run and a directory. Local.

    Raises:
        ConfigError: It has checkpoints and a `config.json`.
    """
    is_run = (folder / "config.toml").is_file() and (folder / "checkpoints").is_dir()
    if is_run and (folder / CONFIG).is_file():
        raise ConfigError(
            f"model {folder}",
            found=f"checkpoints of a run, and {CONFIG} of a Hugging Face directory",
            why="Each of the two has weights of its own, and nothing says which are meant.",
            fix="Move config.toml, checkpoints/ and huggingface/ into a folder of their own.",
        )


def kept_directory(run_dir: Path) -> ModelDirectory | None:
    """What the run keeps of the directory it started from; None if it started from none. Local.

    Raises:
        ConfigError: A file is damaged.
    """
    if not has_directory(run_dir):
        return None
    return open_directory(run_dir / _FOLDER, has_weights=False)


def has_directory(run_dir: Path) -> bool:
    """Whether the run in a folder started from a directory. Local."""
    return (run_dir / _FOLDER).is_dir()


def end_ids_of_run(run_dir: Path, tokenizer: tokenizers.Tokenizer) -> tuple[int, ...]:
    """Ids that end a text of a run which started from a directory; none for others. Local.

    Raises:
        ConfigError: A file of the directory is damaged.
    """
    kept = kept_directory(run_dir)
    return () if kept is None else end_ids(kept, tokenizer)


def forget_directory(run_dir: Path) -> None:
    """Remove what an earlier run in the folder kept of a directory. On one rank."""
    shutil.rmtree(run_dir / _FOLDER, ignore_errors=True)


@contextmanager
def placed_files(source: Path, run_dir: Path) -> Iterator[None]:
    """Put the tokenizer and the settings of a directory into a run's folder. On one rank.

    If the block fails, the folder has what it had before.

    Args:
        source: The directory, with its weights.
        run_dir: Folder of the run, made if absent.

    Raises:
        ConfigError: The directory has no tokenizer, names no end of a text, or is damaged.
    """
    # Imported late, as in `start_config`.
    from pcomm.integration.huggingface.tensors import dtypes_of

    directory = open_directory(source)
    tokenizer = read_tokenizer(directory)
    if not tokenizer.eos_ids:
        raise ConfigError(
            f"model directory {source}",
            found=f"no eos_token_id in {GENERATION} or {CONFIG}, and no eos_token in {SETTINGS}",
            why="Documents that are learnt, and texts that are written, end with this token.",
            fix=f"Write `eos_token_id` into {GENERATION}.",
        )
    content = {name: directory.text(name) for name in (CONFIG, *KEPT)}
    content[DTYPES_FILE] = json.dumps(dtypes_of(directory), indent=2)
    tokenizer_text = directory.text(TOKENIZER)
    assert tokenizer_text is not None, "it was read above"
    folder, replaced = run_dir / _FOLDER, run_dir / f"{_FOLDER}.replaced"
    run_dir.mkdir(parents=True, exist_ok=True)
    target = run_dir / TOKENIZER
    before = target.read_bytes() if target.exists() else None
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        folder.rename(replaced)
    try:
        _write(folder, content)
        _put(target, tokenizer_text.encode())
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        if replaced.exists():
            replaced.rename(folder)
        if before is None:
            target.unlink(missing_ok=True)
        else:
            _put(target, before)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def _write(folder: Path, content: Mapping[str, str | None]) -> None:
    folder.mkdir()
    for name, text in content.items():
        if text is not None:
            _put(folder / name, text.encode())


def _put(path: Path, content: bytes) -> None:
    with atomic_write(path) as file:
        file.write(content)


def start_config(
    config: Config,
    run_dir: Path,
    *,
    is_new: bool = False,
    given: frozenset[str] = frozenset(),
    has_weights: bool = True,
) -> Config:
    """`config` with the keys of the model that `model.from` names; without it, as it is. Local.

    A run with a checkpoint goes on with what it kept of the directory, which may be gone.

    Args:
        config: The configuration as the user wrote it.
        run_dir: Folder of the run, which need not exist.
        is_new: True if the checkpoints in it do not count.
        given: Keys, as `section.key`, that were given a value; those that differ from their
            default count as given anyway.
        has_weights: False where the directory needs no weights, since none will be read.

    Raises:
        ConfigError: The directory cannot be read, or a key says something else than it.
        UnsupportedError: The directory's model is not supported.
    """
    if not config.model.from_:
        return config
    # Imported late: with torch, for which a mistake does not wait that is found without it.
    from pcomm.integration.checkpoint.folders import newest

    kept = None if is_new or newest(run_dir) is None else kept_directory(run_dir)
    directory = kept or open_directory(Path(config.model.from_), has_weights=has_weights)
    return _filled(config, directory, given)


def directory_config(folder: Path) -> Config:
    """The configuration that describes a directory's model, and is otherwise the default. Local.

    Raises:
        ConfigError: The directory cannot be read.
        UnsupportedError: Its model is not supported.
    """
    start = Config()
    model = replace(start.model, from_=str(folder))
    return start_config(replace(start, model=model), folder, is_new=True)


def _filled(config: Config, directory: ModelDirectory, given: frozenset[str]) -> Config:
    read = read_model(directory)
    resolved = resolve_model(read.config)
    taken: dict[str, Any] = {}
    contradictions: list[str] = []
    for key in keys():
        name, full = key.attribute, f"{key.section}.{key.name}"
        if key.section == "model" and name not in TRAINING:
            value = getattr(config.model, name)
            taken[name] = theirs = getattr(read.config, name)
            agreeing = [theirs, getattr(resolved, name), "auto"]
        elif full == "data.vocabulary":
            value = config.data.vocabulary
            theirs = read.vocabulary
            agreeing = [theirs]
        else:
            continue
        if value not in agreeing and (full in given or value != key.default):
            contradictions.append(f"{full} is {value!r}, and theirs is {theirs!r}")
    if contradictions:
        raise ConfigError(
            f"model.from = {config.model.from_!r}",
            found="; ".join(contradictions),
            why="The weights are those of the directory, which fit no other shape.",
            fix="Leave these keys away: they are taken from the directory.",
        )
    return replace(
        config,
        model=replace(config.model, **taken),
        data=replace(config.data, vocabulary=read.vocabulary),
    )
