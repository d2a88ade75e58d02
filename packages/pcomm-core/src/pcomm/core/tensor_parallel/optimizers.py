"""What a step of an optimizer needs of other shards: which optimizers need nothing, and norms."""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pcomm.core.errors import UnsupportedError

__all__ = ["first_mixed", "known_mixed", "sum_of_squares"]


_Other = Literal["same", "differs", "missing"]

# fmt: off
_ELEMENTWISE = frozenset((
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop",
    "SGD", "SparseAdam",
))
_MIXED = frozenset((
    "Adafactor", "CAME", "DistributedShampoo", "GaLoreAdafactor", "GaLoreAdamW", "LAMB", "LARS",
    "LBFGS", "Lamb", "Lars", "Muon", "MuonWithAuxAdam", "SOAP", "Shampoo",
    "ZeroRedundancyOptimizer",
))
# fmt: on
"""Torch's own optimizers that need no trial, and names of those that need none to be refused.

Some of the latter could not be tried: they communicate in their step.
"""

_STEPS = 128
"""Steps of a trial: matrices that are computed every 100 steps are among them."""

_STEPS_ALONE = 16
"""Steps of the trial without the other shard. What scales an update by a shape does so at once."""

_SHAPES = ((1 << 15,), (256, 128), (256, 16, 8), (256, 8, 4, 4))
"""Shapes by number of dimensions, the one that is cut first; beyond these, (256, 2, 2, ...).

So small that torch computes with one thread. Long enough for states in blocks of some thousand
elements: those between the elements that are compared and those that differ may depend on both.
Wide enough for optimizers that take means along both dimensions only of large matrices.
"""

_SCALES = (0.125, 0.125, 0.125, 64.0)
"""Factors of the gradients of the other shard, step by step: a quiet one, with bursts.

The norm of a matrix is 3, and 160 in a burst: limits of norms are between them.
"""

_TOLERANCE = 1e-3
"""Relative difference of two updates of a step. Elementwise ones are equal to the bit."""

_LEFT_OUT = ("state", "param_groups", "step")
"""Attributes that are made anew; `step` is that which a learning rate scheduler has put there."""


def known_mixed(optimizer: Optimizer) -> str | None:
    """A class of the optimizer that is known to look at more than one element at a time. Local."""
    return min({kind.__name__ for kind in type(optimizer).__mro__} & _MIXED, default=None)


def first_mixed(optimizer: Optimizer, cut: Mapping[Tensor, int]) -> Tensor | None:
    """A parameter to whose elements the optimizer does what depends on other shards. Local.

    To be asked once, before the first step: it takes some tenths of a second, and nothing for
    torch's own elementwise optimizers, nor where `optimizer.is_elementwise` is True. The optimizer,
    its parameters and the state of random generators stay as they are. All ranks get the same
    answer for the same optimizer. What begins to look at other elements after 128 steps only is not
    seen.

    Args:
        optimizer: An optimizer, before its step.
        cut: The dimension along which ranks have different shards, for each parameter that is cut.
            Others are not looked at.

    Raises:
        UnsupportedError: The optimizer cannot be tried.
    """
    kind = type(optimizer)
    is_torchs = kind.__module__.startswith("torch.optim.") and kind.__name__ in _ELEMENTWISE
    if is_torchs or getattr(optimizer, "is_elementwise", False):
        return None
    tried: set[tuple[int, int, int]] = set()
    drawn = random.getstate()
    for place, group in enumerate(optimizer.param_groups):
        # Matrices first: a product of a long vector with itself may be larger than memory.
        for parameter in sorted(group["params"], key=Tensor.dim, reverse=True):
            dim = cut.get(parameter)
            if dim is None or not parameter.dim() or (place, parameter.dim(), dim) in tried:
                continue
            tried.add((place, parameter.dim(), dim))
            try:
                devices = [parameter.device] if parameter.is_cuda else []
                with torch.random.fork_rng(devices):
                    is_mixed = _is_mixed(optimizer, place, parameter, dim)
            except Exception as error:  # whatever a step on other tensors may raise
                raise _untried(optimizer, error) from error
            finally:
                random.setstate(drawn)
            if is_mixed:
                found: Tensor = parameter
                return found
    return None


def _is_mixed(optimizer: Optimizer, place: int, like: Tensor, dim: int) -> bool:
    others: tuple[_Other, ...] = ("same", "differs", "missing")
    *runs, alone = (_updates(optimizer, place, like, dim, other) for other in others)
    for step, ((update, draws), (other, _)) in enumerate(zip(*runs, strict=True)):
        if not update.isfinite().all():
            # The trial itself diverges. What comes now tells nothing.
            return False
        found = [other]
        if step < _STEPS_ALONE:
            shorter, _ = next(alone)
            # Numbers that are drawn for another shape are others.
            found += [] if draws else [shorter]
        if not all((one - update).norm() <= _TOLERANCE * update.norm() for one in found):
            return True
    return False


