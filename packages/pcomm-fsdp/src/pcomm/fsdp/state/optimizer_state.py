"""The state of an optimizer for each parameter, now or as its first step will make it."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pcomm.core.errors import ConfigError

__all__ = ["StateOf", "state_of"]


class StateOf:
    """Finds an optimizer's state of one parameter; a call returns the mapping itself.

    An optimizer's `load_state_dict` makes another mapping, so it is looked up each time.
    """

    def __init__(self, optimizer: Optimizer, parameter: Tensor) -> None:
        self._optimizer, self._parameter = optimizer, parameter

    def __call__(self) -> MutableMapping[str, Any]:
        """The mapping as it is now."""
        found: MutableMapping[str, Any] = self._optimizer.state[self._parameter]
        return found


def state_of(optimizer: Optimizer) -> Iterator[tuple[Tensor, Mapping[str, Any]]]:
    """Each parameter and its state, or that which its first step will make. Local.

    The optimizer is not changed: whether it has stepped is part of its state. A momentum that is
    not there yet becomes the first gradient, and one of zero does not.

    Raises:
        ConfigError: State that does not exist yet cannot be foreseen.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            existing = optimizer.state.get(parameter)
            if existing:
                yield parameter, existing
            elif parameter.requires_grad:
                yield parameter, _foreseen(optimizer, group, parameter)


def _foreseen(
    optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor
) -> Mapping[str, Any]:
    """State after one step of an optimizer of the same kind, with one parameter of its own."""
    own = nn.Parameter(torch.zeros_like(parameter))
    own.grad = torch.zeros_like(own)
    other = object.__new__(type(optimizer))
    # A learning-rate schedule replaces `step` by one that is bound to the original.
    vars(other).update({k: v for k, v in vars(optimizer).items() if k != "step"})
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        vars(other)[hooks] = OrderedDict()
    settings = copy.deepcopy({key: value for key, value in group.items() if key != "params"})
    other.param_groups = [{**settings, "params": [own]}]
    other.state = defaultdict(dict)
    try:
        other.step()
    except Exception as error:
        raise ConfigError(
            f"state of {type(optimizer).__name__} before its first step",
            found=f"{type(error).__name__}: {error}",
            why="Names and shapes of state are those that a step with zero gradients makes.",
            fix="Let the optimizer make its state, by a step, before shard views are asked for.",
        ) from error
    found: Mapping[str, Any] = other.state[own]
    return found
