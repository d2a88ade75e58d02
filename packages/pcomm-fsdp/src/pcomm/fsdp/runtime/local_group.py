"""A parameter group of one rank: parameters stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pcomm.fsdp.plan.group_plan import GroupPlan
from pcomm.fsdp.plan.units import Owner

__all__ = ["LocalGroup"]


class LocalGroup:
    """Parameters with nobody to share them with; nothing is copied, gathered or reduced.

    The one thing left to do is to divide gradients where the divisor is not 1, which happens to
    experts that are spread over all data-parallel ranks: each gradient as it arrives, since what
    has been added up before has been divided already (Megatron-LM #6660).

    Args:
        plan: What was decided; `plan.is_local`.
        owners: For each parameter, the modules that hold it.
        originals: The parameters, which become `parts` unless they are on the meta device.
        device: Where those go.
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
        self.parts = [
            nn.Parameter(torch.empty_like(p, device=device), p.requires_grad) if p.is_meta else p
            for p in originals
        ]
        self._hooks: list[RemovableHandle] = []
        if plan.is_trainable and plan.divisor != 1:
            divide = partial(torch.mul, other=1 / plan.divisor)
            self._hooks = [part.register_hook(divide) for part in self.parts]

    def after_gradients(self, call: Callable[[int, Tensor], object]) -> None:
        """Have `call` called with the place of a parameter, and it, when it has a gradient. Local.

        Until this closes.
        """
        for index, part in enumerate(self.parts):
            hook = part.register_post_accumulate_grad_hook(partial(call, index))
            self._hooks.append(hook)

    def close(self) -> None:
        """Leave gradients as they are from now on. Local."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.owners = []

    def memory(self) -> dict[str, int]:
        """Bytes held now, by kind of buffer."""
        gradients = [part.grad for part in self.parts if part.grad is not None]
        return {
            "shards": sum(part.numel() * part.itemsize for part in self.parts),
            "shard gradients": sum(one.numel() * one.itemsize for one in gradients),
        }

    def load(self, index: int, value: Tensor) -> None:
        """Take the values of a parameter. Local."""
        self.parts[index].data.copy_(value.detach())

    def whole_values(self) -> Iterator[tuple[str, Tensor]]:
        """Each parameter by its name."""
        for name, part in zip(self.plan.names, self.parts, strict=True):
            yield name, part.detach()

    def whole_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Each gradient there is, by the name of its parameter."""
        for name, part in zip(self.plan.names, self.parts, strict=True):
            if part.grad is not None:
                yield name, part.grad
