"""Weights in the blocks that oneDNN multiplies by, made once instead of in every product."""

# Shape suffixes: M rows, I input features, O output features.

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.inference.layers.linear_layers import linear_layers
from pcomm.inference.layers.replace_weights import replace_weights

__all__ = ["PackedWeight", "pack_weights", "packed_weight"]

# Elements of a weight from which the packed product takes less time than `F.linear`: the call
# itself takes longer.
_FEWEST_ELEMENTS = {torch.bfloat16: 1 << 14, torch.float32: 1 << 18}

# Inputs up to which oneDNN adds up one row in the order in which it adds up many.
_MOST_INPUTS_OF_ONE_ROW = 1024


class PackedWeight:
    """`x W^T + b` with a weight that is kept in oneDNN's own layout. Local, without gradients.

    `F.linear` brings the weight into that layout in every call, which takes as long as the product
    of a few rows. The bits of a row depend on that row alone, in bf16 and in fp32: a single row of
    many inputs is computed as two equal ones. In bf16 they are those of `F.linear` for several rows
    of a matrix without gaps; elsewhere the two differ by rounding.

    Args:
        weight_OI: Weight `[O, I]`, bf16 or fp32 on a CPU; its numbers are copied.

    Attributes:
        nbytes: Size of the weight, in bytes.

    Raises:
        RuntimeError: torch has no such product for the dtype or on this processor.
    """

    def __init__(self, weight_OI: Tensor) -> None:
        ops: Any = torch.ops.mkldnn
        self._packed = ops._reorder_linear_weight(weight_OI.contiguous(), None)
        self._multiply = ops._linear_pointwise.default
        self.nbytes, self._dtype = weight_OI.nbytes, weight_OI.dtype
        self._doubles_one_row = weight_OI.shape[1] > _MOST_INPUTS_OF_ONE_ROW

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`[..., O]` of `x` `[..., I]`, dtype of the weight.

        Raises:
            ConfigError: The input has another dtype or device than the weight.
            UnsupportedError: It is being compiled.
        """
        if x.dtype != self._dtype or not x.is_cpu:
            raise self._other(x)
        if torch.compiler.is_compiling():
            raise _not_compiled()
        if self._doubles_one_row and x.numel() == x.shape[-1]:
            two = self._multiply(x.view(1, -1).expand(2, -1), self._packed, bias, "none", [], "")
            one: Tensor = two[:1].view(*x.shape[:-1], -1)
            return one
        y: Tensor = self._multiply(x, self._packed, bias, "none", [], "")
        return y

    def _other(self, x: Tensor) -> ConfigError:
        return ConfigError(
            f"a linear layer with a packed weight of {self._dtype}",
            found=f"an input of {x.dtype} on {x.device}",
            why="The weight was packed for a CPU and for this dtype, and is not converted.",
            fix="Move and convert the model before pack_weights, and give inputs of its dtype.",
        )

    def __deepcopy__(self, memo: dict[int, object]) -> PackedWeight:
        """The same: nothing changes it."""
        return self

    def __reduce__(self) -> str:
        """Refused.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            "pickle of a packed weight",
            found=f"a weight {list(self._packed.shape)} in oneDNN's layout",
            why="That layout is made for one processor.",
            fix="Load the model where it is needed, and pack its weights there.",
        )


def _not_compiled() -> UnsupportedError:
    return UnsupportedError(
        "torch.compile of a linear layer with a packed weight",
        found="a graph that is being traced",
        why="Inductor packs weights by itself and does not take those that are packed.",
        fix="Compile the model with its weights as they are.",
    )


def pack_weights(model: nn.Module, *, only: Collection[str] | None = None) -> tuple[str, ...]:
    """Keep the weights of the linear layers in the layout that the processor multiplies by. Local.

    For inference on a CPU, where it makes a step with few rows about twice as fast. Weights in
    bf16 and fp32 that are large enough to gain are packed; others, and everything on a processor
    or a build of torch without oneDNN, stay as they are. A weight that a layer shares with the
    embedding is there twice afterwards.

    Args:
        model: Model of `nn.Linear` or tensor-parallel layers, changed in place. Its layers refuse
            `state_dict` and gradients from then on.
        only: Names of the layers to pack; None for all.

    Returns:
        Names of the layers whose weights were packed.
    """
    return replace_weights(linear_layers(model, only=only), packed_weight)


def packed_weight(weight_OI: Tensor) -> PackedWeight | None:
    """A weight packed, if it is large enough to gain and can be packed here; None if not. Local.

    Args:
        weight_OI: Weight `[O, I]` of any dtype on any device; its numbers are copied.
    """
    fewest = _FEWEST_ELEMENTS.get(weight_OI.dtype)
    if fewest is None or weight_OI.device.type != "cpu" or weight_OI.numel() < fewest:
        return None
    try:
        return PackedWeight(weight_OI)
    except (RuntimeError, AttributeError):
        # A torch without these operations, or a processor without products in this dtype.
        return None
