"""The default group of the ranks of a test, and its collectives."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from pcomm.core.collectives.protocol import Collectives
from pcomm.core.groups.communicators import communicator_of

__all__ = ["default_collectives", "default_group", "run_twin"]


def default_group() -> dist.ProcessGroup:
    """The group of all ranks, which `@ranks` has opened. Local."""
    group = dist.group.WORLD
    assert group is not None
    return group


def default_collectives() -> Collectives:
    """The collectives of that group, without gradients. Local."""
    return communicator_of(default_group()).collectives


def run_twin(
    collectives: Collectives, name: str, is_async: bool, x: Tensor, **options: Any
) -> Tensor:
    """The result of a named method, or of its asynchronous twin. Collective.

    Args:
        collectives: Collectives that carry it out.
        name: Name of the method that blocks.
        is_async: True for its twin, which is waited for here.
        x: Input tensor, of any shape.
        options: Further arguments of the method.
    """
    if is_async:
        result: Tensor = getattr(collectives, f"{name}_async")(x, **options).wait()
    else:
        result = getattr(collectives, name)(x, **options)
    return result
