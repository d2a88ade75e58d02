"""Checks of what a model declares that its layers keep, before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from pcomm.core.errors import ConfigError
from pcomm.inference.model import KVSpec, StateSpec

__all__ = ["check_memory_specs", "check_model"]


def check_model(model: object) -> None:
    """Refuse an object without the two methods of a `Model`. Local.

    Args:
        model: Object that an engine was made with.

    Raises:
        ConfigError: It has no `memory_specs()` or no `step()`, or is a class.
    """
    methods = ("memory_specs", "step")
    missing = [name for name in methods if not callable(getattr(model, name, None))]
    if isinstance(model, type):
        found = f"the class {model.__name__}"
    elif missing:
        found = f"a {type(model).__name__} without {' and '.join(f'{n}()' for n in missing)}"
    else:
        return
    raise ConfigError(
        "Engine: model",
        found=found,
        why="A model says by memory_specs() what each layer keeps of a request, and computes the "
        "tokens of a step by step(batch, memory).",
        fix="Give an object with both methods; the README of pcomm-inference begins with one.",
    )


def check_memory_specs(specs: object) -> None:
    """Refuse what no pool can be allocated from. Local.

    Args:
        specs: Result of `Model.memory_specs`.

    Raises:
        ConfigError: It is no sequence, or a layer of it is none of `KVSpec`, `StateSpec` and None,
            or has a size, shape or dtype that no tensor has. The message names the layer.
    """
    if not isinstance(specs, Sequence) or isinstance(specs, str | bytes):
        raise ConfigError(
            "Engine: memory_specs",
            found=f"a {type(specs).__name__}",
            why="The engine allocates the memory of each layer from its entry.",
            fix="Return a list with a KVSpec, a StateSpec or None for each layer.",
        )
    for number, spec in enumerate(specs):
        if isinstance(spec, KVSpec):
            _check_kv(number, spec)
        elif isinstance(spec, StateSpec):
            _check_state(number, spec)
        elif spec is not None:
            raise ConfigError(
                f"Engine: layer {number} of memory_specs",
                found=f"a {type(spec).__name__}",
                why="The engine has pools for keys and values, and for states.",
                fix="Return a KVSpec, a StateSpec or None for each layer.",
            )


def _check_kv(number: int, spec: KVSpec) -> None:
    for name in ("heads", "head_dim"):
        size = getattr(spec, name)
        if not _is_size(size, 1):
            raise ConfigError(
                f"Engine: layer {number} of memory_specs",
                found=f"{name} = {size!r} in its KVSpec",
                why="The pool of keys and values has a dimension of that size.",
                fix=f"Give {name} as an integer of at least 1, or None for a layer that keeps "
                "nothing.",
            )
    _check_dtype(number, "KVSpec.dtype", spec.dtype)
    if not spec.dtype.is_floating_point:
        raise ConfigError(
            f"Engine: layer {number} of memory_specs",
            found=f"KVSpec.dtype = {spec.dtype}",
            why="Keys and values are floating-point numbers; another dtype would cut them off.",
            fix="Give the dtype of the activations, torch.bfloat16 for example.",
        )


def _check_state(number: int, spec: StateSpec) -> None:
    for field in ("shapes", "dtypes"):
        mapping = getattr(spec, field)
        if not isinstance(mapping, Mapping):
            raise ConfigError(
                f"Engine: layer {number} of memory_specs",
                found=f"{field} of its StateSpec is a {type(mapping).__name__}",
                why="Tensors of a state have names, by which the layer reads and writes them.",
                fix=f"Give {field} as a dict with an entry for each tensor.",
            )
    for name in spec.dtypes:
        if name not in spec.shapes:
            raise _one_of_two(number, name, "a dtype and no shape", "shapes")
    for name, shape in spec.shapes.items():
        if name not in spec.dtypes:
            raise _one_of_two(number, name, "a shape and no dtype", "dtypes")
        is_sizes = isinstance(shape, Sequence) and not isinstance(shape, str | bytes)
        if not is_sizes or not all(_is_size(size, 0) for size in shape):
            raise ConfigError(
                f"Engine: layer {number} of memory_specs",
                found=f"shape {shape!r} of tensor {name!r}",
                why="The pool of a state has these dimensions behind that of its slots.",
                fix="Give the shape as a tuple of integers of at least 0.",
            )
        _check_dtype(number, f"dtypes[{name!r}]", spec.dtypes[name])


def _check_dtype(number: int, name: str, dtype: object) -> None:
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(
            f"Engine: layer {number} of memory_specs",
            found=f"{name} = {dtype!r}",
            why="Pools are tensors of torch.",
            fix="Give a torch.dtype, torch.bfloat16 for example.",
        )


def _one_of_two(number: int, name: object, found: str, missing: str) -> ConfigError:
    return ConfigError(
        f"Engine: layer {number} of memory_specs",
        found=f"tensor {name!r} has {found}",
        why="The pool of a state is allocated from both.",
        fix=f"Add {missing}[{name!r}] to its StateSpec.",
    )


def _is_size(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
