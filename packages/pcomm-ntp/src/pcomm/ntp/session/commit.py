"""The last word before a step is applied: all ranks are ready, and what some of them ask for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pcomm.core.collectives import Collectives

__all__ = ["Requests", "commit"]


@dataclass(frozen=True)
class Requests:
    """What ranks ask of all others at the end of a step.

    Args:
        moves: True to begin another generation, for a process that joins or for new speeds.
        stops: True to end after this step.
    """

    moves: bool = False
    stops: bool = False


def commit(own: Requests, collectives: Collectives, device: torch.device) -> Requests:
    """Tell that this rank is ready, and wait until all are. Collective over all ranks.

    One all-reduce. When it ends on a rank, every rank has entered it with its gradients summed.
    It may end on some ranks and fail on others; see `resume_point`.

    Args:
        own: Requests of this rank.
        collectives: Collectives of all ranks of the generation.
        device: Device that the collectives take tensors on.

    Returns:
        The requests of all ranks together.
    """
    told = torch.tensor([own.moves, own.stops], dtype=torch.int32, device=device)
    moves, stops = collectives.all_reduce(told, op="max").tolist()
    return Requests(bool(moves), bool(stops))
