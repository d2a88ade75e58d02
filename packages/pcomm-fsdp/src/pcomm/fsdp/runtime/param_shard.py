"""This rank's shard of a parameter group, and the parameters in it that an optimizer sees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from pcomm.fsdp.guards.gradient_origin import GradientOrigin
from pcomm.fsdp.guards.shard_gradient import mark_shard
from pcomm.fsdp.plan.group_plan import GroupPlan
from pcomm.fsdp.plan.units import Owner

__all__ = ["ParamShard"]


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
        self.origin: GradientOrigin | None = None
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
        storage = flat.untyped_storage().data_ptr()
        return all(
            parameter.grad is not None and parameter.grad.untyped_storage().data_ptr() == storage
            for parameter in self.parameters
        )
