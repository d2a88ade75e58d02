"""Weights in the blocks that oneDNN multiplies by, made once instead of in every product."""

# Shape suffixes: M rows, I input features, O output features.

from __future__ import annotations

import os
import platform
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from pcomm.inference.layers.linear_layers import linear_layers, replace_weights

__all__ = [
    "PackedWeight",
    "check_batch_invariant",
    "has_bf16_tiles",
    "invariant_weight",
    "pack_weights",
    "packed_weight",
]

# Elements of a weight from which the packed product takes less time than `F.linear`: the call
# itself takes longer.
_FEWEST_ELEMENTS = {torch.bfloat16: 1 << 14, torch.float32: 1 << 18}

# Inputs up to which oneDNN adds up one row in the order in which it adds up many.
_MOST_INPUTS_OF_ONE_ROW = 1024

# Rows up to which AMX adds up a row of bf16 in one order, however many they are.
_MOST_ROWS_OF_TILES = 32

# Limits of oneDNN under which it multiplies bf16 by instructions for fp32.
_WITHOUT_BF16 = ("AVX512_CORE", "AVX512_CORE_VNNI")

# Machines on which all rows of products were compared.
_MACHINES = ("x86_64", "AMD64")


class PackedWeight:
    """`x W^T + b` with a weight that is kept in oneDNN's own layout. Local, without gradients.

    `F.linear` brings the weight into that layout in every call, which takes as long as the product
    of a few rows. A single row of many inputs is computed as two equal ones, and so is every one in
    bf16 on a processor without AVX-512 BF16, or where `ONEDNN_MAX_CPU_ISA` leaves that out. Then
    the bits of a row depend on that row alone, but for bf16 on a processor with AMX: there up to 32
    rows have one order of sums, and more rows have others, unless they are computed in blocks. In
    bf16 without AMX they are those of `F.linear` for several rows of a matrix without gaps;
    elsewhere the two differ by rounding. Tested on x86.

    Args:
        weight_OI: Weight `[O, I]`, bf16 or fp32 on a CPU; its numbers are copied.
        batch_invariant: True to compute at most 32 rows at once where the order of their sums
            depends on their number.

    Attributes:
        nbytes: Size of the weight, in bytes.
        is_batch_invariant: True if the bits of a row do not depend on the number of rows.

    Raises:
        RuntimeError: torch has no such product for the dtype or on this processor.
    """

    def __init__(self, weight_OI: Tensor, *, batch_invariant: bool = False) -> None:
        ops: Any = torch.ops.mkldnn
        self._packed = ops._reorder_linear_weight(weight_OI.contiguous(), None)
        self._multiply = ops._linear_pointwise.default
        self.nbytes, self._dtype = weight_OI.nbytes, weight_OI.dtype
        # Without instructions for bf16 few elements of one row differ, whatever its length.
        is_emulated = self._dtype == torch.bfloat16 and not _has_bf16_sums()
        is_long = weight_OI.shape[1] > _MOST_INPUTS_OF_ONE_ROW
        self._doubles_one_row = is_long or is_emulated or batch_invariant
        has_classes = self._dtype == torch.bfloat16 and has_bf16_tiles()
        self._is_in_blocks = has_classes and batch_invariant
        self.is_batch_invariant = batch_invariant or not has_classes

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`[..., O]` of `x` `[..., I]`, dtype of the weight.

        Raises:
            ConfigError: The input has another dtype or device than the weight.
            UnsupportedError: It is being compiled.
        """
        if x.dtype != self._dtype or not x.is_cpu:
            raise ConfigError(
                f"a linear layer with a packed weight of {self._dtype}",
                found=f"an input of {x.dtype} on {x.device}",
                why="The weight was packed for a CPU and for this dtype, and is not converted.",
                fix="Move and convert the model before pack_weights, and give inputs of its dtype.",
            )
        if torch.compiler.is_compiling():
            raise UnsupportedError(
                "torch.compile of a linear layer with a packed weight",
                found="a graph that is being traced",
                why="Inductor packs weights by itself and does not take those that are packed.",
                fix="Compile the model with its weights as they are.",
            )
        if self._is_in_blocks and x.shape[:-1].numel() > _MOST_ROWS_OF_TILES:
            rows = x.reshape(x.shape[:-1].numel(), x.shape[-1]).split(_MOST_ROWS_OF_TILES)
            return torch.cat([self(part, bias) for part in rows]).view(*x.shape[:-1], -1)
        if self._doubles_one_row and x.numel() == x.shape[-1]:
            two = self._multiply(x.view(1, -1).expand(2, -1), self._packed, bias, "none", [], "")
            one: Tensor = two[:1].view(*x.shape[:-1], -1)
            return one
        y: Tensor = self._multiply(x, self._packed, bias, "none", [], "")
        return y

    def __deepcopy__(self, memo: dict[int, object]) -> PackedWeight:
        """Give this one itself, which nothing changes."""
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


def has_bf16_tiles() -> bool:
    """Whether this processor multiplies bf16 by AMX. Local.

    True as well if `ONEDNN_MAX_CPU_ISA` keeps oneDNN from it.
    """
    return bool(torch.cpu._is_amx_tile_supported())


def _has_bf16_sums() -> bool:
    # OneDNN reads these when it is first used, and torch does not say what it found.
    names = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
    limit = next((os.environ[name] for name in names if name in os.environ), "")
    return torch.cpu._is_avx512_bf16_supported() and limit.upper() not in _WITHOUT_BF16


def pack_weights(
    model: nn.Module, *, only: Collection[str] | None = None, batch_invariant: bool = False
) -> tuple[str, ...]:
    """Keep the weights of the linear layers in the layout that the processor multiplies by. Local.

    For inference on a CPU, where it makes a step with few rows about twice as fast. Weights in
    bf16 and fp32 that are large enough to gain are packed; others, and everything on a processor
    or a build of torch without oneDNN, stay as they are. A weight that a layer shares with the
    embedding is there twice afterwards.

    Args:
        model: Model of `nn.Linear` or tensor-parallel layers, changed in place. Its layers refuse
            `state_dict` and gradients from then on.
        only: Names of the layers to pack; None for all.
        batch_invariant: True to give each layer a form in which the bits of a row do not depend on
            the number of rows, however small the weight is. Products of bf16 on a processor with
            AMX are computed in blocks of at most 32 rows, so that steps with more rows take longer.

    Returns:
        Names of the layers whose weights were packed.

    Raises:
        UnsupportedError: There is no such form: the weights are neither bf16 nor fp32, not on a
            CPU, or the processor is not x86.
    """
    make = invariant_weight if batch_invariant else packed_weight
    return replace_weights(linear_layers(model, only=only), make)


def check_batch_invariant(model: object) -> None:
    """Refuse a model with a linear layer whose rows depend on their number. Local.

    Products that a module computes without such a layer are not seen.

    Args:
        model: A model; what is not an `nn.Module` is taken as it is.

    Raises:
        ConfigError: A linear layer has another form than `pack_weights` gives it with
            `batch_invariant=True`.
    """
    if not isinstance(model, nn.Module):
        return
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear | ColumnParallelLinear | RowParallelLinear):
            continue
        product = layer.__dict__.get("weight_product")
        if product is None:
            is_fit = layer.weight.is_cpu and _is_invariant_unpacked(layer.weight.dtype)
        else:
            is_fit = isinstance(product, PackedWeight) and product.is_batch_invariant
        if not is_fit:
            raise ConfigError(
                "Engine: batch_invariant=True",
                found=f"a {type(model).__name__} whose layer {name!r} multiplies with "
                f"{'its weight' if product is None else type(product).__name__}",
                why="The order of the sums of such a product depends on the number of its rows, "
                "which are the tokens of all requests of a step.",
                fix="Call pack_weights(model, batch_invariant=True) of pcomm.inference.layers "
                "before the Engine is made; it packs layers that are no subclass.",
            )


def _is_invariant_unpacked(dtype: torch.dtype) -> bool:
    # Without oneDNN's bf16 torch adds up each row of a product by itself.
    ops: Any = torch.ops.mkldnn
    return dtype == torch.bfloat16 and not ops._is_mkldnn_bf16_supported()


def invariant_weight(weight_OI: Tensor) -> PackedWeight | None:
    """A form whose rows do not depend on their number; None if the weight as it is has that. Local.

    Args:
        weight_OI: Weight `[O, I]`; its numbers are copied.

    Raises:
        UnsupportedError: There is none for the dtype, the device or the processor.
    """
    place = f"{weight_OI.dtype} on {weight_OI.device.type}, {platform.machine()}"
    is_known = weight_OI.is_cpu and platform.machine() in _MACHINES
    if is_known and weight_OI.dtype in _FEWEST_ELEMENTS:
        if _is_invariant_unpacked(weight_OI.dtype):
            return None
        try:
            return PackedWeight(weight_OI, batch_invariant=True)
        except (RuntimeError, AttributeError) as error:
            place += f", where oneDNN does not pack it ({error})"
    raise UnsupportedError(
        "batch_invariant=True",
        found=f"a weight of {place}",
        why="The order of the sums is known for products of bf16 and fp32 by oneDNN on x86.",
        fix="Load the model on a CPU, in bf16 or fp32, or leave batch_invariant out.",
    )


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
