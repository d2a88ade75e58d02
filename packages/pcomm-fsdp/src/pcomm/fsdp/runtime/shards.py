"""What a rank keeps of a parameter group: its shard, or parameters that stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pcomm.fsdp.plan.group_plan import GroupPlan
from pcomm.fsdp.plan.units import Owner
from pcomm.fsdp.runtime.shard_gradient import ShardGroups, mark_shard

__all__ = ["LocalParams", "ParamShard", "install"]


class ParamShard:
    """One flat buffer with this rank's shard of each parameter of a group, and their gradients.

    Args:
        plan: The plan of the group.
        owners: The modules that hold each parameter.
        originals: The parameters before sharding; their values are taken over, unless they are on
            the meta device.
        device: Device of the buffer.

    Attributes:
        flat: The buffer, `plan.layout.shard_length` elements of `plan.main_dtype`.
        views: The shard of each parameter, as a view of `flat`.
        parameters: The same views as parameters: an optimizer holds them, and modules do while the
            group is sharded.
        is_on_meta: True for each parameter that was on the meta device.
        origin: Groups that hold the other shards of the gradients; None leaves gradients plain.
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
        self.flat = torch.zeros(plan.layout.shard_length, dtype=plan.main_dtype, device=device)
        self.views = [plan.shard_view(self.flat, index) for index in range(len(plan.names))]
        self.parameters = [
            nn.Parameter(view, requires_grad=plan.is_trainable) for view in self.views
        ]
        for parameter in self.parameters:
            # A second `fully_shard` of the same model refuses parameters with this mark.
            parameter.is_pcomm_shard = True  # type: ignore[attr-defined]
        with torch.no_grad():
            for index, original in enumerate(originals):
                if not original.is_meta:
                    self.load(index, original)
        self.origin: ShardGroups | None = None
        # The flat buffer of which all gradients are views, as long as they are.
        self._gradient: Tensor | None = None

    @property
    def version(self) -> int:
        """A number that changes whenever the shard is written."""
        return 0 if self.flat.is_inference() else self.flat._version

    def load(self, index: int, value: Tensor) -> None:
        """Take this rank's shard of a full parameter. Local."""
        held = self.plan.layout.shard_range(index, self.plan.rank)
        if held.length:
            flat = value.detach().reshape(-1)[held.start : held.start + held.length]
            self.flat[held.offset : held.offset + held.length].copy_(flat)

    def full_values(self) -> Iterator[tuple[str, Tensor]]:
        """Each full parameter by its name, in the dtype of the main weights. Collective."""
        yield from self._gathered(self.flat)

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Each full gradient by the name of its parameter, if there are any. Collective."""
        filled = {
            n for n, p in zip(self.plan.names, self.parameters, strict=True) if p.grad is not None
        }
        if not filled:
            return
        flat = torch.zeros_like(self.flat)
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                self.plan.shard_view(flat, index).copy_(parameter.grad)
        yield from ((name, value) for name, value in self._gathered(flat) if name in filled)

    def begin(self) -> None:
        """Be ready for a micro-batch."""
        if self._gradient is not None and not self._holds_gradients(self._gradient):
            # The optimizer's `zero_grad` has dropped the gradients: their memory goes too.
            self._gradient = None

    def add_gradient(self, flat: Tensor, has_gradient: Sequence[bool]) -> None:
        """Add a reduced gradient to those of the parameters, or make it theirs. Local.

        Args:
            flat: The gradient of the shard.
            has_gradient: False for each parameter that was frozen, and keeps what it has.
        """
        views = [self.plan.shard_view(flat, index) for index in range(len(self.parameters))]
        if self.origin is not None:
            views = [mark_shard(view, self.origin, index) for index, view in enumerate(views)]
        if all(has_gradient) and all(parameter.grad is None for parameter in self.parameters):
            for parameter, view in zip(self.parameters, views, strict=True):
                parameter.grad = view
            self._gradient = flat
        elif self._gradient is not None and self._holds_gradients(self._gradient):
            self._gradient.add_(flat)
        else:
            for parameter, view, is_there in zip(self.parameters, views, has_gradient, strict=True):
                if parameter.grad is not None:
                    parameter.grad.add_(view)
                elif is_there:
                    parameter.grad = view

    def memory(self) -> dict[str, int]:
        """Bytes held now, by kind of buffer."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        return {
            "shards": self.flat.nbytes,
            "shard gradients": sum(gradient.nbytes for gradient in gradients),
        }

    def close(self) -> None:
        """Let go of the modules, and of memory that gradients do not need. Local."""
        self._gradient = None
        self.owners = []

    def _gathered(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        full = self.plan.gather.collectives.all_gather(flat)
        for index, name in enumerate(self.plan.names):
            yield name, self.plan.full_view(full, index)

    def _holds_gradients(self, flat: Tensor) -> bool:
        """True if every gradient is a view of `flat`."""
        storage = flat.untyped_storage()._cdata
        return all(
            parameter.grad is not None and parameter.grad.untyped_storage()._cdata == storage
            for parameter in self.parameters
        )


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


def install(owners: Sequence[Sequence[Owner]], parameters: Sequence[nn.Parameter]) -> None:
    """Put each parameter into the modules that hold it. Local."""
    for own, parameter in zip(owners, parameters, strict=True):
        for module, name in own:
            # Assignment by name would look at every kind of attribute a module has.
            module._parameters[name] = parameter
