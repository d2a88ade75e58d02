"""Everything that a running sharded model refuses, and why: one function for each error.

What `fully_shard` refuses before anything is sharded is in `plan/checks.py`, and functions of torch
that would take a shard for the whole are in `torch_function_errors.py`.
"""

from __future__ import annotations

from pcomm.core.errors import (
    ClosedError,
    ConfigError,
    DivergenceError,
    PeerError,
    PeerTimeoutError,
    UnsupportedError,
)
from pcomm.fsdp.plan.group_plan import GroupPlan

__all__ = [
    "SHAPES_OF_SHARDS",
    "backward_within_forward",
    "broken_collectives",
    "changed_parameter",
    "changed_weights",
    "closed",
    "collective_failed",
    "different_schedules",
    "gone",
    "late_gradient",
    "late_rank",
    "lost_gradients",
    "peer_failed",
    "second_backward",
    "second_derivatives",
    "sparse_gradient",
    "stale_gather",
    "unexpected_gradient",
    "unit_called_alone",
    "used_while_sharded",
]

SHAPES_OF_SHARDS = (
    "fsdp: outside of the forward of its unit, a parameter is this rank's shard, of fewer rows. If "
    "a module reads weights of one that it does not call, let the module that reads be the unit."
)
"""Said with torch's own errors about shapes, which may be those of shards on some ranks alone."""

# -- the life of a model -----------------------------------------------------------------------


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


def unit_called_alone(unit: str) -> ConfigError:
    """A unit's module was called outside of the model's forward."""
    return ConfigError(
        f"fsdp: unit {unit!r} called by itself",
        found="the model's forward is not running",
        why="The schedule begins with an entry point of the model.",
        fix="Call the model, or name the method that calls this unit in entry_points.",
    )


# -- weights that are not those that were gathered ---------------------------------------------


def changed_parameter(name: str, *, found: str, fix: str) -> ConfigError:
    """A parameter is not what it was when it was sharded."""
    return ConfigError(
        f"fsdp: parameter {name!r}",
        found=found,
        why="Values are gathered from flat buffers, and gradients reduced, as was planned.",
        fix=fix,
    )


def stale_gather(plan: GroupPlan) -> ConfigError:
    """Shards were written after they had been gathered."""
    return ConfigError(
        f"fsdp: the gathered parameters of {plan.name!r}",
        found="this rank's shard was written after they had been gathered",
        why="They stay gathered for the next micro-batch, which would compute with old weights.",
        fix="Call sharded.parameters_changed() on all ranks after writing into shards; let the "
        "optimizer step after a backward with accumulate(is_last=True).",
    )


def changed_weights() -> ConfigError:
    """Shards were written between a forward and its backward."""
    return ConfigError(
        "backward of a sharded model",
        found="parameters that were written after the forward that it belongs to",
        why="They are gathered again for backward, which would compute with other weights.",
        fix="Call backward before the optimizer steps and before parameters are loaded.",
    )


def used_while_sharded(name: str, unit: str) -> ConfigError:
    """A shard has got a gradient from autograd."""
    return ConfigError(
        f"backward: a gradient of this rank's shard of {name!r}",
        found=f"the parameter was used while unit {unit!r} had not gathered it",
        why="Only a shard of it was there, and its gradient would not be reduced.",
        fix="Use a parameter inside the forward of its unit, or leave it to the root.",
    )


# -- backward ----------------------------------------------------------------------------------


def second_backward() -> ConfigError:
    """Backward has come to a forward that has had its own."""
    return ConfigError(
        "backward of a sharded model",
        found="the graph of a forward that has had its backward, or was given up after an error",
        why="A unit's gradients are reduced, and its parameters released, once for each forward.",
        fix="Call backward once for each forward, for all its losses together.",
    )


def backward_within_forward() -> ConfigError:
    """Backward was called while the model's forward runs."""
    return ConfigError(
        "backward of a sharded model",
        found="its forward, which is still running",
        why="A unit is in its forward or in its backward; its parameters are released after each.",
        fix="Compute gradients within the forward of one unit, or after that of the model.",
    )


