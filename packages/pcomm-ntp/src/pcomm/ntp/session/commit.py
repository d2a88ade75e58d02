"""The last word before a step is applied: all ranks are ready."""

from __future__ import annotations

import torch

from pcomm.core.collectives import Collectives

__all__ = ["commit"]


def commit(asks_move: bool, collectives: Collectives, device: torch.device) -> bool:
    """Tell that this rank is ready, and wait until all are. Collective over all ranks.

    One all-reduce. When it ends on a rank, every rank has entered it with its gradients summed.
    It may end on some ranks and fail on others; see `resume_point`.

    Args:
        asks_move: True to ask for another generation after the step, such as for new speeds.
        collectives: Collectives of all ranks of the generation.
        device: Device that the collectives take tensors on.

    Returns:
        Whether any rank asks for another generation.
    """
    told = torch.tensor([asks_move], dtype=torch.int32, device=device)
    return bool(collectives.all_reduce(told, op="max").item())
