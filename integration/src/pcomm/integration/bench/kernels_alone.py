"""The matrix products of a model, and the attention kernels of a prompt, with nothing around."""

# Shape suffixes: H query heads, T tokens, K head dim.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from pcomm.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

__all__ = ["AttentionCalls", "Products"]


class Products:
    """Matrix products with the weights of a model, the head apart.

    Args:
        model: Model whose layers hold the weights; has `head`.
    """

    def __init__(self, model: nn.Module) -> None:
        kinds = (ColumnParallelLinear, RowParallelLinear)
        self.head: Tensor = model.get_parameter("head.weight").detach()
        self.weights: list[Tensor] = [
            module.weight.detach()
            for name, module in model.named_modules()
            if isinstance(module, kinds) and name != "head"
        ]
        dtype = self.head.dtype
        self._inputs: Callable[[int, int], Tensor] = lambda rows, width: torch.ones(
            rows, width, dtype=dtype
        )

    def caller(self, num_rows: int, num_logits: int) -> Callable[[], None]:
        """A function that computes all products once. Local.

        Args:
            num_rows: Tokens of the step.
            num_logits: Tokens whose logits are computed.
        """
        widths = {weight.shape[1] for weight in self.weights}
        inputs = {width: self._inputs(num_rows, width) for width in widths}
        last = self._inputs(num_logits, self.head.shape[1])

        @torch.inference_mode()
        def run() -> None:
            for weight in self.weights:
                F.linear(inputs[weight.shape[1]], weight)
            if num_logits:
                F.linear(last, self.head)

        return run


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
