"""Linear layers whose weights are int8 numbers; also those that are split over ranks."""

# Shape suffixes: I input features, O output features.

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pcomm.core.errors import UnsupportedError
from pcomm.core.tensor_parallel.fast_module import FastModule
from pcomm.core.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from pcomm.inference.quantization.int8_product import int8_product
from pcomm.inference.quantization.int8_rows import quantize_rows

__all__ = ["Int8Linear", "int8_layer"]


class Int8Linear(FastModule):
    """`y = x W^T + b`, where a row of W is int8 numbers times a scale; activations stay wide.

    For decoding on a CPU, where a step takes as long as reading the weights. The weights are
    buffers and no parameters: an optimizer does not see them, `state_dict` has them as
    `weight_int8` and `scale`. Gradients of the input and of the bias are right.

    Args:
        weight: `[O, I]`, bf16, fp32 or fp64; it is not kept.
        bias: `[O]`, kept as it is; None for none.

    Shape: `[..., I]` to `[..., O]`, dtype of the weight.

    Raises:
        ConfigError: A weight is NaN or infinite.
        UnsupportedError: The weight has another dtype, or is not on a CPU.
    """

    weight_int8: Tensor
    scale: Tensor
    bias: nn.Parameter | None

    def __init__(self, weight: Tensor, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        numbers_OI, scales_O = quantize_rows(weight.detach())
        self.register_buffer("weight_int8", numbers_OI)
        self.register_buffer("scale", scales_O)
        self.register_parameter("bias", bias)
        self.run = _linear

    @property
    def weight(self) -> Tensor:
        """`[O, I]`, the weights that the numbers stand for; a new tensor each time."""
        return self.weight_int8.to(self.scale.dtype).mul_(self.scale.unsqueeze(1))

    def extra_repr(self) -> str:
        """Sizes, as torch prints them for a linear layer."""
        outputs, inputs = self.weight_int8.shape
        return f"in_features={inputs}, out_features={outputs}, bias={self.bias is not None}"


class _Int8ColumnParallelLinear(Int8Linear):
    """This rank's outputs; see `ColumnParallelLinear`."""

    def __init__(self, layer: ColumnParallelLinear) -> None:
        _check_split(layer)
        super().__init__(layer.weight, layer.bias)
        self.layout, self.collectives = layer.layout, layer.collectives
        self.param_layouts = layer.param_layouts
        if layer.gather_output and layer.collectives.size > 1:
            self.run = type(self)._gathered

    def _gathered(self, x: Tensor) -> Tensor:
        _check_gradient(x)
        return self.collectives.all_gather(_linear(self, x), dim=-1, sizes=self.layout.sizes)


class _Int8RowParallelLinear(Int8Linear):
    """The sum of what the ranks make of their inputs; see `RowParallelLinear`."""

    def __init__(self, layer: RowParallelLinear) -> None:
        _check_split(layer)
        super().__init__(layer.weight, layer.bias)
        self.collectives, self.param_layouts = layer.collectives, layer.param_layouts
        if layer.collectives.size > 1:
            self.run = type(self)._summed

    def _summed(self, x: Tensor) -> Tensor:
        _check_gradient(x)
        y = _product(self, x)
        y = self.collectives.all_reduce(y, out=y)
        return y if self.bias is None else y + self.bias


def int8_layer(layer: nn.Module) -> Int8Linear:
    """The same layer with int8 weights, and the bias that it has. Local.

    Args:
        layer: An `nn.Linear`, `ColumnParallelLinear` or `RowParallelLinear`.

    Raises:
        ConfigError: A weight is NaN or infinite.
        UnsupportedError: The weight has a dtype that is not quantised, or is not on a CPU; or the
            layer splits tokens over ranks.
    """
    if isinstance(layer, ColumnParallelLinear):
        found: Int8Linear = _Int8ColumnParallelLinear(layer)
    elif isinstance(layer, RowParallelLinear):
        found = _Int8RowParallelLinear(layer)
    else:
        assert isinstance(layer, nn.Linear)
        found = Int8Linear(layer.weight, layer.bias)
    return found.train(layer.training)


def _linear(module: Int8Linear, x: Tensor) -> Tensor:
    if x.requires_grad and torch.is_grad_enabled():
        return F.linear(x, module.weight, module.bias)
    y, bias = _product(module, x), module.__dict__["_parameters"]["bias"]
    return y if bias is None else y.add_(bias)


def _product(module: Int8Linear, x: Tensor) -> Tensor:
    own = module.__dict__["_buffers"]
    numbers_OI, scales_O = own["weight_int8"], own["scale"]
    if x.dim() == 2 and x.is_contiguous():
        return int8_product(x, numbers_OI, scales_O)
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1]).contiguous()
    y = int8_product(rows, numbers_OI, scales_O)
    return y.view(*x.shape[:-1], y.shape[1])


def _check_split(layer: ColumnParallelLinear | RowParallelLinear) -> None:
    if layer.sequence_parallel and layer.collectives.size > 1:
        raise UnsupportedError(
            f"quantize_int8: a {type(layer).__name__} with sequence_parallel=True",
            found=f"tokens that {layer.collectives.size} ranks share",
            why="Int8 weights are for decoding, where a step has fewer tokens than ranks.",
            fix="Build the layers with sequence_parallel=False; their weights are the same.",
        )


def _check_gradient(x: Tensor) -> None:
    if x.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError(
            "Int8Linear: a gradient of its input",
            found="a layer that is split over ranks",
            why="Layers with int8 weights communicate for inference alone.",
            fix="Call the model under torch.inference_mode(), or train it without int8 weights.",
        )
