"""Gives the linear layers of a model int8 weights."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase
from itertools import chain

from torch import nn

from pcomm.core.errors import ConfigError, UnsupportedError, near_misses
from pcomm.core.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from pcomm.inference.quantization.int8_linear import int8_layer

__all__ = ["quantize_int8"]

_LAYERS = (nn.Linear, ColumnParallelLinear, RowParallelLinear)


def quantize_int8(
    model: nn.Module, *, skip: Collection[str] = (), only: Collection[str] | None = None
) -> tuple[str, ...]:
    """Replace the linear layers of a model by ones with int8 weights, in place. Local.

    Symmetric, with one scale for each output; activations keep their dtype. Everything else stays:
    embeddings, norms, convolutions, parameters that a module multiplies by itself. An output layer
    whose weight is the embedding's gets int8 weights of its own beside it. Layers are replaced one
    after the other, so that the old weights of one are freed before those of the next are read.
    Under tensor parallelism each rank calls it for its share: a scale is that of the row as the
    rank has it.

    Args:
        model: A model on a CPU, whose linear layers are `nn.Linear`, `ColumnParallelLinear` or
            `RowParallelLinear`, and no subclasses.
        skip: Names of modules that stay as they are with everything in them, such as
            `layers.0.router`; `*` stands for any characters.
        only: Names of the layers to replace; None for all.

    Returns:
        Names of the layers that were replaced.

    Raises:
        ConfigError: There is no linear layer, a name of `skip` is that of no module, or a weight is
            NaN or infinite.
        UnsupportedError: A layer has hooks, splits tokens over ranks, has another dtype than bf16,
            fp32 and fp64, or is not on a CPU.
    """
    _check_skip(model, skip)
    chosen = [names for names in _linears(model) if not _is_skipped(names, skip)]
    if only is not None:
        chosen = [names for names in chosen if any(name in only for name in names)]
    elif not chosen:
        raise ConfigError(
            f"quantize_int8: a {type(model).__name__}",
            found="no linear layer in it that is to be replaced",
            why="Layers of torch's nn.Linear and of pcomm's tensor parallelism are replaced, each "
            "in the module that holds it.",
            fix="Pass the model that holds them, or make one layer by Int8Linear(weight, bias).",
        )
    for names in chosen:
        _replace(model, names)
    return tuple(chain.from_iterable(chosen))


def _linears(model: nn.Module) -> list[list[str]]:
    """Names of each linear layer; several if it is used at several places."""
    found: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if name and type(module) in _LAYERS:
            found.setdefault(id(module), []).append(name)
    return list(found.values())


def _replace(model: nn.Module, names: list[str]) -> None:
    old = model.get_submodule(names[0])
    hooks = (
        old._forward_hooks,
        old._forward_pre_hooks,
        old._backward_hooks,
        old._backward_pre_hooks,
    )
    if any(hooks):
        raise UnsupportedError(
            f"quantize_int8: layer {names[0]}",
            found="hooks on it",
            why="They see a layer that is replaced, and weights that are not there any more.",
            fix=f"Remove them first, or leave the layer out with skip=[{names[0]!r}].",
        )
    new = int8_layer(old)
    for name in names:
        model.set_submodule(name, new)


def _is_skipped(names: list[str], skip: Collection[str]) -> bool:
    above = [part for name in names for part in _upwards(name)]
    return any(fnmatchcase(part, pattern) for part in above for pattern in skip)


def _upwards(name: str) -> Iterator[str]:
    """The name of a module, and those of the modules around it."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _check_skip(model: nn.Module, skip: Collection[str]) -> None:
    if not skip:
        return
    known = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    for pattern in skip:
        if not any(fnmatchcase(name, pattern) for name in known):
            raise ConfigError(
                f"quantize_int8: skip {pattern!r}",
                found="no module of this name",
                why="A layer that was meant to stay would be replaced.",
                fix=near_misses(pattern, known),
            )
