"""The matrix products of a step with each form of the weights, in turns."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from pcomm.core.tensor_parallel import WeightProduct
from pcomm.core.testing.timing import Timing
from pcomm.inference.bench.plain_llama import PlainLlama, WideWeight
from pcomm.inference.layers import Int8Weight
from pcomm.inference.layers.packed_weight import invariant_weight, packed_weight

__all__ = ["INT8", "INVARIANT", "PACKED", "WIDE", "WeightForms"]

WIDE = "linears, F.linear"
PACKED = "linears, packed weights"
INT8 = "linears, int8 weights"
INVARIANT = "linears, batch-invariant weights"


class WeightForms:
    """The products of a model with its weights as they are, packed, as int8, and batch-invariant.

    Args:
        model: Model; a weight that is not packed is measured as it is.
    """

    def __init__(self, model: PlainLlama) -> None:
        weights = [*(weight for layer in model.layers for weight in layer), model.table_VD]
        self._inputs = [weight.shape[1] for weight in weights]
        self._dtype = model.dtype
        self._forms: dict[str, list[WeightProduct]] = {
            WIDE: [WideWeight(weight) for weight in weights],
            PACKED: [packed_weight(weight) or WideWeight(weight) for weight in weights],
            INT8: [Int8Weight(weight) for weight in weights],
            INVARIANT: [invariant_weight(weight) or WideWeight(weight) for weight in weights],
        }

    @torch.inference_mode()
    def time(self, rows: int, *, rounds: int) -> Mapping[str, Timing]:
        """Microseconds of all products of `rows` tokens, by form.

        Args:
            rows: Number of tokens.
            rounds: Number of times that each form is measured.
        """
        inputs = {width: torch.ones(rows, width, dtype=self._dtype) for width in self._inputs}
        found: dict[str, list[float]] = {form: [] for form in self._forms}
        # What is made in the first call of a shape does not count.
        for counts in (False, *[True] * rounds):
            for form, products in self._forms.items():
                start = time.perf_counter()
                for width, product in zip(self._inputs, products, strict=True):
                    product(inputs[width], None)
                if counts:
                    found[form].append((time.perf_counter() - start) * 1e6)
        return {form: Timing(form, tuple(times)) for form, times in found.items()}
