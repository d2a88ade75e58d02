"""The last word before a step is applied: all ranks are ready."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from pcomm.core.collectives import Collectives
from pcomm.core.errors import DivergenceError

__all__ = ["commit"]


def commit(
    asks_move: bool,
    settings: Mapping[str, float | None],
    collectives: Collectives,
    device: torch.device,
) -> bool:
    """Tell that this rank is ready, and wait until all are. Collective over all ranks.

    One all-reduce. When it ends on a rank, every rank has entered it with its gradients summed.
    It may end on some ranks and fail on others; see `resume_point`.

    Args:
        asks_move: True to ask for another generation after the step, such as for new speeds.
        settings: Numbers that must be the same on all ranks, by name; the same names on all. None
            on a rank that has none, such as one without units.
        collectives: Collectives of all ranks of the generation.
        device: Device that the collectives take tensors on.

    Returns:
        Whether any rank asks for another generation.

    Raises:
        DivergenceError: Ranks differ in a setting; on every rank, none of which applies the step.
    """
    # The largest and the least of each, by one reduction.
    pairs = [(-math.inf, -math.inf) if v is None else (v, -v) for v in settings.values()]
    told = torch.tensor([float(asks_move), *sum(pairs, ())], dtype=torch.float64, device=device)
    asked, *found = collectives.all_reduce(told, op="max").tolist()
    for name, most, least in zip(settings, found[::2], found[1::2], strict=True):
        if most != -least and most != -math.inf:
            raise DivergenceError(
                f"Session: {name}",
                found=f"{most:g} on one rank, {-least:g} on another",
                why="All ranks apply the same steps, so that replicas stay equal.",
                fix=f"Give the same {name} on all ranks.",
            )
    return bool(asked)
