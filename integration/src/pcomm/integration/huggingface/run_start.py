"""`model.from`: a run that starts with the model, the weights and the tokenizer of a directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pcomm.core.errors import ConfigError
from pcomm.integration.config import Config, keys
from pcomm.integration.huggingface.directory import ModelDirectory, open_directory
from pcomm.integration.huggingface.model_config import TRAINING, read_model
from pcomm.integration.huggingface.run_files import kept_directory
from pcomm.integration.model_rules import resolve_model

if TYPE_CHECKING:
    from pcomm.integration.models.language_model import LanguageModel

__all__ = ["ModelStart", "directory_config", "start_config"]


def start_config(
    config: Config,
    run_dir: Path,
    *,
    is_new: bool = False,
    given: frozenset[str] = frozenset(),
) -> Config:
    """`config` with the keys of the model that `model.from` names; without it, as it is. Local.

    A run with a checkpoint goes on with what it kept of the directory, which may be gone.

    Args:
        config: The configuration as the user wrote it.
        run_dir: Folder of the run, which need not exist.
        is_new: True if the checkpoints in it do not count.
        given: Keys, as `section.key`, that were given a value; those that differ from their
            default count as given anyway.

    Raises:
        ConfigError: The directory cannot be read, or a key says something else than it.
        UnsupportedError: The directory's model is not supported.
    """
    if not config.model.from_:
        return config
    # Imported late: with torch, for which a mistake does not wait that is found without it.
    from pcomm.integration.checkpoint.folders import newest

    kept = None if is_new or newest(run_dir) is None else kept_directory(run_dir)
    return _filled(config, kept or open_directory(Path(config.model.from_)), given)


def directory_config(folder: Path) -> Config:
    """The configuration that describes a directory's model, and is otherwise the default. Local.

    Raises:
        ConfigError: The directory cannot be read.
        UnsupportedError: Its model is not supported.
    """
    start = Config()
    model = replace(start.model, from_=str(folder))
    return start_config(replace(start, model=model), folder, is_new=True)


class ModelStart:
    """The weights that a run starts from.

    Args:
        folder: The directory.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, model: LanguageModel, ranks: Mapping[str, int]) -> None:
        """Fill `model` with this rank's part of the weights; see `load_weights`. Local."""
        from pcomm.integration.huggingface.weights import load_weights

        directory = open_directory(self._folder)
        load_weights(model, read_model(directory).family, directory, ranks=ranks)


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
