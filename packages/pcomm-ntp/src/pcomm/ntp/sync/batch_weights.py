"""Weights of the micro-batches of a step, which add up in `.grad` before they are summed."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from pcomm.ntp.sync.model_guard import ModelGuard
from pcomm.ntp.sync.synced_params import SyncedParam

__all__ = ["BatchWeights"]


class BatchWeights:
    """The first weight of a step is that of its sums; others are taken relative to it in backward.

    So a step whose micro-batches have one weight, as most have, multiplies nothing in backward.

    Args:
        params: Parameters whose gradients are weighted.
        guard: Guard of their model.

    Attributes:
        of_sums: Factor of what `.grad` has after the last micro-batch.
    """

    def __init__(self, params: Sequence[SyncedParam], guard: ModelGuard) -> None:
        self._params, self._guard = params, guard
        self.of_sums, self._factor = 1.0, 1.0
        self._hooks: list[tuple[Node, RemovableHandle]] = []

    def take(self, weight: float, *, is_first: bool) -> None:
        """Take the weight of the micro-batch that follows.

        Raises:
            ConfigError: The model has changed.
        """
        if is_first:
            self.of_sums = weight or 1.0
        self._factor = weight / self.of_sums
        if self._factor != 1.0 and not self._hooks:
            self._guard.check_model()
            self._scale_gradients()

    def close(self) -> None:
        """Remove all hooks. Local."""
        for _, hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _scale_gradients(self) -> None:
        """From now on multiply gradients before they are added to those of other weights."""
        this = weakref.ref(self)

        def scale(arrived: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
            found = this()
            if found is None or found._factor == 1.0:
                return None
            return tuple(one if one is None else one * found._factor for one in arrived)

        # At the node that adds to `.grad`: a hook of the parameter would see `autograd.grad`, too.
        nodes = [get_gradient_edge(one.parameter).node for one in self._params]
        # A node, and its hooks, live as long as something refers to it.
        self._hooks = [(node, node.register_prehook(scale)) for node in nodes]
