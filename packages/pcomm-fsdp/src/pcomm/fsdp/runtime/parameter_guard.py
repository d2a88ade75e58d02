"""Changes to a sharded model that its buffers would not follow: errors, and never other numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from pcomm.core.errors import ConfigError
from pcomm.fsdp.plan.group_plan import GroupPlan
from pcomm.fsdp.plan.units import Owner

__all__ = ["ParameterGuard"]


class ParameterGuard:
    """Compares a group's parameters with what they were when they were made. Local.

    Args:
        plan: The plan of the group.
        owners: The modules that hold each parameter.
        shards: This rank's shards of the parameters, as the optimizer has them.
        shard_views: The views of the flat shard that those were made of.
        unsharded: The unsharded parameters, as modules have them while they compute.
        unsharded_views: The views of the unsharded buffer that those were made of. They share a
            version counter that gathers do not change.
    """

    def __init__(
        self,
        plan: GroupPlan,
        owners: Sequence[Sequence[Owner]],
        shards: Sequence[nn.Parameter],
        shard_views: Sequence[Tensor],
        unsharded: Sequence[nn.Parameter],
        unsharded_views: Sequence[Tensor],
    ) -> None:
        self._plan, self._owners = plan, owners
        self._shards, self._shard_views = shards, shard_views
        self._unsharded, self._unsharded_views = unsharded, unsharded_views
        self._version = 0
        if plan.is_trainable:
            for index, shard in enumerate(shards):
                shard.register_hook(_refuser(plan.names[index], plan.unit))

    def check_values(self) -> None:
        """Shards are views of the buffer that is gathered; before every forward.

        Raises:
            ConfigError: One lies elsewhere, or has another dtype or shape.
        """
        for index, (shard, view) in enumerate(zip(self._shards, self._shard_views, strict=True)):
            if not shard.is_set_to(view):
                raise _changed(
                    self._plan.names[index],
                    found="its data is another tensor than when it was sharded",
                    fix="Write into it under torch.no_grad(), by copy_; convert before sharding.",
                )

    def follow_frozen(self) -> None:
        """Freeze in this forward what was frozen since; before one that a backward may follow.

        It also checks that gradients can reach the shards.

        Raises:
            ConfigError: A shard trains and did not, or has a hook of autograd's.
        """
        num_own = int(self._plan.is_trainable)
        for index, shard in enumerate(self._shards):
            if shard.requires_grad and not self._plan.is_trainable:
                raise _changed(
                    self._plan.names[index],
                    found="requires_grad is True, and was False when it was sharded",
                    fix="Shard what trains at some time with requires_grad=True, and freeze it "
                    "until then.",
                )
            self._unsharded[index].requires_grad_(shard.requires_grad)
            if len(shard._backward_hooks or ()) > num_own or shard._post_accumulate_grad_hooks:
                raise _changed(
                    self._plan.names[index],
                    found="a hook of autograd's on this rank's shard, which autograd never sees",
                    fix="Change gradients after backward, or register a hook inside forward.",
                )

    def check_owners(self) -> None:
        """Modules hold the shards; just before unsharded parameters take their place.

        Raises:
            ConfigError: A module holds another parameter under that name, or none.
        """
        for index, (own, shard) in enumerate(zip(self._owners, self._shards, strict=True)):
            for module, name in own:
                if module._parameters.get(name) is not shard:
                    raise _changed(
                        self._plan.names[index],
                        found=f"{type(module).__name__}.{name} is another object",
                        fix="Write into it under torch.no_grad(), or replace it before sharding: "
                        "parametrizations, weight norms and adapters come first.",
                    )
        self._version = self._count()

    def check_unsharded(self) -> None:
        """Unsharded parameters are as they were gathered; when they have left the modules.

        Raises:
            ConfigError: The unit's forward has written into one, as `nn.Embedding(max_norm=...)`
                does, or has given it other data, as `nn.LSTM.flatten_parameters` does.
        """
        for index, (parameter, view) in enumerate(
            zip(self._unsharded, self._unsharded_views, strict=True)
        ):
            if not parameter.is_set_to(view):
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
        """Number of writes to unsharded parameters; 0 where they are the shard."""
        view = self._unsharded_views[0]
        is_counted = not self._plan.is_one_buffer and not view.is_inference()
        return view._version if is_counted else 0


def _refuser(name: str, unit: str) -> Callable[[Tensor], None]:
    # Autograd may keep it longer than the model lives, so it holds words alone.
    def refuse(_gradient: Tensor) -> None:
        raise ConfigError(
            f"backward: a gradient of this rank's shard of {name!r}",
            found=f"the parameter was used while unit {unit!r} had not gathered it",
            why="Only a shard of it was there, and its gradient would not be reduced.",
            fix="Use a parameter inside the forward of its unit, or leave it to the root.",
        )

    return refuse


def _changed(name: str, *, found: str, fix: str) -> ConfigError:
    """A parameter is not what it was when it was sharded."""
    return ConfigError(
        f"fsdp: parameter {name!r}",
        found=found,
        why="Values are gathered from flat buffers, and gradients reduced, as was planned.",
        fix=fix,
    )
