"""Checks of tensors that all operations share, made before anything is launched.

What ranks have in common (shapes, types) raises alike on all of them. What one rank can have by
itself (strides, alignment) is no error: it is repaired by a copy on that rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pcomm.core.errors import LayoutError, UnsupportedError
from pcomm.nvls.policy.choose import Choice

__all__ = [
    "VECTOR_BYTES",
    "check_input",
    "dense",
    "kernel_dim",
    "kind_of",
    "way_of",
]

VECTOR_BYTES = 16
"""Bytes that a thread moves at a time; addresses are multiples of it."""


def check_input(operation: str, x: Tensor, device: torch.device) -> None:
    """Refuse a tensor that records gradients, or is on another kind of device. Local.

    Raises:
        UnsupportedError: Gradients are recorded for it, or it is no dense tensor.
        LayoutError: It is on another kind of device than the workspace.
    """
    if x.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError(
            f"{operation}: shape {tuple(x.shape)}, requires_grad=True",
            found="a tensor whose gradient is recorded",
            why="These collectives are for inference and have no backward.",
            fix="Call it under torch.no_grad(), or use Group.differentiable for training.",
        )
    if x.device.type != device.type:
        raise LayoutError(
            f"{operation}: a tensor on {x.device}",
            found=f"a workspace on {device}",
            why="Kernels read the tensor on the device of the workspace.",
            fix=f"Move it there, or open the workspace with device={x.device.type!r}.",
        )
    if x.layout is not torch.strided:
        raise UnsupportedError(
            f"{operation}: a tensor of layout {x.layout}",
            found="a layout other than torch.strided",
            why="Its bytes do not lie one after another.",
            fix="Pass x.to_dense().",
        )


def dense(x: Tensor) -> Tensor:
    """The tensor itself where its bytes follow each other from a multiple of 16, or such a copy."""
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    if not x.is_contiguous():
        return x.contiguous()
    return x if x.data_ptr() % VECTOR_BYTES == 0 else x.clone()


def way_of(choice: Choice) -> str:
    """How the kernels of a choice reach other ranks: "multicast" or "peers"."""
    return "multicast" if choice.algorithm == "multimem" else "peers"


def kind_of(dtype: torch.dtype) -> str:
    """How the kernels that add call a dtype: "bf16", "fp16" or "fp32"; the choice has no other."""
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]


def kernel_dim(x: Tensor, dim: int) -> int:
    """`dim` as kernels know it: 0, or -1 for the last of several; others as they are."""
    if not -x.dim() <= dim < x.dim():
        return dim
    place = dim % x.dim()
    return -1 if place and place == x.dim() - 1 else place
