"""Changes to a model that its hooks and buffers would not follow: errors, and no other numbers."""

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
        self._versions: list[int | None] = []

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

    def note_gradients(self) -> None:
        """Remember the gradients as they are after a sum or a scaling of ours."""
        found = (one.parameter.grad for one in self._params)
        self._versions = [None if grad is None else grad._version for grad in found]

    def check_cleared(self) -> None:
        """The summed gradients of the last step are gone, or were written to.

        Raises:
            ConfigError: One is as it was left.
        """
        for one, version in zip(self._params, self._versions, strict=True):
            gradient = one.parameter.grad
            if gradient is not None and gradient._version == version:
                raise errors.stale_gradients(one.name)
