"""A model written as a Hugging Face directory, which transformers and other engines load."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from pcomm.core.errors import ConfigError
from pcomm.integration.finite import is_finite
from pcomm.integration.huggingface.directory import CONFIG
from pcomm.integration.huggingface.dtypes import NAMES
from pcomm.integration.huggingface.families.family import Family
from pcomm.integration.huggingface.number_checks import overflows
from pcomm.integration.huggingface.weights import tensor_map
from pcomm.integration.models.language_model import LanguageModel

__all__ = ["MAX_SHARD_BYTES", "export_model"]

MAX_SHARD_BYTES = 5_000_000_000
"""Bytes of tensors in one file, as transformers has them, unless one tensor alone is larger."""


def export_model(
    model: LanguageModel,
    family: Family,
    config: Mapping[str, Any],
    out: Path,
    *,
    files: Mapping[str, bytes],
    dtype: torch.dtype,
    exceptions: Mapping[str, torch.dtype] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    allow_not_finite: bool = False,
) -> None:
    """Write a directory, whole or not at all. Local, on a process that holds the whole model.

    Args:
        model: The model, on one rank.
        family: Tables of the family that it is written as, from `write_config`.
        config: Content of `config.json`; the dtype in it is replaced.
        out: The directory, which does not exist yet or is empty.
        files: Content of the other files, by name: tokenizer, generation settings.
        dtype: Dtype of the weights.
        exceptions: Dtypes of single tensors, by their names in the family.
        max_shard_bytes: Bytes of tensors in one file.
        allow_not_finite: True to write NaN and infinities as they are.

    Raises:
        ConfigError: The directory has something in it, or cannot be written; or a weight is NaN or
            infinite, in the model or in the dtype that it is written in; names the tensor.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            f"convert --out {out}",
            found="a file" if not out.is_dir() else "a folder with something in it",
            why="A directory is written whole, and nothing is overwritten.",
            fix="Choose a folder that does not exist yet, or remove this one.",
        )
    partial = out.with_name(out.name + ".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        tensors = _tensors(model, family, dtype, exceptions or {}, allow_not_finite)
        _write_weights(tensors, partial, max_shard_bytes)
        _write_json(partial / CONFIG, _with_dtype(config, NAMES[dtype]))
        for name, content in files.items():
            (partial / name).write_bytes(content)
        if out.exists():
            out.rmdir()
        partial.rename(out)
    except ConfigError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ConfigError(
            f"convert --out {out}",
            found=str(error),
            why="The directory cannot be written.",
            fix="Choose a folder that can be written, on a disk with room for the weights.",
        ) from error


def _tensors(
    model: LanguageModel,
    family: Family,
    dtype: torch.dtype,
    exceptions: Mapping[str, torch.dtype],
    allow_not_finite: bool,
) -> Iterator[tuple[str, Tensor]]:
    """Their tensors one by one, each put together from rows of ours."""
    tensors, parameters = tensor_map(model, family), dict(model.named_parameters())
    for name in sorted(tensors.shapes, key=_natural):
        shape = tensors.shapes[name]
        whole = torch.empty(shape, dtype=exceptions.get(name, dtype))
        rows = whole.view(shape[0], -1) if len(shape) > 1 else whole
        for ours, segment in tensors.users[name]:
            value = parameters[ours].detach()
            own = value.view(-1, value.shape[-1]) if value.dim() > 1 else value
            taken = own.narrow(0, segment.start, segment.length)
            if not allow_not_finite and not is_finite(taken):
                raise _not_finite(name, taken)
            if overflows(taken, whole.dtype):
                raise _overflow(name, whole.dtype)
            rows.narrow(0, segment.their_start, segment.length).copy_(taken)
        yield name, whole


def _not_finite(name: str, values: Tensor) -> ConfigError:
    wrong = int((~values.isfinite()).sum())
    return ConfigError(
        f"convert: {name}",
        found=f"{wrong} of {values.numel()} numbers are NaN or infinite",
        why="A model with such weights gives no text, wherever it is loaded.",
        fix="Go back to a checkpoint before the training diverged; or write them as they are: "
        "`--allow-not-finite`.",
    )


def _overflow(name: str, dtype: torch.dtype) -> ConfigError:
    return ConfigError(
        f"convert: {name}",
        found=f"numbers that are infinite as {NAMES[dtype]}",
        why=f"The largest number of {NAMES[dtype]} is {torch.finfo(dtype).max:g}.",
        fix="Write the weights as bf16 or fp32: `--dtype bf16`.",
    )


def _write_weights(tensors: Iterable[tuple[str, Tensor]], folder: Path, limit: int) -> None:
    """One file, or several with an index."""
    shard: dict[str, Tensor] = {}
    size = total = 0
    written: list[list[str]] = []

    def flush() -> None:
        # Metadata that transformers asks for before it loads a file.
        name = f"{len(written)}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        os.chmod(folder / name, 0o644)
        written.append(list(shard))
        shard.clear()

    for name, tensor in tensors:
        if shard and size + tensor.nbytes > limit:
            flush()
            size = 0
        shard[name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
    flush()
    if len(written) == 1:
        (folder / "0.safetensors").rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(written):
        file = f"model-{number + 1:05d}-of-{len(written):05d}.safetensors"
        (folder / f"{number}.safetensors").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)


def _with_dtype(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    # Under the name of transformers 4 where the configuration has that one.
    names = [key for key in ("torch_dtype", "dtype") if key in config] or ["dtype"]
    return {**config, **dict.fromkeys(names, name)}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """Layers in the order of their numbers, so that a file holds neighbours."""
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in name.split("."))