def second_derivatives() -> UnsupportedError:
    """Backward was called with `create_graph=True`."""
    return UnsupportedError(
        "backward of a sharded model with create_graph=True",
        found="a graph of the backward, as a penalty on gradients needs it",
        why="That graph reads weights after they were released, and its own backward has no "
        "schedule that gathers them.",
        fix="Leave the model whole, or take a penalty that needs first derivatives alone, such as "
        "the difference of two forwards.",
    )


def sparse_gradient(plan: GroupPlan, index: int) -> UnsupportedError:
    """Autograd has made a sparse gradient."""
    return UnsupportedError(
        f"backward: a gradient of {plan.names[index]}",
        found="a sparse tensor",
        why="Gradients are collected in a dense buffer, which all ranks reduce together.",
        fix="Build the module with sparse=False, as nn.Embedding is by default.",
    )


def late_gradient(plan: GroupPlan, index: int) -> ConfigError:
    """A gradient has come after those of its unit were reduced."""
    return ConfigError(
        f"backward: a gradient of {plan.names[index]}",
        found=f"the gradients of unit {plan.unit!r} are being reduced already",
        why="A unit's gradients are reduced once the gradient of its inputs is known.",
        fix="Run all of a unit's computation inside its forward, and call backward once for it.",
    )


def unexpected_gradient(plan: GroupPlan, index: int) -> ConfigError:
    """A gradient has come to a unit that is not in backward."""
    return ConfigError(
        f"backward: a gradient of {plan.names[index]}",
        found=f"backward has not come to unit {plan.unit!r} by a tensor that its forward returned",
        why="A unit's backward begins at the tensors that it returns, and gathers for it there.",
        fix="Return every tensor that the loss needs, in tuples, lists, dicts or dataclasses.",
    )


def lost_gradients(plan: GroupPlan) -> ConfigError:
    """Gradients of earlier micro-batches are gone."""
    return ConfigError(
        "forward after a micro-batch that was given up",
        found=f"the gradients that earlier ones had added up for {plan.name!r} went with it",
        why="The step would go on without them.",
        fix="Call zero_grad() of what fully_shard returned, and begin the step again.",
    )


# -- other ranks -------------------------------------------------------------------------------


def different_schedules(found: str) -> DivergenceError:
    """Ranks run units in different orders."""
    return DivergenceError(
        "fsdp: what units do",
        found=found,
        why="Gathers and reduces are issued in the order in which units run, which has to be that "
        "of all ranks.",
        fix="Use units in the same order on all ranks: draw what varies, such as layers that are "
        "dropped, from the same random numbers; or make one unit of it.",
    )


def late_rank(step: str, limit_s: float) -> PeerTimeoutError:
    """A rank has not departed from the schedule where this one does."""
    return PeerTimeoutError(
        f"fsdp: {step}",
        found=f"not all ranks came to the same place within {limit_s:g} s",
        why="This was not foreseen in the schedule, so all ranks have to do it or none.",
        fix="Look for an earlier error on the other ranks; raise PCOMM_TIMEOUT_S if they are slow.",
    )


def peer_failed(message: str) -> PeerError:
    """Another rank has failed before an agreement."""
    return PeerError(
        "fsdp: what units do",
        found=f"an error on {message}",
        why="What was not foreseen in the schedule is done by all ranks or none.",
        fix="Repair what that rank reports.",
    )


def collective_failed(what: str, found: str) -> PeerError:
    """A collective will not end."""
    return PeerError(
        f"fsdp: {what}",
        found=found,
        why="A collective ends only if every rank of its group joins it.",
        fix="Repair what that rank reports; if it reports nothing, look for its first error.",
    )


def broken_collectives(reason: str) -> PeerError:
    """A collective of an earlier step never ended."""
    return PeerError(
        "fsdp: step after an error",
        found=f"collectives that some ranks never joined, after: {reason}",
        why="The next collective would meet what is left of the last ones.",
        fix="Open new groups and shard the model again, or restart from a checkpoint.",
    )
