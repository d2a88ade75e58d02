"""Weights both ways, slice by slice, with their numbers checked."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from pcomm.core import Collectives, IdentityCollectives, Layout
from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.core.tensor_parallel import ParamLayout, param_layouts_of
from pcomm.integration.checkpoint.saver import is_finite
from pcomm.integration.config.rules import validate
from pcomm.integration.config.sections import ParallelConfig, Resolved
from pcomm.integration.huggingface.config_json import read_model
from pcomm.integration.huggingface.directory import CONFIG, ModelDirectory, open_directory
from pcomm.integration.huggingface.families.family import Family, RowRange, TensorMap, map_tensors
from pcomm.integration.huggingface.model_from import directory_config
from pcomm.integration.huggingface.tensors import DTYPES, TensorFiles, dtypes_of
from pcomm.integration.models.initialisation import SkipInit
from pcomm.integration.models.language_model import LanguageModel

__all__ = [
    "MAX_SHARD_BYTES",
    "check_first_weights",
    "export_model",
    "load_first_weights",
    "load_model",
    "load_weights",
    "overflows",
    "tensor_map",
]

_HEAD = "lm_head.weight"

# Rows of two tensors that are compared at once.
_ROWS = 4096

MAX_SHARD_BYTES = 5_000_000_000
"""Bytes of tensors in one file, as transformers has them, unless one tensor alone is larger."""


def load_model(
    folder: Path,
    *,
    collectives: Collectives | None = None,
    experts: Collectives | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> LanguageModel:
    """The model of a directory with this rank's part of its weights, to compute with. Local.

    Args:
        folder: The directory.
        collectives: Collectives of the tensor-parallel group; None for one rank.
        experts: Collectives of the expert-parallel group; None where this rank has all experts.
        device: Device of the parameters.
        dtype: Dtype of the parameters; None for the most frequent one of the directory.

    Raises:
        ConfigError: The directory is damaged, or the ranks cannot share the model.
        UnsupportedError: Its model is not supported.
    """
    tensor_parallel = collectives or IdentityCollectives()
    directory, config = open_directory(folder), directory_config(folder)
    ranks = tensor_parallel.size
    config = replace(config, parallel=ParallelConfig(tp=ranks))
    if dtype is None:
        # One that is not read is refused with its tensor's name, below.
        dtype = DTYPES.get(dtypes_of(directory)["default"], torch.float32)
    resolved = validate(config, ranks)
    with SkipInit():
        model = LanguageModel(
            resolved.model,
            resolved.data.vocabulary,
            collectives,
            device=device,
            dtype=dtype,
            experts=experts,
        )
    scopes = {"dense": tensor_parallel.rank, "expert": experts.rank if experts else 0}
    load_weights(model, read_model(directory).family, directory, ranks=scopes)
    return model.requires_grad_(False).eval()


def load_first_weights(model: LanguageModel, folder: Path, ranks: Mapping[str, int]) -> None:
    """Fill the model of a run with the weights that it starts from; see `load_weights`. Local.

    Args:
        model: This rank's part of the model.
        folder: The directory.
        ranks: Rank of this process by the scope of `ParamLayout`.
    """
    directory = open_directory(folder)
    load_weights(model, read_model(directory).family, directory, ranks=ranks)


def check_first_weights(config: Resolved, folder: Path) -> None:
    """Refuse what `load_first_weights` refuses before it reads a number. Local; without memory.

    Reads the headers of the files; of tied weights that have the head as well, both.

    Args:
        config: The configuration of the run, on any number of ranks.
        folder: The directory.

    Raises:
        ConfigError, UnsupportedError: For those reasons of `load_weights` that need no numbers.
    """
    directory = open_directory(folder)
    model = LanguageModel(config.model, config.data.vocabulary, device="meta")
    with TensorFiles(directory) as files:
        _check(files, read_model(directory).family, model)


def load_weights(
    model: LanguageModel,
    family: Family,
    directory: ModelDirectory,
    *,
    ranks: Mapping[str, int] | None = None,
    filled: Callable[[str], object] | None = None,
) -> int:
    """Fill every parameter of `model` with this rank's part of the directory's weights. Local.

    Each slice of a file that this rank needs is read once, and no other; only where a directory of
    tied weights has the head as well, both are read and compared. Names, shapes and dtypes of all
    tensors are compared before the first is read, and the numbers are checked while they are.

    Args:
        model: A model of the shape that `read_model` gives.
        family: Tables of the directory's family.
        directory: The directory, opened with its weights.
        ranks: Rank of this process by the scope of `ParamLayout`; None where one rank has all.
        filled: Called with the name of each parameter as soon as it is filled. It may put something
            else in its place, and parameters that it replaces may share their memory.

    Returns:
        Number of bytes read from the files.

    Raises:
        ConfigError: A file is damaged, or a tensor is missing, not expected, of another shape, has
            NaN, or has numbers that are infinite in the dtype of `model`; names file and tensor.
            Or a directory of tied weights has a head that is not the embedding.
        UnsupportedError: A tensor has a dtype that is not read; names file and tensor.
    """
    layouts = param_layouts_of(model)
    with TensorFiles(directory) as files, torch.no_grad():
        tensors = _check(files, family, model)
        # By name: a list of parameters would keep those that `filled` replaces.
        for name in layouts:
            layout, parameter = layouts[name], model.get_parameter(name)
            rank = (ranks or {}).get(layout.scope, 0)
            _fill(parameter, tensors.segments[name], layout, rank, files)
            del parameter
            if filled is not None:
                filled(name)
        return files.bytes_read


def tensor_map(model: LanguageModel, family: Family) -> TensorMap:
    """Which tensors of the family are which parameters of `model`. Local."""
    layouts = param_layouts_of(model)
    shapes = {
        name: tuple(layouts[name].logical_shape(parameter.shape))
        for name, parameter in model.named_parameters()
    }
    return map_tensors(family, model.config, shapes)


def _fill(
    parameter: nn.Parameter,
    segments: Sequence[RowRange],
    layout: ParamLayout,
    rank: int,
    files: TensorFiles,
) -> None:
    # The rows of a parameter lie along all of its dimensions but the last.
    local = parameter.detach()
    rows = local.view(-1, local.shape[-1]) if local.dim() > 1 else local.view(-1)
    per_row = local.shape[1:-1].numel() if local.dim() > 2 else 1
    by_row = layout.layout if layout.dim == 0 else None
    columns = _runs(layout.layout if layout.dim else None, rank, None)
    total = segments[-1].start + segments[-1].length
    done = 0
    for start, stop in _runs(by_row, rank, total, per_row):
        for segment in _within(segments, start, stop):
            target = rows[done : done + segment.length]
            done += segment.length
            place = slice(segment.their_start, segment.their_start + segment.length)
            left = 0
            for first, last in columns:
                places = [place] if last is None else [place, slice(first, last)]
                read = files.read(segment.theirs, *places)
                file = files.infos[segment.theirs].file
                check_numbers(read, parameter.dtype, file=file, name=segment.theirs)
                if read.dim() > 2:
                    read = read.flatten(1)
                if last is None:
                    target.copy_(read)
                else:
                    target[:, left : left + last - first].copy_(read)
                    left += last - first
    assert done == len(rows), "the layout and the table are of one parameter"


def _runs(
    layout: Layout | None, rank: int, total: int | None, unit: int = 1
) -> list[tuple[int, int | None]]:
    """Ranges of positions that a rank holds; all of them where nothing is split."""
    if layout is None:
        return [(0, total)]
    return [(run.start * unit, run.stop * unit) for run in layout.runs[rank]]


def _within(segments: Sequence[RowRange], start: int, stop: int | None) -> Iterator[RowRange]:
    """The parts of segments that lie in a range of our rows."""
    for segment in segments:
        first = max(start, segment.start)
        last = segment.start + segment.length
        last = last if stop is None else min(stop, last)
        if first < last:
            shift = first - segment.start
            yield RowRange(first, segment.theirs, segment.their_start + shift, last - first)


def _check(files: TensorFiles, family: Family, model: LanguageModel) -> TensorMap:
    """Which tensors are which parameters, if the files hold them and no others."""
    tensors = tensor_map(model, family)
    folder = next(iter(files.infos.values())).file.parent if files.infos else None
    where = f"model directory {folder}"
    wanted = tensors.shapes
    if missing := sorted(wanted.keys() - files.infos.keys()):
        raise ConfigError(
            where,
            found=f"no tensor {missing[0]} in any file{_and_others(missing)}",
            why=f"A model of family {family.model_type} with this config.json has it.",
            fix="Copy the files again from where the directory came from, config.json included.",
        )
    for name, info in files.infos.items():
        if name not in wanted:
            if not _is_ignored(name, family, model):
                raise ConfigError(
                    where,
                    found=f"{info.file.name}: the tensor {name}, which this model does not have",
                    why="What config.json describes computes without it, so it would be another "
                    "model than the one that was saved.",
                    fix="Copy config.json again from where the directory came from.",
                )
            continue
        if info.shape != wanted[name]:
            raise ConfigError(
                where,
                found=f"{info.file.name}: {name} of shape {list(info.shape)}, and config.json "
                f"describes {list(wanted[name])}",
                why="Weights and configuration are not of one model.",
                fix="Copy the files again from where the directory came from, config.json "
                "included.",
            )
        dtype = DTYPES.get(info.dtype)
        if dtype is None or (dtype == torch.float64 and model.norm.weight.dtype != torch.float64):
            raise UnsupportedError(
                where,
                found=f"{info.file.name}: {name} of dtype {info.dtype}",
                why="Weights are read from F32, BF16 and F16, and from F64 into a model of fp64. "
                "Other dtypes are of quantised weights, or would be rounded without a word.",
                fix="Save the model in one of these dtypes, with transformers: "
                "`from_pretrained(DIR, dtype=...)`, then `save_pretrained(NEW)`.",
            )
    if model.config.tie_embeddings:
        _check_head(files, tensors.users)
    return tensors


def _check_head(files: TensorFiles, users: Mapping[str, Sequence[tuple[str, RowRange]]]) -> None:
    """Refuse a head of its own beside tied weights. Whole, so that every rank finds the same."""
    if _HEAD not in files.infos:
        return
    embedding = next(name for name, ours in users.items() if ours[0][0] == "embedding.weight")
    head, shape = files.infos[_HEAD], files.infos[embedding].shape
    places = [slice(start, start + _ROWS) for start in range(0, shape[0], _ROWS)]
    same = (head.shape, head.dtype) == (shape, files.infos[embedding].dtype)
    if same and all(
        torch.equal(files.read(_HEAD, place), files.read(embedding, place)) for place in places
    ):
        return
    raise ConfigError(
        f"model directory {head.file.parent}",
        found=f"{head.file.name}: {_HEAD} is not {embedding}, and config.json has "
        "tie_word_embeddings = true",
        why="Tied weights are one tensor. Some programs would compute with this head and others "
        "with the embedding, and nothing says which of them the model was trained with.",
        fix='Write `"tie_word_embeddings": false` into config.json if the head is the model\'s, as '
        f"transformers takes it; or take {_HEAD} out of the file.",
    )


def _is_ignored(name: str, family: Family, model: LanguageModel) -> bool:
    if name == _HEAD and model.config.tie_embeddings:
        return True
    return any(re.fullmatch(pattern, name) for pattern in family.ignored)


def _and_others(names: Sequence[str]) -> str:
    return f", and {len(names) - 1} others are missing" if len(names) > 1 else ""


def check_numbers(read: Tensor, dtype: torch.dtype, *, file: Path, name: str) -> None:
    """Refuse what was read of a tensor if the model would not have its numbers. Local.

    Infinities of the file are weights like others. One pass over the tensor, without a copy.

    Args:
        read: A slice of the tensor, in the dtype of the file.
        dtype: Dtype that the model has it in.
        file: File that it was read from, for the error.
        name: Name of the tensor in that file, for the error.

    Raises:
        ConfigError: The slice has NaN, or a finite number that is infinite in `dtype`.
    """
    if read.numel() and torch.aminmax(read)[0].isnan():
        raise ConfigError(
            f"model directory {file.parent}",
            found=f"{file.name}: NaN in {name}",
            why="Every token that this weight takes part in would be NaN.",
            fix=f"Copy {file.name} again from where the directory came from; if it is the same "
            "there, the training that wrote it had diverged.",
        )
    if overflows(read, dtype):
        raise ConfigError(
            f"model directory {file.parent}",
            found=f"{file.name}: numbers in {name} that are infinite as {_short(dtype)}",
            why=f"The file has it as {_short(read.dtype)}, and {_short(dtype)} ends at "
            f"{torch.finfo(dtype).max:g}.",
            fix="Load the weights as float32 or bfloat16: `--dtype float32`.",
        )


def overflows(values: Tensor, dtype: torch.dtype) -> bool:
    """True if a finite number of `values` is infinite in `dtype`. Local."""
    if not values.numel() or torch.finfo(dtype).max >= torch.finfo(values.dtype).max:
        return False
    ends = torch.stack(torch.aminmax(values))
    if ends.isinf().any():
        # An infinity hides the largest finite number.
        return bool((values.to(dtype).isinf() & values.isfinite()).any())
    return bool(ends.to(dtype).isinf().any())


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
        _write_json(partial / CONFIG, _with_dtype(config, _short(dtype)))
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
        found=f"numbers that are infinite as {_short(dtype)}",
        why=f"The largest number of {_short(dtype)} is {torch.finfo(dtype).max:g}.",
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
