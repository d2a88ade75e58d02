"""Checks before a step: its sums would be wrong with a changed model, or an old gradient."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from pcomm.ntp.sync import errors
from pcomm.ntp.sync.synced_params import SyncedParam

__all__ = ["ModelGuard"]


class ModelGuard:
    """Compares a model with what it was when its parameters were taken. Local.

    Args:
        model: The model.
        params: Its parameters that train.
    """

    def __init__(self, model: nn.Module, params: Sequence[SyncedParam]) -> None:
        self._model, self._params = model, params
        self._known = dict(model.named_parameters())
        self._facts = [(p.shape, p.dtype, p.device) for p in (one.parameter for one in params)]

    def check_model(self) -> None:
        """The model has the parameters that it had; before the first backward of a step.

        Raises:
            ConfigError: One was added, replaced, removed, frozen, made to train, or converted.
        """
        trained = {id(one.parameter) for one in self._params}
        now = dict(self._model.named_parameters())
        for name, parameter in now.items():
            if name not in self._known:
                raise errors.changed_model(name, "a parameter that was added later")
            if parameter is not self._known[name]:
                raise errors.changed_model(name, "another parameter than there was")
            if parameter.requires_grad is not (id(parameter) in trained):
                told = f"requires_grad is {parameter.requires_grad} since then"
                raise errors.changed_model(name, told)
        for name in self._known.keys() - now.keys():
            raise errors.changed_model(name, "a parameter that was removed")
        for one, facts in zip(self._params, self._facts, strict=True):
            parameter = one.parameter
            if (parameter.shape, parameter.dtype, parameter.device) != facts:
                raise errors.changed_model(one.name, f"it was {facts}, and was converted")

    def check_cleared(self) -> None:
        """No gradient is left from before the first backward of a step; zeros count as none.

        Raises:
            ConfigError: One is left.
        """
        for one in self._params:
            gradient = one.parameter.grad
            # Waits for the device, but only where a caller keeps gradients as zeros.
            if gradient is not None and bool(gradient.any()):
                raise errors.stale_gradient(one.name)
