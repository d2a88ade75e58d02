"""How tests go from one generation to the next."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch.distributed as dist

from pcomm.core.control.control import Control, parse_ranks


def following(control: Control, ranks: Sequence[int]) -> Control:
    """The control of the generation after that of `control`, of `ranks`."""
    return Control(
        control.store,
        ranks,
        control.rank,
        generation=control.generation + 1,
        timeout_s=control.timeout_s,
    )


def joined(store: dist.Store, rank: int, *, timeout_s: float) -> Control:
    """The control of the newest generation, waiting until that is one with `rank`."""
    end_s, newest, ranks = time.monotonic() + timeout_s, 0, tuple[int, ...]()
    while time.monotonic() < end_s:
        if store.check([f"pcomm/generation/{newest + 1}"]):
            newest += 1
            ranks = parse_ranks(store.get(f"pcomm/generation/{newest}").decode())
        elif rank in ranks:
            return Control(store, ranks, rank, generation=newest, timeout_s=timeout_s)
        else:
            time.sleep(0.02)
    raise TimeoutError(f"no generation with rank {rank}")
