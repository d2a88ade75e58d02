"""The linear layers of a model by name, and another form of their weights in the same layers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from fnmatch import fnmatchcase
from itertools import chain

import torch
from torch import Tensor, nn

from pcomm.core.errors import ConfigError, UnsupportedError, near_misses
from pcomm.core.tensor_parallel import (
    ColumnParallelLinear,
    ReplaceableLinear,
    RowParallelLinear,
    WeightProduct,
    check_no_gradient,
    forget_weight,
)

__all__ = ["check_input", "linear_layers", "replace_weights"]


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
            characters. A string is one name.
        only: Names of the layers that are meant, of which those that were replaced are left out;
            a string is one name, None stands for all.

    Raises:
        ConfigError: A name of `skip` is that of no module, or one of `only` that of no layer.
    """
    skip = (skip,) if isinstance(skip, str) else skip
    only = (only,) if isinstance(only, str) else only
    _check_skip(model, skip)
    names: dict[int, list[str]] = {}
    layers: dict[int, nn.Module] = {}
    known: list[str] = []
    for name, module in model.named_modules(remove_duplicate=False):
        is_whole = _has_own_weight(module)
        if is_whole or "weight_product" in module.__dict__:
            known.append(name)
        if is_whole:
            names.setdefault(id(module), []).append(name)
            layers[id(module)] = module
    for name in () if only is None else only:
        if name not in known:
            raise ConfigError(
                f"linear layers: only {name!r}",
                found="no linear layer of this name",
                why="Layers are torch's nn.Linear and pcomm's tensor-parallel ones, and no "
                "subclasses; a name is the whole one that named_modules gives.",
                fix=near_misses(name, known),
            )
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
    known = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    for pattern in skip:
        if not any(fnmatchcase(name, pattern) for name in known):
            raise ConfigError(
                f"linear layers: skip {pattern!r}",
                found="no module of this name",
                why="A layer that was meant to stay would be replaced.",
                fix=near_misses(pattern, known),
            )


def replace_weights(
    model: nn.Module,
    layers: dict[tuple[str, ...], nn.Module],
    make: Callable[[Tensor], WeightProduct | None],
    check: Callable[[Tensor], object],
) -> tuple[str, ...]:
    """Replace the weights of layers, one after another, or none of them. Local.

    No more than one weight is there in two forms, except where another module keeps it, as the
    embedding does of a tied one: that stays the parameter of the layer, which computes without it.
    Layers that share one weight share what is made of it, and the parameter in its place. So the
    model has as many parameters as before. A layer stays the module that it is, with its hooks and
    its bias.

    Args:
        model: Model that holds them.
        layers: Layers from `linear_layers`, changed in place.
        make: Function of a weight `[O, I]`; None leaves the layer as it is.
        check: Function of a weight that raises where `make` would. It sees all of several weights
            before the first one is replaced.

    Returns:
        Names of the layers that were changed.
    """
    if len(layers) > 1:
        for weight in {id(layer.weight): layer.weight for layer in layers.values()}.values():
            assert isinstance(weight, Tensor)
            check(weight.detach())
    shared, tied = _weights_of_several(layers.values()), _weights_of_others(model, layers.values())
    made: dict[int, WeightProduct | None] = {}
    in_place: dict[int, nn.Parameter] = {}
    # A weight whose product others wait for is kept, so that no other tensor can get its id.
    kept: list[Tensor] = []
    changed: list[tuple[str, ...]] = []
    for names, layer in layers.items():
        weight = layer.weight
        assert isinstance(weight, Tensor)
        key = id(weight)
        product = made[key] if key in made else make(weight.detach())
        if key in shared:
            made[key] = product
            kept.append(weight)
        del weight
        if product is not None:
            _replace(layer, product)
            changed.append(names)
            stand_in = layer.weight
            assert isinstance(stand_in, nn.Parameter)
            if key in tied:
                stand_in = tied[key]
            elif key in shared:
                stand_in = in_place.setdefault(key, stand_in)
            layer._parameters["weight"] = layer.__dict__["_stand_in"] = stand_in
    if changed:
        _refuse_resizing(model)
    return tuple(chain.from_iterable(changed))


def _refuse_resizing(model: nn.Module) -> None:
    """Keep transformers from making a new head of a weight without memory."""
    for module in model.modules():
        head = getattr(module, "get_output_embeddings", lambda: None)()
        if isinstance(head, nn.Module) and "weight_product" in head.__dict__:
            module.resize_token_embeddings = _no_resize  # type: ignore[assignment]


def _no_resize(*_sizes: object, **_options: object) -> None:
    raise UnsupportedError(
        "resize_token_embeddings",
        found="a model whose head was replaced by its packed or quantised form",
        why="The rows of the new head are those of the weight that is gone.",
        fix="Load the model again, and resize it before its weights are replaced.",
    )


def check_input(x: Tensor, form: str, inputs: int, dtype: torch.dtype) -> None:
    """Refuse an input that a product would read as what it is not. Local.

    Args:
        x: The input.
        form: Word for the form of the weight.
        inputs: I, the number of inputs.
        dtype: The dtype of the activations.

    Raises:
        ConfigError: The input is not `[..., I]` of this dtype on a CPU.
    """
    if x.dtype != dtype or not x.is_cpu or x.shape[-1:] != (inputs,):
        raise ConfigError(
            f"a linear layer of {inputs} inputs with {form} of {dtype}",
            found=f"an input of {x.dtype} on {x.device}, {list(x.shape)}",
            why="The weight was brought into this form for a CPU and for this dtype, and is not "
            f"converted; the last dimension of an input is {inputs}.",
            fix="Move and convert the model before its weights are replaced, and give inputs of "
            "its dtype and width.",
        )


def _weights_of_several(layers: Iterable[nn.Module]) -> set[int]:
    """Ids of the weights that several layers share."""
    seen, shared = set[int](), set[int]()
    for layer in layers:
        (shared if id(layer.weight) in seen else seen).add(id(layer.weight))
    return shared


def _weights_of_others(model: nn.Module, layers: Iterable[nn.Module]) -> dict[int, nn.Parameter]:
    """The parameters by id that other modules of a model keep, such as the embedding."""
    replaced = set(layers)
    return {
        id(one): one
        for module in model.modules()
        if module not in replaced
        for one in module.parameters(recurse=False)
    }


class _ReplacedLinear(ReplaceableLinear, nn.Linear):
    """An `nn.Linear` whose weight was replaced: a layer becomes one in place, by its class."""

    weight_product: WeightProduct

    def forward(self, x: Tensor) -> Tensor:
        """`x W^T + b` with the product in place of the weight."""
        check_no_gradient(self, x)
        return self.weight_product(x, self.bias)


def _replace(layer: nn.Module, product: WeightProduct) -> None:
    if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
        layer.replace_weight(product)
        return
    assert isinstance(layer, nn.Linear)
    forget_weight(layer, product)
    # Hooks, bias, copies and pickling stay those of a module; a function of the layer in the layer
    # would keep its memory until the garbage collector comes.
    layer.__class__ = _ReplacedLinear
