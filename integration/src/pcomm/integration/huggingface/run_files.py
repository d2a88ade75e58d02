"""What a run that started from a directory keeps of it: all files but weights and programs.

They lie in the folder `huggingface` of the run, and the tokenizer where every run has it. So the
original may be gone when the run goes on, and a directory that is written from the run has the
settings, the chat template and the dtypes that the first one had.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import tokenizers

from pcomm.core.errors import ConfigError
from pcomm.integration.atomic_file import atomic_write
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
    "end_ids_of_run",
    "forget_directory",
    "has_directory",
    "kept_directory",
    "placed_files",
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
    from pcomm.integration.huggingface.dtypes import dtypes_of

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
