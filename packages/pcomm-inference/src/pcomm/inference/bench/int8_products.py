"""The matrix products of a step with int8 weights, beside those with the model's, in turns."""

from __future__ import annotations

import time

import torch
from torch import Tensor
from torch.nn import functional as F

from pcomm.core.testing.timing import Timing
from pcomm.inference.bench.plain_llama import PlainLlama
from pcomm.inference.quantization import Int8Linear

__all__ = ["Int8Products"]


class Int8Products:
    """The products of a model, with its own weights and with int8 numbers beside them.

    Args:
        model: The model.
    """

    def __init__(self, model: PlainLlama) -> None:
        self._weights = [weight for layer in model.layers for weight in layer]
        self._weights.append(model.table_VD)
        self._layers = [Int8Linear(weight) for weight in self._weights]

    @torch.inference_mode()
    def time(self, rows: int, *, rounds: int) -> tuple[Timing, Timing]:
        """Microseconds of all products of `rows` tokens: with the model's weights, and with int8.

        Args:
            rows: Number of tokens.
            rounds: Number of times that both are measured.
        """
        inputs = {one.shape[1]: one.new_ones(rows, one.shape[1]) for one in self._weights}
        plain: list[float] = []
        int8: list[float] = []
        # What is made in the first call of a shape does not count.
        for warm in (True, *[False] * rounds):
            start = time.perf_counter()
            self._plain(inputs)
            middle = time.perf_counter()
            self._int8(inputs)
            end = time.perf_counter()
            if not warm:
                plain.append((middle - start) * 1e6)
                int8.append((end - middle) * 1e6)
        return Timing("linears alone", tuple(plain)), Timing("int8 linears alone", tuple(int8))

    def _plain(self, inputs: dict[int, Tensor]) -> None:
        for weight in self._weights:
            F.linear(inputs[weight.shape[1]], weight)

    def _int8(self, inputs: dict[int, Tensor]) -> None:
        for layer in self._layers:
            layer(inputs[layer.weight_int8.shape[1]])
