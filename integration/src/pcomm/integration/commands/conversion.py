"""A run as a Hugging Face directory, and a directory as a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pcomm.core import connect
from pcomm.core.errors import ConfigError
from pcomm.integration.checkpoint.folders import Checkpoint, check_files, newest
from pcomm.integration.checkpoint.saver import Saver
from pcomm.integration.checkpoint.state import check_index, identity_of, model_shard_views, read
from pcomm.integration.config.rules import validate
from pcomm.integration.config.sections import Config, ParallelConfig, Resolved
from pcomm.integration.config.toml import load_config
from pcomm.integration.data.tokenizer import END, load_tokenizer
from pcomm.integration.huggingface.config_json import read_model, write_config
from pcomm.integration.huggingface.directory import CONFIG, check_no_gguf, open_directory
from pcomm.integration.huggingface.model_from import (
    DTYPES_FILE,
    KEPT,
    check_one_model,
    directory_config,
    kept_directory,
    placed_files,
)
from pcomm.integration.huggingface.tensors import saved_dtypes
from pcomm.integration.huggingface.tokenizer import GENERATION, SETTINGS, TOKENIZER
from pcomm.integration.huggingface.weights import MAX_SHARD_BYTES, export_model, load_weights
from pcomm.integration.models.initialisation import SkipInit
from pcomm.integration.models.language_model import LanguageModel
from pcomm.integration.parallelize import ALL_RANKS, open_run_groups
from pcomm.integration.train.run_folder import hold_folder
from pcomm.integration.train.run_folder import write_config as write_run_config

__all__ = ["directory_to_run", "run_to_directory"]


def run_to_directory(
    run_dir: Path,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    allow_not_finite: bool = False,
) -> str:
    """Write the newest checkpoint of a run as a directory that transformers loads. On one process.

    Args:
        run_dir: Folder of the run, whatever number of ranks trained it.
        out: The directory; it does not exist yet, or is empty.
        dtype: Dtype of the weights; None for that of the directory which the run started from, and
            fp32 for a run that began anew.
        max_shard_bytes: Bytes of tensors in one file.
        allow_not_finite: True to write NaN and infinities as they are.

    Returns:
        The `model_type` of the family that was written.

    Raises:
        ConfigError: There is no checkpoint, it is damaged, a weight is NaN or infinite, or `out`
            cannot be written.
        UnsupportedError: No family has such a model; names the keys in which it differs.
    """
    check_one_model(run_dir)
    checkpoint = newest(run_dir)
    if checkpoint is None:
        check_no_gguf(run_dir)
        raise ConfigError(
            f"convert: {run_dir}",
            found="neither a checkpoint of a run nor a config.json"
            if run_dir.is_dir()
            else "no such folder",
            why="A run is converted to a Hugging Face directory, and a directory to a run.",
            fix="Give the --out folder of a `pcomm train` that has reached a checkpoint, or a "
            "directory with config.json and safetensors.",
        )
    config = _on_one_rank(load_config(run_dir / "config.toml"))
    kept = kept_directory(run_dir)
    family, fields = write_config(
        config.model, config.data.vocabulary, carried=kept.config if kept else None
    )
    if kept is None:
        fields |= _settings_of_run(config, load_tokenizer(run_dir / TOKENIZER).end_id)
    own_dtype, exceptions = saved_dtypes(kept.json(DTYPES_FILE) if kept else {})
    export_model(
        _model_of(config, checkpoint),
        family,
        fields,
        out,
        files=_files_of(run_dir, config),
        dtype=own_dtype if dtype is None else dtype,
        exceptions=exceptions if dtype is None else None,
        max_shard_bytes=max_shard_bytes,
        allow_not_finite=allow_not_finite,
    )
    return family.model_type


def directory_to_run(folder: Path, run_dir: Path) -> str:
    """Write a run that has done no step, with the weights of a directory. On one process.

    `pcomm generate` writes text with it, and `pcomm train` with its `config.toml` trains it on any
    ranks; batches and the optimizer begin anew.

    Args:
        folder: The directory.
        run_dir: Folder of the run, without a checkpoint, and no directory itself.

    Returns:
        The `model_type` of the directory.

    Raises:
        ConfigError: The directory cannot be read, or the folder has a run or cannot be written.
        UnsupportedError: The directory's model is not supported.
    """
    is_directory = (run_dir / CONFIG).exists()
    if is_directory or newest(run_dir) is not None:
        raise ConfigError(
            f"convert --out {run_dir}",
            found=f"a folder with {CONFIG}" if is_directory else "a run with a checkpoint",
            why="A folder is one model, a run or a directory, and nothing is overwritten.",
            fix="Choose another folder.",
        )
    directory = open_directory(folder)
    read_from = read_model(directory)
    config = directory_config(folder.resolve())
    resolved = _on_one_rank(config)
    with SkipInit():
        model = LanguageModel(resolved.model, resolved.data.vocabulary)
    load_weights(model, read_from.family, directory)
    identity = {key: identity_of(resolved)[key] for key in ("model", "data")}
    with hold_folder(run_dir), placed_files(folder, run_dir), connect() as world:
        with open_run_groups(resolved, world) as groups:
            group = groups[ALL_RANKS, "checkpoint"]
            with Saver(run_dir, group, keep=None, is_asynchronous=False) as saver:
                saver.save(0, model_shard_views(model), {"identity": identity})
        write_run_config(config, run_dir)
    return read_from.family.model_type


def _on_one_rank(config: Config) -> Resolved:
    return validate(replace(config, parallel=ParallelConfig()), 1)


def _model_of(config: Resolved, checkpoint: Checkpoint) -> LanguageModel:
    with SkipInit():
        model = LanguageModel(config.model, config.data.vocabulary)
    check_index(checkpoint)
    check_files(checkpoint)
    read(checkpoint, model_shard_views(model))
    return model


def _settings_of_run(config: Resolved, end_id: int) -> dict[str, Any]:
    """Fields without effect on the numbers, for a run that began anew."""
    return {
        "max_position_embeddings": config.train.sequence_length,
        "bos_token_id": None,
        "eos_token_id": end_id,
        "pad_token_id": end_id,
        "initializer_range": config.model.init_std,
        "use_cache": True,
    }


def _files_of(run_dir: Path, config: Resolved) -> dict[str, bytes]:
    """Tokenizer and settings: those that the run kept, or its own."""
    tokenizer = run_dir / TOKENIZER
    end_id = load_tokenizer(tokenizer).end_id
    files = {TOKENIZER: tokenizer.read_bytes()}
    kept = kept_directory(run_dir)
    if kept is not None:
        texts = {name: kept.text(name) for name in KEPT}
        return files | {name: text.encode() for name, text in texts.items() if text is not None}
    return files | {
        GENERATION: _json({"eos_token_id": end_id, "pad_token_id": end_id}),
        SETTINGS: _json(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": END,
                "pad_token": END,
                "clean_up_tokenization_spaces": False,
                "model_max_length": config.train.sequence_length,
            }
        ),
    }


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
