"""A control plane whose waits end when the ranks of its generation leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist

from pcomm.core.control import Control

__all__ = ["WatchedControl"]


class WatchedControl(Control):
    """A `Control` that raises in the middle of an agreement once a check does.

    Args:
        store: Store that all ranks share.
        ranks: Ranks that agree.
        rank: Rank of this process.
        check: Function called while waiting; raises when the ranks leave the generation.
        job: Word that no other job has whose ranks live in this process. Torch names communicators
            for the whole process, and their names begin with it.
        generation: Number of changes of membership so far.
        timeout_s: Seconds to wait for the others.
    """

    def __init__(
        self,
        store: dist.Store,
        ranks: Sequence[int],
        rank: int,
        check: Callable[[], None],
        *,
        job: str,
        generation: int,
        timeout_s: float,
    ) -> None:
        self._check_failure, self._job = check, job
        super().__init__(store, ranks, rank, generation=generation, timeout_s=timeout_s)

    @property
    def prefix(self) -> str:
        """Prefix of the keys of these ranks in this generation; the same on all of them."""
        return f"{super().prefix}/{self._job}"

    def check_fence(self) -> None:
        """Raise if a newer generation has begun, or the ranks leave this one. Local."""
        super().check_fence()
        self._check_failure()
