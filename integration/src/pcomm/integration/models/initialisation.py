"""First weights, or none where they are read next."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import init
from torch.overrides import TorchFunctionMode

from pcomm.core.tensor_parallel import param_layouts_of, take_shard
from pcomm.integration.config.sections import ModelConfig

__all__ = ["SkipInit", "initialise"]


# Layers that write into the residual stream; their variance is shared among all of them.
_RESIDUAL = ("mixer.output.weight", "mlp.down.weight", "mlp.shared.down.weight", "mlp.experts.down")


@runtime_checkable
class KnowsFirstValues(Protocol):
    """A module that says what its own parameters start from."""

    def first_values(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """The whole parameter `name`, of the logical `shape`."""
        ...


def initialise(
    model: nn.Module, config: ModelConfig, *, seed: int, ranks: Mapping[str, int] | None = None
) -> None:
    """Fill every parameter of `model` with this rank's part of the logical weight. Local.

    A logical weight is drawn whole, by a generator of its own, and then cut; so the same seed
    gives the same model on 1, 2 or 4 ranks, and adding a layer changes no other. Matrices are
    normal with `config.init_std`, those that write into the residual stream less by the square
    root of twice the number of layers (Radford et al., 2019), norms are 1, biases 0. What a module
    says in `first_values` goes first.

    Args:
        model: The model whose parameters are filled.
        config: The shape of the model.
        seed: Seed of the run.
        ranks: Rank of this process by the scope of `ParamLayout`; None where one rank has all.
    """
    ranks = ranks or {}
    param_layouts = param_layouts_of(model)
    for name, parameter in model.named_parameters():
        param_layout = param_layouts[name]
        generator = torch.Generator().manual_seed(_seed_of(seed, name))
        prefix, _, own_name = name.rpartition(".")
        owner = model.get_submodule(prefix)
        shape = param_layout.logical_shape(parameter.shape)
        whole = torch.ones(shape)
        if isinstance(owner, KnowsFirstValues):
            # A mixer knows what its decays and time steps should be.
            whole = owner.first_values(own_name, shape, generator)
        elif parameter.dim() >= 2:
            std = config.init_std
            if name.endswith(_RESIDUAL):
                std /= math.sqrt(2 * config.layers)
            whole.normal_(0.0, std, generator=generator)
        elif own_name == "bias":
            whole.zero_()
        if param_layout.layout is not None:
            whole = take_shard(
                whole, param_layout.layout, ranks.get(param_layout.scope, 0), dim=param_layout.dim
            )
        with torch.no_grad():
            parameter.copy_(whole)


def _seed_of(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


_DRAWS = (
    torch.Tensor.normal_,
    torch.Tensor.uniform_,
    init.kaiming_uniform_,
    init.normal_,
    init.uniform_,
)


class SkipInit(TorchFunctionMode):
    """A context manager in which random initialisation leaves a tensor as it was allocated.

    For large models the draws take far longer than reading the weights. What is not filled
    afterwards holds any value.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """The result of a call, or the tensor itself for one that draws."""
        given = kwargs or {}
        if func in _DRAWS:
            return args[0] if args else given["tensor"]
        return func(*args, **given)
