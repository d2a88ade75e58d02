"""Units that a model names itself, or that its repeated blocks are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from torch import nn

__all__ = ["choose_units"]

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def choose_units(model: nn.Module) -> tuple[list[nn.Module], str]:
    """Units for a model whose caller names none. Local.

    Models of transformers name the classes that stay together, in `_no_split_modules`. In the place
    of one with the input embedding inside is that embedding, which models around it call. In others
    they are the modules that a `ModuleList` or a `Sequential` repeats, or else the class with
    several layers of its own of which the model has most. A class of which an instance shares a
    parameter with something outside of it is left to what is around it, such as embeddings that are
    tied to the head.

    Args:
        model: The whole model.

    Returns:
        The modules, and a line that says which and why.
    """
    owners = _owners(model)
    named = _named(model)
    inputs = set(_input_embeddings(model))
    for why, found in (
        (
            "its _no_split_modules",
            [
                next((one for one in m.modules() if one in inputs), m)
                for m in model.modules()
                if type(m).__name__ in named
            ],
        ),
        ("what its lists of modules repeat", list(_listed(model))),
        ("its most frequent block", _most_frequent(model)),
    ):
        modules = _not_tied((m for m in found if m is not model and _has(m)), owners)
        if modules:
            counts = Counter(type(module).__name__ for module in modules)
            kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items())
            return modules, f"units: {kinds}, by {why}"
    return [], "units: none, since nothing in the model is repeated; all parameters in the root"


def _named(model: nn.Module) -> set[str]:
    names: set[str] = set()
    for module in model.modules():
        names.update(getattr(module, "_no_split_modules", None) or ())
    return names


def _input_embeddings(model: nn.Module) -> Iterator[nn.Embedding]:
    """What models of transformers hand out to those that put images or sounds among tokens."""
    for module in model.modules():
        try:
            found = module.get_input_embeddings()  # type: ignore[operator]
        except (AttributeError, NotImplementedError):
            continue
        if isinstance(found, nn.Embedding):
            yield found


def _listed(module: nn.Module) -> Iterator[nn.Module]:
    """Modules whose class a list that holds them repeats, and nothing inside them."""
    children = list(module.children())
    repeated: set[type[nn.Module]] = set()
    if isinstance(module, nn.ModuleList | nn.Sequential):
        counts = Counter(type(child) for child in children if _has(child))
        repeated = {k for k, n in counts.items() if n > 1 and not issubclass(k, _CONTAINERS)}
    for child in children:
        if type(child) in repeated:
            yield child
        else:
            yield from _listed(child)


def _most_frequent(model: nn.Module) -> list[nn.Module]:
    """Instances of the class with the most of them, each with two matrices or more."""
    found: dict[type[nn.Module], list[nn.Module]] = {}
    for module in model.modules():
        if (
            not isinstance(module, _CONTAINERS)
            and sum(p.dim() > 1 for p in module.parameters()) > 1
        ):
            found.setdefault(type(module), []).append(module)
    several = [modules for modules in found.values() if len(modules) > 1]
    return max(several, key=lambda m: (len(m), _size(m[0])), default=[])


def _not_tied(
    modules: Iterable[nn.Module], owners: dict[nn.Parameter, set[nn.Module]]
) -> list[nn.Module]:
    """Those of classes whose instances share no parameter with what is outside of them."""
    found = list(modules)
    tied: set[type[nn.Module]] = set()
    for module in found:
        inside = set(module.modules())
        if not all(owners[parameter] <= inside for parameter in module.parameters()):
            tied.add(type(module))
    return [module for module in found if type(module) not in tied]


def _owners(model: nn.Module) -> dict[nn.Parameter, set[nn.Module]]:
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(parameter, set()).add(module)
    return owners


def _has(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
