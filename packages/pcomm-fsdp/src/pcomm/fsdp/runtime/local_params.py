"""A parameter group of one rank: parameters stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pcomm.fsdp.plan.group_plan import GroupPlan
from pcomm.fsdp.plan.units import Owner

__all__ = ["LocalParams"]


class LocalParams:
    """Parameters that one rank holds alone; nothing is copied, gathered or reduced.

    Stands in the place of a `ParamShard`. The one thing left to do is to divide gradients where
    the divisor is not 1, which happens to experts that are spread over all data-parallel ranks:
    each gradient as it arrives, since what has been added up before has been divided already
    (Megatron-LM #6660).

    Args:
        plan: The plan of the group, with `plan.is_local`.
        owners: The modules that hold each parameter.
        originals: The parameters, which are kept unless they are on the meta device.
        device: Device of the parameters that replace those on the meta device.

    Attributes:
        parameters: The parameters.
        is_on_meta: True for each parameter that was on the meta device.
    """

    def __init__(
        self,
        plan: GroupPlan,
        owners: Sequence[Sequence[Owner]],
        originals: Sequence[nn.Parameter],
        device: torch.device,
    ) -> None:
        self.plan, self.owners = plan, [tuple(own) for own in owners]
        self.is_on_meta = [original.is_meta for original in originals]
        self.parameters = [
            nn.Parameter(torch.empty_like(p, device=device), p.requires_grad) if p.is_meta else p
            for p in originals
        ]
        self._hooks: list[RemovableHandle] = []
        if plan.is_trainable and plan.divisor != 1:
            divide = partial(torch.mul, other=1 / plan.divisor)
            self._hooks = [parameter.register_hook(divide) for parameter in self.parameters]

    def after_gradients(self, call: Callable[[int, Tensor], object]) -> None:
        """Have `call` called with the index of a parameter, and it, when it has a gradient. Local.

        Until this closes.
        """
        for index, parameter in enumerate(self.parameters):
            hook = parameter.register_post_accumulate_grad_hook(partial(call, index))
            self._hooks.append(hook)

    def close(self) -> None:
        """Leave gradients as they are from now on. Local."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.owners = []

    def memory(self) -> dict[str, int]:
        """Bytes held now, by kind of buffer."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        return {
            "shards": sum(parameter.nbytes for parameter in self.parameters),
            "shard gradients": sum(gradient.nbytes for gradient in gradients),
        }

    def load(self, index: int, value: Tensor) -> None:
        """Take the values of a parameter. Local."""
        self.parameters[index].data.copy_(value.detach())

    def full_values(self) -> Iterator[tuple[str, Tensor]]:
        """Each parameter by its name."""
        for name, parameter in zip(self.plan.names, self.parameters, strict=True):
            yield name, parameter.detach()

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Each gradient there is, by the name of its parameter."""
        for name, parameter in zip(self.plan.names, self.parameters, strict=True):
            if parameter.grad is not None:
                yield name, parameter.grad
