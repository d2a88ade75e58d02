"""The linear layers of a model by name, and which of them are meant."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase

from torch import nn

from pcomm.core.errors import ConfigError, near_misses
from pcomm.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

__all__ = ["linear_layers"]

_LAYERS = (nn.Linear, ColumnParallelLinear, RowParallelLinear)


def linear_layers(
    model: nn.Module, *, skip: Collection[str] = (), only: Collection[str] | None = None
) -> dict[tuple[str, ...], nn.Module]:
    """Layers that hold their own weight, by all names that they have. Local.

    A subclass of `nn.Linear` or of a tensor-parallel layer is none of them, for it may compute
    something else; neither is a layer whose weight is made by a parametrization, or was replaced.

    Args:
        model: Model that holds them; its own name is the empty one.
        skip: Names of modules that are left out with everything in them; `*` stands for any
            characters.
        only: Names of the layers that are meant; None for all.

    Raises:
        ConfigError: A name of `skip` is that of no module.
    """
    _check_skip(model, skip)
    names: dict[int, list[str]] = {}
    layers: dict[int, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if _has_own_weight(module):
            names.setdefault(id(module), []).append(name)
            layers[id(module)] = module
    return {
        tuple(own): layers[key]
        for key, own in names.items()
        if not _is_skipped(own, skip) and (only is None or any(one in only for one in own))
    }


def _has_own_weight(layer: nn.Module) -> bool:
    if type(layer) not in _LAYERS or "weight_product" in layer.__dict__:
        return False
    return layer._parameters.get("weight") is not None


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
                f"linear layers: skip {pattern!r}",
                found="no module of this name",
                why="A layer that was meant to stay would be replaced.",
                fix=near_misses(pattern, known),
            )
