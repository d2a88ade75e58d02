"""Ranks of a test as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable


def together(call: Callable[[int], object], callers: Iterable[int]) -> dict[int, object]:
    """What `call` returns or raises on each rank, all at the same time."""
    found: dict[int, object] = {}

    def run(rank: int) -> None:
        try:
            found[rank] = call(rank)
        except Exception as problem:
            found[rank] = problem

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in callers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found
