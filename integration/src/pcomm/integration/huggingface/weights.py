"""Weights of a directory, read slice by slice into the shards that this rank holds."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from pcomm.core import Layout
from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.core.tensor_parallel import ParamLayout, param_layouts_of
from pcomm.integration.huggingface.directory import ModelDirectory
from pcomm.integration.huggingface.dtypes import DTYPES
from pcomm.integration.huggingface.families.family import Family
from pcomm.integration.huggingface.number_checks import check_numbers
from pcomm.integration.huggingface.tensor_files import TensorFiles
from pcomm.integration.huggingface.tensor_table import Segment, TensorMap, map_tensors
from pcomm.integration.models.language_model import LanguageModel

__all__ = ["load_weights", "tensor_map"]

_HEAD = "lm_head.weight"
# Rows of two tensors that are compared at once.
_ROWS = 4096


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
    tensors = tensor_map(model, family)
    with TensorFiles(directory) as files, torch.no_grad():
        _check(files, tensors, family, model)
        if model.config.tie_embeddings:
            _check_head(files, tensors.users)
        # By name: a list of parameters would keep those that `filled` replaces.
        for name in layouts:
            layout, parameter = layouts[name], model.get_parameter(name)
            rank = (ranks or {}).get(layout.scope, 0)
            _fill(parameter, tensors.segments[name], layout, rank, files, tensors.middles)
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
    return map_tensors(family.tensors, model.config, shapes)


def _fill(
    parameter: nn.Parameter,
    segments: Sequence[Segment],
    layout: ParamLayout,
    rank: int,
    files: TensorFiles,
    middles: frozenset[str],
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
                if segment.theirs in middles:
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


def _within(segments: Sequence[Segment], start: int, stop: int | None) -> Iterator[Segment]:
    """The parts of segments that lie in a range of our rows."""
    for segment in segments:
        first = max(start, segment.start)
        last = segment.start + segment.length
        last = last if stop is None else min(stop, last)
        if first < last:
            shift = first - segment.start
            yield Segment(first, segment.theirs, segment.their_start + shift, last - first)


def _check(files: TensorFiles, tensors: TensorMap, family: Family, model: LanguageModel) -> None:
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


def _check_head(files: TensorFiles, users: Mapping[str, Sequence[tuple[str, Segment]]]) -> None:
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
