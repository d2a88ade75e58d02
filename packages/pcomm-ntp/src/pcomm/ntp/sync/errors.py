"""Everything that `GradSync` refuses, and why: one function for each error."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pcomm.core.errors import (
    ClosedError,
    ConfigError,
    LayoutError,
    TopologyError,
    UnsupportedError,
    near_misses,
)
from pcomm.core.layout import Layout

__all__ = [
    "bad_argument",
    "broken",
    "changed_gradient",
    "changed_model",
    "closed",
    "foreign",
    "idle_rank",
    "late_gradient",
    "not_copied",
    "not_floating",
    "not_summed",
    "other_group",
    "other_layout",
    "outside",
    "real_sum",
    "stale_gradient",
    "unknown_names",
    "without_units",
    "wrong_turn",
]

# -- before training ---------------------------------------------------------------------------


def idle_rank(rank: int) -> ConfigError:
    """A rank without units has nothing to sum."""
    return ConfigError(
        f"GradSync: rank {rank}",
        found="a rank that the plan does not use",
        why="An idle rank holds no units and is in none of the groups that sum gradients.",
        fix="Make no model and no GradSync where plan.place(rank).is_idle.",
    )


def other_group(name: str, wanted: Sequence[int], found: str) -> TopologyError:
    """The groups are not those of the plan."""
    return TopologyError(
        f"GradSync: group {name!r} of ranks {list(wanted)}",
        found=found,
        why="Gradients are summed over the groups that the plan and the strategy name.",
        fix="Give grad_groups(plan, strategy) to open_groups, with the plan and the strategy given "
        "here.",
    )


def bad_argument(name: str, value: object, needed: str) -> ConfigError:
    """A number that cannot be used."""
    return ConfigError(
        f"GradSync: {name}={value!r}",
        found=f"something other than {needed}",
        why="It is a size, or a factor of gradients.",
        fix=f"Give {name} as {needed}.",
    )


def unknown_names(names: Sequence[str], known: Sequence[str]) -> ConfigError:
    """Layouts of parameters that are not there."""
    return ConfigError(
        f"GradSync: param_layouts of {', '.join(map(repr, names[:4]))}",
        found=f"a model with {len(known)} parameters of other names",
        why="Layouts are looked up by the names of model.named_parameters().",
        fix=near_misses(names[0], known),
    )


def not_floating(dtype: torch.dtype) -> ConfigError:
    """A type that gradients cannot be summed in."""
    return ConfigError(
        f"GradSync: reduce_dtype={dtype}",
        found="a type that is not of floating point",
        why="Gradients are numbers of floating point, and so are their sums.",
        fix="Give torch.float32, torch.float64 or torch.bfloat16, or leave it out.",
    )


def real_sum(name: str, dtype: torch.dtype) -> ConfigError:
    """A type that would drop a part of each number."""
    return ConfigError(
        f"GradSync: reduce_dtype={dtype}",
        found=f"parameter {name!r}, which is complex",
        why="A sum in a real type would drop the imaginary parts.",
        fix="Leave reduce_dtype out.",
    )


def without_units(name: str, layout: Layout, known: Sequence[str]) -> LayoutError:
    """A split parameter that the plan says nothing of."""
    return LayoutError(
        f"GradSync: parameter {name!r}",
        found=f"split over {layout.size} ranks, and no units in the plan",
        why="Without units nothing says which ranks of the other replicas hold the same part.",
        fix=f"Give its name, or a pattern, with its units to plan(). {near_misses(name, known)}",
    )


def other_layout(name: str, found: str, layout: Layout) -> LayoutError:
    """A parameter that lies otherwise than the plan has it."""
    return LayoutError(
        f"GradSync: parameter {name!r}",
        found=f"{found}; the plan has {layout.describe()}",
        why="Sums are cut along the plan's layouts, so the model is built with these.",
        fix="Build the layer with plan.layout(units, replica, stage).",
    )


def foreign(asked: str, kind: str) -> UnsupportedError:
    """A model that something else splits over ranks, or whose gradients it sums."""
    return UnsupportedError(
        f"GradSync: {asked}",
        found=f"a {kind}, of torch's own parallelism",
        why="It would cut parameters at other places than the plan, or sum gradients once more.",
        fix="Give the plain module; split it by layers of pcomm.core.tensor_parallel, or by others "
        "with param_layouts, that hold plain tensors of the plan's layouts.",
    )


# -- while training ----------------------------------------------------------------------------


def closed(asked: str) -> ClosedError:
    """It was used after its end."""
    return ClosedError(
        asked,
        found="a GradSync that was closed, or whose groups were",
        why="Its hooks are gone, so gradients would stay those of this rank alone.",
        fix="Make another one with open groups, and close it after the last step.",
    )


def broken(asked: str) -> ClosedError:
    """A step ended by an error while sums were in flight."""
    return ClosedError(
        asked,
        found="a step that ended by an error while sums were in flight",
        why="Other ranks may have, or not have, the sums that this rank has given up.",
        fix="Close it, and make another one with groups opened anew.",
    )


def wrong_turn(asked: str, found: str, fix: str) -> ConfigError:
    """Calls in another order than accumulate, finish."""
    return ConfigError(
        asked,
        found=found,
        why="A step is: accumulate() around each backward, is_last=True for the last, finish().",
        fix=fix,
    )


def not_summed(asked: str) -> ConfigError:
    """A norm of gradients that are not summed yet."""
    return wrong_turn(asked, "gradients that are not summed", "Call finish() before it.")


def outside(name: str) -> ConfigError:
    """A gradient came outside of a step."""
    return wrong_turn(
        f"backward: gradient of {name!r}",
        "a backward outside of accumulate(), which has added to the gradient",
        "Call zero_grad(), and run backward inside `with sync.accumulate():`.",
    )


def late_gradient(name: str) -> ConfigError:
    """A gradient that came after its sum had begun."""
    return wrong_turn(
        f"backward: gradient of {name!r}",
        "a second gradient after its sum was started",
        "Run one backward in the last accumulate(), and each earlier one in its own; checkpoint "
        "activations with use_reentrant=False.",
    )


def changed_gradient(name: str) -> ConfigError:
    """A gradient that is not the one whose sum was started."""
    return ConfigError(
        "GradSync.finish",
        found=f"a gradient of {name!r} that was changed, replaced or dropped after its sum began",
        why="The sum has what it was before, and would be written over it.",
        fix="Change gradients after finish(), or before the last accumulate().",
    )


def stale_gradient(name: str) -> ConfigError:
    """A step that would begin with a gradient of before."""
    return wrong_turn(
        "GradSync.accumulate",
        f"a gradient of {name!r} before the first backward of the step",
        "Call zero_grad() after the optimizer's step, and before the first one; or what is there "
        "would be summed once more.",
    )


def changed_model(name: str, found: str) -> ConfigError:
    """A model that is not what it was."""
    return ConfigError(
        f"GradSync: parameter {name!r}",
        found=found,
        why="Hooks and buffers were made for the parameters that the model had.",
        fix="Change the model first, on all ranks, and make another GradSync then.",
    )


def not_copied(asked: str) -> UnsupportedError:
    """A copy of what belongs to one model and one process."""
    return UnsupportedError(
        asked,
        found="a GradSync, which has hooks on one model's parameters and groups of this process",
        why="A copy would sum the gradients of the same parameters once more.",
        fix="Copy the model, and make a GradSync for the copy.",
    )
