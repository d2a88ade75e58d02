"""Changes to a sharded model that its buffers would not follow: errors, and never other numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from pcomm.core.errors import ConfigError
from pcomm.fsdp.group_plan import GroupPlan
from pcomm.fsdp.units import Owner

__all__ = ["Intact"]


class Intact:
    """What a group's parts were when they were made, to be compared later. Local.

    Args:
        plan: Of the group.
        owners: For each parameter, the modules that hold it.
        parts: This rank's parts, views of its shard.
        views: The gathered parameters, with a version counter that gathers do not change.
    """

    def __init__(
        self,
        plan: GroupPlan,
        owners: Sequence[Sequence[Owner]],
        parts: Sequence[nn.Parameter],
        views: Tensor,
    ) -> None:
        self._plan, self._owners, self._parts, self._views = plan, owners, parts, views
        self._version = 0
        self._addresses = [part.data_ptr() for part in parts]
        if plan.is_trainable:
            for index, part in enumerate(parts):
                part.register_hook(self._refuser(index))

    def check_parts(self) -> None:
        """Parts are as they were made; before a forward that a backward follows.

        Raises:
            ConfigError: One trains and did not, or the reverse, or lies elsewhere, or has a hook.
        """
        num_own = int(self._plan.is_trainable)
        for index, (part, address) in enumerate(zip(self._parts, self._addresses, strict=True)):
            if part.requires_grad is not self._plan.is_trainable:
                raise _changed(
                    self._plan.names[index],
                    found=f"requires_grad is {part.requires_grad} since it was sharded",
                    fix="Set requires_grad before fully_shard, or drop the gradient afterwards.",
                )
            if part.data_ptr() != address and part.numel():
                raise _changed(
                    self._plan.names[index],
                    found="its data is another tensor than when it was sharded",
                    fix="Write into it under torch.no_grad(), by copy_; convert before sharding.",
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
            ConfigError: Somebody has put another parameter there.
        """
        for index, (own, part) in enumerate(zip(self._owners, self._parts, strict=True)):
            for module, name in own:
                if module._parameters.get(name) is not part:
                    raise _changed(
                        self._plan.names[index],
                        found=f"{type(module).__name__}.{name} is another object",
                        fix="Write into it under torch.no_grad(), or replace it before sharding.",
                    )

        self._version = self._count()

    def check_views(self) -> None:
        """Nobody has written into gathered parameters; when they have left the modules.

        Raises:
            ConfigError: Somebody has, as `nn.Embedding(max_norm=...)` does.
        """
        if self._version != self._count():
            raise _changed(
                ", ".join(self._plan.names[:4]),
                found=f"unit {self._plan.unit!r} writes into gathered parameters in its forward",
                fix="Change shards between steps, under torch.no_grad().",
            )

    def _count(self) -> int:
        """How often gathered parameters were written; where they are the shard, that is no loss."""
        is_counted = not self._plan.is_one_buffer and not self._views.is_inference()
        return self._views._version if is_counted else 0

    def _refuser(self, index: int) -> Callable[[Tensor], None]:
        def refuse(_gradient: Tensor) -> None:
            raise ConfigError(
                f"backward: a gradient of this rank's part of {self._plan.names[index]!r}",
                found=f"the parameter was used while unit {self._plan.unit!r} had not gathered it",
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
