"""What a sharded model refuses to go on with, and why."""

from __future__ import annotations

from pcomm.core.errors import ClosedError, ConfigError
from pcomm.fsdp.plan.group_plan import GroupPlan

__all__ = ["closed", "gone", "late", "lost", "stale", "unexpected"]


def closed(asked: str) -> ClosedError:
    """The model was used after it had been closed."""
    return ClosedError(
        asked,
        found="a sharded model that was closed",
        why="Closing it, or the groups that it was sharded over, ends its communication.",
        fix="Do it before that, inside the `with` block of the groups; to go on, open groups, "
        "build the model again, shard it and load what was saved.",
    )


def gone() -> ClosedError:
    """Backward has come to a model that was closed or deleted."""
    return ClosedError(
        "backward of a sharded model",
        found="a model that was closed or deleted after its forward",
        why="Its parameters cannot be gathered, and there is nothing to reduce gradients into.",
        fix="Keep the model, and its groups open, until backward has ended.",
    )


def stale(plan: GroupPlan) -> ConfigError:
    """Shards were written after they had been gathered."""
    return ConfigError(
        f"fsdp: the gathered parameters of {plan.name!r}",
        found="this rank's part was written after they had been gathered",
        why="They stay gathered for the next micro-batch, which would compute with old weights.",
        fix="Call sharded.parameters_changed() on all ranks after writing into shards; let the "
        "optimizer step after a backward with accumulate(is_last=True).",
    )


def late(plan: GroupPlan, index: int) -> ConfigError:
    """A gradient has come after those of its unit were reduced."""
    return ConfigError(
        f"backward: a gradient of {plan.names[index]}",
        found=f"the gradients of unit {plan.unit!r} are being reduced already",
        why="A unit's gradients are reduced once the gradient of its inputs is known.",
        fix="Run all of a unit's computation inside its forward, and call backward once for it.",
    )


def lost(plan: GroupPlan) -> ConfigError:
    """Gradients of earlier micro-batches are gone."""
    return ConfigError(
        "forward after a micro-batch that was given up",
        found=f"the gradients that earlier ones had added up for {plan.name!r} went with it",
        why="The step would go on without them.",
        fix="Call zero_grad() of what fully_shard returned, and begin the step again.",
    )


def unexpected(plan: GroupPlan, index: int) -> ConfigError:
    """A gradient has come to a unit that is not in backward."""
    return ConfigError(
        f"backward: a gradient of {plan.names[index]}",
        found=f"backward has not come to unit {plan.unit!r} by a tensor that its forward returned",
        why="A unit's backward begins at the tensors that it returns, and gathers for it there.",
        fix="Return every tensor that the loss needs, in tuples, lists, dicts or dataclasses.",
    )
