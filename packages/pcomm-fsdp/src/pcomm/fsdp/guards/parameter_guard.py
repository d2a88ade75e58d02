"""Changes to a sharded model that its buffers would not follow: errors, and never other numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from pcomm.core.errors import ConfigError
from pcomm.fsdp.plan.group_plan import GroupPlan
from pcomm.fsdp.plan.units import Owner

__all__ = ["ParameterGuard"]


class ParameterGuard:
    """What a group's parameters were when they were made, to be compared later. Local.

    Args:
        plan: The plan of the group.
        owners: For each parameter, the modules that hold it.
        parts: This rank's parts, as the optimizer has them.
        local: Where each part lies: views of the shard.
        wholes: The gathered parameters, as modules have them while they compute.
        places: Where each of those lies: views of the gathered buffer. They share a version
            counter that gathers do not change.
    """

    def __init__(
        self,
        plan: GroupPlan,
        owners: Sequence[Sequence[Owner]],
        parts: Sequence[nn.Parameter],
        local: Sequence[Tensor],
        wholes: Sequence[nn.Parameter],
        places: Sequence[Tensor],
    ) -> None:
        self._plan, self._owners = plan, owners
        self._parts, self._local = parts, local
        self._wholes, self._places = wholes, places
        self._version = 0
        if plan.is_trainable:
            for index, part in enumerate(parts):
                part.register_hook(_refuser(plan.names[index], plan.unit))

    def check_values(self) -> None:
        """Parts lie in the shard that is gathered; before every forward.

        Raises:
            ConfigError: One lies elsewhere, or has another dtype or shape.
        """
        for index, (part, place) in enumerate(zip(self._parts, self._local, strict=True)):
            if not part.is_set_to(place):
                raise _changed(
                    self._plan.names[index],
                    found="its data is another tensor than when it was sharded",
                    fix="Write into it under torch.no_grad(), by copy_; convert before sharding.",
                )

    def check_training(self) -> None:
        """Gradients reach the parts as they did; before a forward that a backward may follow.

        Raises:
            ConfigError: A part trains and did not, or the reverse, or has a hook of autograd's.
        """
        num_own = int(self._plan.is_trainable)
        for index, part in enumerate(self._parts):
            if part.requires_grad is not self._plan.is_trainable:
                raise _changed(
                    self._plan.names[index],
                    found=f"requires_grad is {part.requires_grad} since it was sharded",
                    fix="Set requires_grad before fully_shard, or drop the gradient afterwards.",
                )
            if len(part._backward_hooks or ()) > num_own or part._post_accumulate_grad_hooks:
                raise _changed(
                    self._plan.names[index],
                    found="a hook of autograd's on this rank's part, which autograd never sees",
                    fix="Change gradients after backward, or register a hook inside forward.",
                )

    def check_owners(self) -> None:
        """Modules hold the parts; just before whole parameters take their place.

        Raises:
            ConfigError: A module holds another parameter under that name, or none.
        """
        for index, (own, part) in enumerate(zip(self._owners, self._parts, strict=True)):
            for module, name in own:
                if module._parameters.get(name) is not part:
                    raise _changed(
                        self._plan.names[index],
                        found=f"{type(module).__name__}.{name} is another object",
                        fix="Write into it under torch.no_grad(), or replace it before sharding: "
                        "parametrizations, weight norms and adapters come first.",
                    )
        self._version = self._count()

    def check_wholes(self) -> None:
        """Gathered parameters are as they were gathered; when they have left the modules.

        Raises:
            ConfigError: The unit's forward has written into one, as `nn.Embedding(max_norm=...)`
                does, or has given it other data, as `nn.LSTM.flatten_parameters` does.
        """
        for index, (whole, place) in enumerate(zip(self._wholes, self._places, strict=True)):
            if not whole.is_set_to(place):
                raise _changed(
                    self._plan.names[index],
                    found=f"unit {self._plan.unit!r} replaces its data in forward",
                    fix="Compute another tensor from it and leave it as it is. An nn.LSTM or "
                    "nn.GRU does this on a GPU; set module.flatten_parameters = lambda: None.",
                )
        if self._version != self._count():
            raise _changed(
                ", ".join(self._plan.names[:4]),
                found=f"unit {self._plan.unit!r} writes into gathered parameters in its forward",
                fix="Change shards between steps, under torch.no_grad().",
            )

    def _count(self) -> int:
        """How often gathered parameters were written; where they are the shard, that is no loss."""
        place = self._places[0]
        is_counted = not self._plan.is_one_buffer and not place.is_inference()
        return place._version if is_counted else 0


def _refuser(name: str, unit: str) -> Callable[[Tensor], None]:
    # Autograd may keep it longer than the model lives, so it holds words alone.
    def refuse(_gradient: Tensor) -> None:
        raise ConfigError(
            f"backward: a gradient of this rank's part of {name!r}",
            found=f"the parameter was used while unit {unit!r} had not gathered it",
            why="Only a part of it was there, and its gradient would not be reduced.",
            fix="Use a parameter inside the forward of its unit, or leave it to the root.",
        )

    return refuse


def _changed(name: str, *, found: str, fix: str) -> ConfigError:
    return ConfigError(
        f"fsdp: parameter {name!r}",
        found=found,
        why="Values are gathered from flat buffers, and gradients reduced, as was planned.",
        fix=fix,
    )
