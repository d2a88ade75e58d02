"""The residual stream of a step on a GPU, whose sums and norms join the products beside them.

On one rank a layer of attention with few rows is five launches: the product of queries, keys and
values norms the stream, attention turns and keeps them, its output is added to the stream by the
product that makes it, and the same two products stand around the gate of the MLP. Where ranks add
up a result, the sum is kept until the next norm, which is then one launch with it.
"""

# Shape suffixes: T rows, D width of the stream, F hidden width, L rows that are wanted.

from __future__ import annotations

import importlib.util
from functools import cache
from types import ModuleType

from torch import Tensor, nn
from torch.nn import functional as F

from pcomm.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from pcomm.inference.layers.norm import Norm

__all__ = ["ResidualStream", "has_triton"]


@cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def _kernels() -> ModuleType:
    # Imported late: it imports Triton.
    from pcomm.inference.layers import step_kernels

    return step_kernels


class ResidualStream:
    """Rows of the residual stream between two layers, under `torch.inference_mode()`.

    A layer whose weight was replaced, or that has hooks, is called as a module.

    Args:
        x_TD: The rows, contiguous; they are not changed.
    """

    def __init__(self, x_TD: Tensor) -> None:
        self._x_TD = x_TD
        # What is not added yet.
        self._y_TD: Tensor | None = None

    @staticmethod
    def takes(x_TD: Tensor) -> bool:
        """Whether rows such as these are on a GPU for which there are kernels. Local."""
        return not x_TD.is_cpu and has_triton() and _kernels().takes_rows(x_TD)

    def select(self, rows_L: Tensor) -> ResidualStream:
        """The stream of some of the rows. Local.

        Args:
            rows_L: int64, the rows.
        """
        chosen = ResidualStream(self._x_TD.index_select(0, rows_L))
        if self._y_TD is not None:
            chosen.add(self._y_TD.index_select(0, rows_L))
        return chosen

    def normed(self, norm: Norm) -> Tensor:
        """`[T, D]`, the norm of the stream. Local."""
        self._x_TD, normed_TD = _kernels().add_norm(self._x_TD, self._y_TD, norm)
        self._y_TD = None
        found: Tensor = normed_TD
        return found

    def product(self, norm: Norm, layer: nn.Module) -> Tensor:
        """The product of the normed stream; what the layer communicates it does.

        Args:
            norm: Norm of the stream.
            layer: Layer that is applied to it.
        """
        weight = self._weight_after_norm(layer)
        if weight is not None:
            found: Tensor = _kernels().product(self._x_TD, weight, layer.bias, norm=norm)
            return found
        return layer(self.normed(norm))  # type: ignore[no-any-return]

    def gated_product(self, norm: Norm, layer: nn.Module) -> Tensor:
        """`silu(gate) * up`, `[T, F]`, of a layer that gives both side by side.

        Args:
            norm: Norm of the stream.
            layer: Layer that is applied to it, whose first half of outputs is the gate.
        """
        kernels, layer_weight = _kernels(), _own_weight(layer)
        found: Tensor
        if self._weight_after_norm(layer) is not None:
            found = kernels.product(self._x_TD, layer_weight, layer.bias, norm=norm, is_gated=True)
            return found
        normed_TD = self.normed(norm)
        if layer_weight is not None and kernels.takes_product(
            normed_TD, layer_weight, is_normed=False
        ):
            found = kernels.product(normed_TD, layer_weight, layer.bias, is_gated=True)
        elif kernels.takes_gate(gate_up_T2F := layer(normed_TD)):
            found = kernels.swiglu(gate_up_T2F)
        else:
            gate_TF, up_TF = gate_up_T2F.chunk(2, -1)
            found = F.silu(gate_TF).mul_(up_TF)
        return found

    def add_product(self, layer: nn.Module, x_TF: Tensor) -> None:
        """Add the product of a layer to the stream; what the layer communicates it does.

        Args:
            layer: Layer, of which ranks may have parts.
            x_TF: Its input.
        """
        weight = _own_weight(layer)
        if (
            weight is not None
            and self._y_TD is None
            and layer.collectives.size == 1
            and _kernels().takes_product(x_TF, weight, is_normed=False)
        ):
            self._x_TD = _kernels().product(x_TF, weight, layer.bias, residual_TO=self._x_TD)
        else:
            self.add(layer(x_TF))

    def add(self, y_TD: Tensor) -> None:
        """Add something to the stream. Local.

        Args:
            y_TD: Rows, which are not changed before the next norm.
        """
        if self._y_TD is not None:
            self._x_TD = self._x_TD + self._y_TD
        self._y_TD = y_TD.contiguous()

    def _weight_after_norm(self, layer: nn.Module) -> Tensor | None:
        """The weight of a layer, if one kernel norms the rows and multiplies them."""
        weight = _own_weight(layer)
        if weight is None or self._y_TD is not None:
            return None
        return weight if _kernels().takes_product(self._x_TD, weight, is_normed=True) else None


def _own_weight(layer: nn.Module) -> Tensor | None:
    """The weight of a layer that does nothing but multiply, or add up behind it."""
    own = layer.__dict__
    if type(layer) not in (ColumnParallelLinear, RowParallelLinear) or "weight_product" in own:
        return None
    if own["_forward_hooks"] or own["_forward_pre_hooks"] or "_compiled_call_impl" in own:
        return None
    weight: Tensor | None = own["_parameters"].get("weight")
    if isinstance(layer, ColumnParallelLinear) and not layer.is_local:
        return None
    return weight