def _updates(
    optimizer: Optimizer, place: int, like: Tensor, dim: int, other: _Other
) -> Iterator[tuple[Tensor, bool]]:
    """What each step adds to the first quarter of the elements along a dimension.

    Args:
        optimizer: The optimizer.
        place: The index of the parameter group.
        like: A parameter of that group.
        dim: The dimension that is cut.
        other: The last quarter is as in the first run, has other values, or is not there.

    Yields:
        That, and whether the step drew random numbers of torch's.
    """
    generator = torch.Generator().manual_seed(0)
    whole = _drawn(like, dim, generator)
    gradients = [_drawn(like, dim, generator) for _ in _SCALES]
    quarter = whole.shape[dim] // 4
    if other == "differs":
        whole.chunk(4, dim)[-1].mul_(8)
        for gradient, scale in zip(gradients, _SCALES, strict=True):
            gradient.chunk(4, dim)[-1].add_(0.02).mul_(scale)
    elif other == "missing":
        whole, *gradients = (torch.cat(x.chunk(4, dim)[:-1], dim) for x in (whole, *gradients))
    parameter = nn.Parameter(whole)
    first = parameter.detach().narrow(dim, 0, quarter)
    trial = _copy(optimizer, place, like, parameter)
    has_generator = any(isinstance(value, torch.Generator) for value in vars(trial).values())
    for step in range(_STEPS):
        parameter.grad = gradients[step % len(gradients)].clone()
        before = first.clone()
        # What a step draws, such as a rounding, is the same in all runs.
        _seed(like, step)
        random.seed(step)
        drawn = _random_state(like)
        # Not `trial.step`, which a scheduler may have replaced by one of the optimizer itself.
        type(trial).step(trial)
        draws = has_generator or not torch.equal(drawn, _random_state(like))
        yield first - before, draws


def _seed(like: Tensor, seed: int) -> None:
    """Not `torch.manual_seed`: other devices' generators would change, and it takes 5 ms."""
    torch.default_generator.manual_seed(seed)
    if like.is_cuda:
        torch.cuda.default_generators[like.device.index].manual_seed(seed)


def _random_state(like: Tensor) -> Tensor:
    return torch.cuda.get_rng_state(like.device) if like.is_cuda else torch.get_rng_state()


def _drawn(like: Tensor, dim: int, generator: torch.Generator) -> Tensor:
    num_dims = like.dim()
    length, *widths = _SHAPES[num_dims - 1] if num_dims <= 4 else (256, *[2] * (num_dims - 1))
    shape = [*widths[:dim], length, *widths[dim:]]
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64) / 50
    dtype = torch.float64 if like.dtype is torch.float64 else torch.float32
    return drawn.to(like.device, dtype)


def _copy(optimizer: Optimizer, place: int, like: Tensor, parameter: nn.Parameter) -> Optimizer:
    """An optimizer of one tensor that has all else in common with a group of another one."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    memo: dict[int, Any] = {id(p): parameter for p in held}
    options = {key: v for key, v in optimizer.param_groups[place].items() if key != "params"}
    group = copy.deepcopy(options, memo) | {"params": [parameter]}
    if "lr" in group and group["lr"] is not None:
        # It may be zero in the first step. What estimates a rate asks for a factor of 1.
        rates = (group["lr"], group.get("initial_lr"), optimizer.defaults.get("lr"))
        rate = next((float(one) for one in rates if one), 1e-3)
        group["lr"] = torch.full_like(lr, rate) if isinstance(lr := group["lr"], Tensor) else rate
    trial = object.__new__(type(optimizer))
    own = {
        key: value
        for key, value in vars(optimizer).items()
        if key not in _LEFT_OUT and not key.endswith("_hooks")
    }
    vars(trial).update(copy.deepcopy(own, memo))
    state: dict[Any, Any] = defaultdict(dict)
    for key, value in optimizer.state.get(like, {}).items():
        # Made with the optimizer, or before this trial: what has dimensions of the parameter has
        # those of ours.
        has_dims = isinstance(value, Tensor) and value.dim()
        shape = _shape_of_trial(value, like, parameter) if has_dims else None
        state[parameter][key] = value.new_zeros(shape) if shape else copy.deepcopy(value, memo)
    Optimizer.__setstate__(trial, {"state": state, "param_groups": [group]})
    return trial


def _shape_of_trial(value: Tensor, like: Tensor, parameter: Tensor) -> list[int] | None:
    """The shape that a state of `like` has for `parameter`; None if it is of another kind."""
    found, own, new = value.shape, like.shape, parameter.shape
    num_dims = value.dim()
    if num_dims == like.dim() and all(n in (1, size) for n, size in zip(found, own, strict=True)):
        return [b if n == a else 1 for n, a, b in zip(found, own, new, strict=True)]
    if found == own[:num_dims]:
        return list(new[:num_dims])
    return list(new[-num_dims:]) if found == own[-num_dims:] else None


def _untried(optimizer: Optimizer, error: Exception) -> UnsupportedError:
    name = type(optimizer).__name__
    return UnsupportedError(
        f"step of {name}",
        found=f"no elementwise optimizer of torch's, and a trial of its step on other tensors "
        f"ended with {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
        why="Ranks have shards. A norm or a product of a momentum would be that of one shard, and "
        "nothing would tell.",
        fix=f"Use an optimizer of torch.optim, or set {name}.is_elementwise = True if what it does "
        "to an element depends on no other one.",
    )


# On a CPU torch adds the squares of a tensor one after the other in fp32, in as many sums as a
# register has lanes. Of 2**20 random elements the norm is 1e-5 too small, of 2**27 one percent;
# of these few it is off by rounding.
_PIECE = 2**16


def sum_of_squares(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Add up the squares of all elements of all tensors, in fp64. Local; no wait for the device.

    Args:
        tensors: Floating-point tensors. Each chunk is squared in the type that torch computes its
            norm in; the sum over chunks and tensors is in fp64.
        device: Device of the tensors and of the result, also if there are no tensors.
    """
    # Kernels for GPUs add up in a tree, and a view more is a kernel more.
    is_flat = device.type == "cpu"
    pieces = [piece for one in tensors for piece in (_pieces(one) if is_flat else [one])]
    if not pieces:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(pieces)).double().square().sum()


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    return tensor.flatten().split(_PIECE) if tensor.numel() > _PIECE else [tensor]
