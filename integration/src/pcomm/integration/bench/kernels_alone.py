"""The matrix products of a model, and the attention kernels of a prompt, with nothing around."""

# Shape suffixes: H query heads, T tokens, K head dim.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from pcomm.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, WeightProduct

__all__ = ["AttentionCalls", "Products"]


class Products:
    """The matrix products that the layers of a model make, the head apart.

    Args:
        model: Model whose linear layers hold the weights, or what stands in their place. It has a
            `head`.
        wide: True for `F.linear` with other weights of the same sizes, as torch keeps them.
    """

    def __init__(self, model: nn.Module, *, wide: bool = False) -> None:
        kinds = (ColumnParallelLinear, RowParallelLinear)
        layers = [
            (name, module) for name, module in model.named_modules() if isinstance(module, kinds)
        ]
        head = model.get_submodule("head")
        self._layers = [_Product(one, wide) for name, one in layers if name != "head"]
        self._head = _Product(head, wide)
        self._dtype = self._head.dtype

    def caller(self, num_rows: int, num_logits: int) -> Callable[[], None]:
        """A function that computes all products once. Local.

        Args:
            num_rows: Tokens of the step.
            num_logits: Tokens whose logits are computed.
        """
        widths = {layer.width for layer in self._layers}
        inputs = {width: torch.ones(num_rows, width, dtype=self._dtype) for width in widths}
        last = torch.ones(num_logits, self._head.width, dtype=self._dtype)

        @torch.inference_mode()
        def run() -> None:
            for layer in self._layers:
                layer.multiply(inputs[layer.width])
            if num_logits:
                self._head.multiply(last)

        return run


class _Product:
    """What one layer multiplies by, without its bias."""

    def __init__(self, layer: nn.Module, wide: bool) -> None:
        weight = layer.weight
        assert isinstance(weight, Tensor)
        self.width, self.dtype = weight.shape[1], weight.dtype
        self.multiply: Callable[[Tensor], Tensor]
        product: WeightProduct | None = layer.__dict__.get("weight_product")
        if product is not None and not wide:
            self.multiply = lambda x: product(x, None)
            return
        own = torch.ones(weight.shape, dtype=weight.dtype) if wide else weight.detach()
        self.multiply = lambda x: F.linear(x, own)


class AttentionCalls(TorchFunctionMode):
    """Keeps the arguments of torch's attention that are called in its context, for one layer.

    Args:
        layers: Number of layers with attention, which make the same calls in a step.
    """

    def __init__(self, layers: int) -> None:
        super().__init__()
        self._layers = layers
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._num_kept = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Called for each of torch's functions."""
        if func is F.scaled_dot_product_attention:
            self._calls.append((args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def end_step(self) -> None:
        """Forget the calls of all layers but the first since the last step.

        Raises:
            AssertionError: There are none, or not as many in each layer.
        """
        added = len(self._calls) - self._num_kept
        told = f"{added} calls of torch's attention in a step of {self._layers} layers"
        assert added, told
        assert added % self._layers == 0, told
        self._num_kept += added // self._layers
        del self._calls[self._num_kept :]

    @property
    def num_calls(self) -> int:
        """Number of calls of all layers."""
        return self._layers * self._num_kept

    @torch.inference_mode()
    def again(self) -> None:
        """Make the same calls again, once for each layer."""
        for _ in range(self._layers):
            for args, kwargs in self._calls:
                F.scaled_dot_product_attention(*args, **kwargs)
