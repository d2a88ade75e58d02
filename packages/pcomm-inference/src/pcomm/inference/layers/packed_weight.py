"""Weights in the form in which a processor multiplies a few rows fastest, made once."""

# Shape suffixes: M rows, I input features, O output features.

from __future__ import annotations

import os
import platform
from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from pcomm.inference.layers.linear_layers import check_input, linear_layers, replace_weights

__all__ = [
    "FewRowsWeight",
    "PackedWeight",
    "check_batch_invariant",
    "invariant_weight",
    "pack_weights",
    "packed_weight",
    "uses_bf16_tiles",
]

# Elements of a weight from which the packed product takes less time than `F.linear`: the call
# itself takes longer.
_FEWEST_ELEMENTS = {torch.bfloat16: 1 << 14, torch.float32: 1 << 18}

# Inputs up to which oneDNN adds up one row in the order in which it adds up many.
_MOST_INPUTS_OF_ONE_ROW = 1024

# Rows up to which AMX adds up a row of bf16 in one order, however many they are.
_MOST_ROWS_OF_TILES = 32

# Rows up to which AMX takes about as long with a weight as it lies as with one in blocks, and those
# up to which torch turns what comes of it in less time than it brings the weight into blocks.
_MOST_FEW_ROWS = 16
_MOST_ROWS_ACROSS = 64

# Elements of a weight up to which torch multiplies one row without oneDNN.
_MOST_ELEMENTS_OF_OWN = 1 << 12

# Limits of oneDNN under which it multiplies bf16 by instructions for fp32, and those without tiles.
_WITHOUT_BF16 = ("AVX512_CORE", "AVX512_CORE_VNNI")
_WITHOUT_TILES = (
    *("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", *_WITHOUT_BF16),
    *("AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX10_1_512", "AVX10_2_512"),
)

# Machines on which all rows of products were compared.
_MACHINES = ("x86_64", "AMD64")


class PackedWeight:
    """`x W^T + b` with a weight that is kept in oneDNN's own layout. Local, without gradients.

    `F.linear` brings the weight into that layout in every call, which takes as long as the product
    of a few rows. A single row of many inputs is computed as two equal ones, and so is every one in
    bf16 on a processor without AVX-512 BF16, or where `ONEDNN_MAX_CPU_ISA` leaves that out. Then
    the bits of a row depend on that row alone, but for bf16 by AMX: there up to 32 rows have one
    order of sums, and more rows have others. In bf16 without AMX they are those of `F.linear` for
    several rows of a matrix without gaps; elsewhere the two differ by rounding. Tested on x86.

    Args:
        weight_OI: Weight `[O, I]`, bf16 or fp32 on a CPU; its numbers are copied.
        doubles_one_row: True to compute a single row as two equal ones, however many inputs it has.

    Attributes:
        nbytes: Size of the weight, in bytes.
        is_batch_invariant: True if the bits of a row do not depend on the number of rows.

    Raises:
        RuntimeError: torch has no such product for the dtype or on this processor.
    """

    def __init__(self, weight_OI: Tensor, *, doubles_one_row: bool = False) -> None:
        ops: Any = torch.ops.mkldnn
        self._packed = ops._reorder_linear_weight(weight_OI.contiguous(), None)
        self._multiply = ops._linear_pointwise.default
        self.nbytes, self._dtype = weight_OI.nbytes, weight_OI.dtype
        self._num_inputs = weight_OI.shape[1]
        # Without instructions for bf16 few elements of one row differ, whatever its length.
        is_emulated = self._dtype == torch.bfloat16 and not _has_bf16_sums()
        is_long = self._num_inputs > _MOST_INPUTS_OF_ONE_ROW
        self._doubles_one_row = is_long or is_emulated or doubles_one_row
        self.is_batch_invariant = not (self._dtype == torch.bfloat16 and uses_bf16_tiles())

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`[..., O]` of `x` `[..., I]`, dtype of the weight.

        Raises:
            ConfigError: The input has another dtype, device or width than the weight.
            UnsupportedError: It is being compiled.
        """
        check_input(x, "a packed weight", self._num_inputs, self._dtype)
        if torch.compiler.is_compiling():
            raise UnsupportedError(
                "torch.compile of a linear layer with a packed weight",
                found="a graph that is being traced",
                why="Inductor packs weights by itself and does not take those that are packed.",
                fix="Compile the model with its weights as they are.",
            )
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
        raise _no_pickle(self._packed)


class FewRowsWeight:
    """`x W^T + b` by AMX with a bf16 weight as it lies in memory. Local, without gradients.

    The weight is the left operand, of which AMX reads 16 rows at once, and `x` the right one. Up to
    16 rows of `x` so take about as long as with a weight in oneDNN's layout, and no copy is made.
    Up to 32 have the same bits as with that: each row those that it has alone. More rows of `x` are
    computed in blocks of 32 or, where their bits may depend on their number, at once.

    Args:
        weight_OI: Weight `[O, I]`, bf16 on a CPU. It is kept as it is: who changes it, such as an
            embedding that is tied to it, changes the products.
        batch_invariant: True to compute more than 32 rows in blocks.

    Attributes:
        nbytes: Size of the weight, in bytes.
        is_batch_invariant: True if the bits of a row do not depend on the number of rows.
    """

    def __init__(self, weight_OI: Tensor, *, batch_invariant: bool = False) -> None:
        self.nbytes, self._num_outputs = weight_OI.nbytes, weight_OI.shape[0]
        # Rows of zeros make a small weight large enough for oneDNN.
        least = _MOST_ELEMENTS_OF_OWN // max(1, weight_OI.shape[1]) + 1
        self._num_added = max(0, least - self._num_outputs)
        self._weight_OI = self._padded(weight_OI).contiguous()
        self.is_batch_invariant = batch_invariant

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`[..., O]` of `x` `[..., I]`, in bf16.

        Raises:
            ConfigError: The input has another dtype, device or width than the weight.
        """
        weight_OI = self._weight_OI
        check_input(x, "a packed weight", weight_OI.shape[1], weight_OI.dtype)
        x_MI = x if x.dim() == 2 else x.reshape(-1, weight_OI.shape[1])
        num_rows = x_MI.shape[0]
        if bias is not None:
            bias = self._padded(bias)
        if self.is_batch_invariant and num_rows > _MOST_ROWS_OF_TILES:
            parts = x_MI.split(_MOST_ROWS_OF_TILES)
            y_MO = torch.cat([_few_rows(part, weight_OI, bias) for part in parts])
        elif num_rows > _MOST_ROWS_ACROSS:
            y_MO = F.linear(x_MI, weight_OI, bias)
        else:
            y_MO = _few_rows(x_MI, weight_OI, bias)
        if self._num_added:
            y_MO = y_MO[:, : self._num_outputs].contiguous()
        return y_MO.view(*x.shape[:-1], self._num_outputs)

    def _padded(self, outputs_first: Tensor) -> Tensor:
        if not self._num_added:
            return outputs_first
        return F.pad(outputs_first, (0, 0) * (outputs_first.dim() - 1) + (0, self._num_added))

    def __deepcopy__(self, memo: dict[int, object]) -> FewRowsWeight:
        """Copy the weight, which others may hold and change."""
        weight_OI = self._weight_OI[: self._num_outputs].clone()
        return FewRowsWeight(weight_OI, batch_invariant=self.is_batch_invariant)

    def __reduce__(self) -> str:
        """Refused.

        Raises:
            UnsupportedError: Always.
        """
        raise _no_pickle(self._weight_OI)


