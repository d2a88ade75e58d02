"""What every op does on entry: checks, precision, and whether it is traced and recorded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

# The same as torch.compiler.disable, except that Dynamo (seconds) is imported by the first call,
# not when a function is defined. torch's optimizers use it for that reason.
from torch._compile import _disable_dynamo

from pcomm.core.errors import ConfigError, LayoutError, UnsupportedError

__all__ = [
    "apply_function",
    "check_group",
    "check_shape",
    "check_tokens",
    "compute_dtype",
    "differentiable_once",
    "full_precision",
    "graph_break",
]


def check_tokens(asked: str, cu_seqlens: Sequence[int], **tensors: Tensor) -> None:
    """Every tensor has one row for each token of the pack.

    Raises:
        LayoutError: A tensor is longer or shorter than the last offset.
    """
    for name, x in tensors.items():
        if len(x) != cu_seqlens[-1]:
            raise LayoutError(
                f"{asked}: {name}",
                found=f"{len(x)} tokens, and cu_seqlens ends at {cu_seqlens[-1]}",
                why="A token outside all sequences has no state to meet.",
                fix="Cut the tensor at the last offset, or give the rest an offset of its own.",
            )


def check_shape(asked: str, x: Tensor, shape: tuple[int, ...]) -> None:
    """`x` has the shape that the other arguments ask for.

    Raises:
        ConfigError: Another shape.
    """
    if tuple(x.shape) != shape:
        raise ConfigError(
            asked,
            found=f"shape {tuple(x.shape)}",
            why=f"By the other arguments it has {shape}.",
            fix="See the docstring for what each dimension is.",
        )


def check_group(asked: str, num_heads: int, num_groups: int) -> None:
    """Every key head, or group, serves the same number of value heads.

    Raises:
        ConfigError: Value heads that are no multiple of the key heads.
    """
    if num_groups < 1 or num_heads % num_groups:
        raise ConfigError(
            asked,
            found=f"{num_heads} value heads and {num_groups} key heads",
            why="Each key head serves the same number of consecutive value heads.",
            fix="Make the number of value heads a multiple of the number of key heads.",
        )


def compute_dtype(x: Tensor) -> torch.dtype:
    """fp64 for fp64 inputs, fp32 for all others; states are kept in it too."""
    return torch.promote_types(x.dtype, torch.float32)


def full_precision(x: Tensor) -> torch.autocast:
    """A context on the device of `x` in which autocast lowers nothing.

    A recurrence over thousands of tokens does not bear bf16 products, and the steps of a scan
    write into buffers whose dtype must not change.
    """
    return torch.autocast(x.device.type, enabled=False)


_Given = ParamSpec("_Given")
_Found = TypeVar("_Found")


def graph_break(function: Callable[_Given, _Found]) -> Callable[_Given, _Found]:
    """`function`, at which a compiled layer leaves its graph; the same to all other callers.

    A plan is another one for each micro-batch, and its collectives run in Python. A graph that had
    traced them would belong to one pack, so what a layer asks a plan or a core for runs as it
    stands, and `torch.compile` compiles what lies between. With `fullgraph=True` it says so.
    """
    outside = _disable_dynamo(function)

    @wraps(function)
    def call(*args: _Given.args, **kwargs: _Given.kwargs) -> _Found:
        # Nothing is traced before Dynamo is imported, which takes seconds.
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        return outside(*args, **kwargs)

    # Dynamo would otherwise trace the condition, and with it all modules, in each caller: more than
    # half the time of compiling a layer.
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call


def apply_function(function: type[torch.autograd.Function], *inputs: Any) -> Any:
    """`function.apply(*inputs)`; where no gradient is recorded its forward alone, which costs less.

    Args:
        function: Class whose forward reads nothing from its context.
        inputs: Tensors and other arguments of its forward.
    """
    tensors = (x for x in inputs if isinstance(x, Tensor))
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return function.apply(*inputs)
    return function.forward(_NotRecorded(), *inputs)


Backward = Callable[..., tuple[Tensor | None, ...]]


def differentiable_once(backward: Backward) -> Backward:
    """A backward of a `torch.autograd.Function` that refuses to be recorded.

    Torch's `once_differentiable` lets one pass whose incoming gradients are constants, as those of
    a sum are. A second derivative would then lack what passes through it, without an error.

    Args:
        backward: Function of the context and the incoming gradients.

    Returns:
        The same, which raises UnsupportedError where `create_graph=True` was given.
    """

    @wraps(backward)
    def checked(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "backward of pcomm.gdn_cp.ops with create_graph=True",
                found=backward.__qualname__,
                why="Its gradients are computed from what forward has kept, and cannot be "
                "differentiated twice.",
                fix="Leave create_graph out, or take second derivatives of a recurrence that is "
                "written token by token.",
            )
        return backward(ctx, *grads)

    return checked


class _NotRecorded:
    """The context of a forward without a backward: it keeps nothing."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Nothing."""

    def set_materialize_grads(self, value: bool) -> None:
        """Nothing."""