def _no_pickle(weight: Tensor) -> UnsupportedError:
    return UnsupportedError(
        "pickle of a packed weight",
        found=f"a weight {list(weight.shape)} in the form of this processor",
        why="It is made for one processor; on another, rows would have other bits.",
        fix="Load the model where it is needed, and pack its weights there.",
    )


def _few_rows(x_MI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """`[M, O]`, contiguous, with the weight on the left."""
    if x_MI.shape[0] == 1:
        x_I = x_MI[0]
        y_O = torch.mv(weight_OI, x_I) if bias_O is None else torch.addmv(bias_O, weight_OI, x_I)
        return y_O.unsqueeze(0)
    x_IM = x_MI.t()
    if bias_O is None:
        return torch.mm(weight_OI, x_IM).t().contiguous()
    return torch.addmm(bias_O.unsqueeze(1), weight_OI, x_IM).t().contiguous()


def uses_bf16_tiles() -> bool:
    """Whether oneDNN multiplies bf16 by AMX on this processor. Local.

    False if `ONEDNN_MAX_CPU_ISA` keeps oneDNN from it.
    """
    return bool(torch.cpu._is_amx_tile_supported()) and _onednn_limit() not in _WITHOUT_TILES


def _has_bf16_sums() -> bool:
    return torch.cpu._is_avx512_bf16_supported() and _onednn_limit() not in _WITHOUT_BF16


def _onednn_limit() -> str:
    # OneDNN reads these when it is first used, and torch does not say what it found.
    names = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
    return next((os.environ[name] for name in names if name in os.environ), "").upper()


def pack_weights(
    model: nn.Module,
    *,
    only: Collection[str] | None = None,
    batch_invariant: bool = False,
    most_rows: int | None = None,
) -> tuple[str, ...]:
    """Keep the weights of the linear layers in the form that the processor multiplies by. Local.

    For inference on a CPU, where it makes a step with few rows about twice as fast. Weights in
    bf16 and fp32 that are large enough to gain are packed; others, and everything on a processor
    or a build of torch without oneDNN, stay as they are. A weight that is packed and shared with
    the embedding is there twice afterwards, and no longer follows that; it stays one parameter.

    Args:
        model: Model of `nn.Linear` or tensor-parallel layers, changed in place. Its layers refuse
            `state_dict`, gradients and conversions from then on.
        only: Names of the layers to pack, or one name; None for all.
        batch_invariant: True to give each layer a form in which the bits of a row do not depend on
            the number of rows, however small the weight is. Products of bf16 by AMX are computed
            in blocks of at most 32 rows, so that steps with more rows take longer.
        most_rows: Rows of nearly all products, such as the requests of an engine; None if they are
            not known. For up to 16 a weight in bf16 stays as it is where oneDNN uses AMX.

    Returns:
        Names of the layers whose weights were packed.

    Raises:
        ConfigError: A name of `only` is that of no linear layer.
        UnsupportedError: `batch_invariant` is True, and a weight is neither bf16 nor fp32, not on a
            CPU, or the processor is not x86; nothing was packed then.
    """
    layers = linear_layers(model, only=only)
    if batch_invariant:
        return replace_weights(model, layers, invariant_weight, _check_invariant)
    make = partial(packed_weight, most_rows=most_rows)
    return replace_weights(model, layers, make, lambda _weight: None)


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def check_batch_invariant(model: object) -> None:
    """Refuse a model with a product whose rows depend on their number. Local.

    Products that a module computes without a layer are seen where their weights are stacked, as
    those of experts are.

    Args:
        model: A model. What is not an `nn.Module`, such as a `TransformersModel`, is judged by the
            modules that are its attributes, and taken as it is where it has none.

    Raises:
        ConfigError: A linear layer has another form than `pack_weights` gives it with
            `batch_invariant=True`, or another module than a convolution holds a weight of three
            dimensions.
    """
    if not isinstance(model, nn.Module):
        for part in getattr(model, "__dict__", {}).values():
            if isinstance(part, nn.Module):
                check_batch_invariant(part)
        return
    for name, layer in model.named_modules():
        own = layer.named_parameters(name, recurse=False)
        stacked = [
            n for n, weight in own if weight.dim() > 2 and not isinstance(layer, _CONVOLUTIONS)
        ]
        if stacked:
            raise ConfigError(
                "Engine: batch_invariant=True",
                found=f"a {type(model).__name__} with the stacked weights {stacked[0]!r}",
                why="They are multiplied by no layer whose weight can be packed, and by kernels "
                "whose sums depend on the number of rows.",
                fix="Leave batch_invariant out for a model with experts.",
            )
        if not isinstance(layer, nn.Linear | ColumnParallelLinear | RowParallelLinear):
            continue
        product = layer.__dict__.get("weight_product")
        if product is None:
            is_fit = layer.weight.is_cpu and _is_invariant_unpacked(layer.weight.dtype)
        else:
            is_fit = getattr(product, "is_batch_invariant", False)
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


def invariant_weight(weight_OI: Tensor) -> PackedWeight | FewRowsWeight | None:
    """A form whose rows do not depend on their number; None if the weight as it is has that. Local.

    Args:
        weight_OI: Weight `[O, I]`.

    Raises:
        UnsupportedError: There is none for the dtype, the device or the processor.
    """
    _check_invariant(weight_OI)
    if _is_invariant_unpacked(weight_OI.dtype):
        return None
    if weight_OI.dtype == torch.bfloat16 and uses_bf16_tiles():
        return FewRowsWeight(weight_OI, batch_invariant=True)
    try:
        return PackedWeight(weight_OI, doubles_one_row=True)
    except (RuntimeError, AttributeError) as error:
        raise _no_invariant(weight_OI, f", where oneDNN does not pack it ({error})") from error


def _check_invariant(weight_OI: Tensor) -> None:
    is_known = weight_OI.is_cpu and platform.machine() in _MACHINES
    if not is_known or weight_OI.dtype not in _FEWEST_ELEMENTS:
        raise _no_invariant(weight_OI)


def _no_invariant(weight_OI: Tensor, more: str = "") -> UnsupportedError:
    place = f"{weight_OI.dtype} on {weight_OI.device.type}, {platform.machine()}{more}"
    return UnsupportedError(
        "batch_invariant=True",
        found=f"a weight of {place}",
        why="The order of the sums is known for products of bf16 and fp32 by oneDNN on x86.",
        fix="Load the model on a CPU, in bf16 or fp32, or leave batch_invariant out.",
    )


def packed_weight(
    weight_OI: Tensor, *, most_rows: int | None = None
) -> PackedWeight | FewRowsWeight | None:
    """A form for few rows, if a weight is large enough to gain and has one here; or None. Local.

    Args:
        weight_OI: Weight `[O, I]` of any dtype on any device.
        most_rows: Rows of nearly all products; None if they are not known.
    """
    fewest = _FEWEST_ELEMENTS.get(weight_OI.dtype)
    if fewest is None or weight_OI.device.type != "cpu" or weight_OI.numel() < fewest:
        return None
    is_by_tiles = weight_OI.dtype == torch.bfloat16 and uses_bf16_tiles()
    if is_by_tiles and most_rows is not None and most_rows <= _MOST_FEW_ROWS:
        return FewRowsWeight(weight_OI)
    try:
        return PackedWeight(weight_OI)
    except (RuntimeError, AttributeError):
        # A torch without these operations, or a processor without products in this dtype.
        return None
