"""How micro-batches come to the device: read while it computes, and copied without a wait."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from pcomm.gdn_cp import Plan
from pcomm.integration.data.batches import Batch, TrainBatches

__all__ = ["DeviceBatch", "ReadAhead"]


class DeviceBatch(NamedTuple):
    """Inputs of `LanguageModel.token_losses`: the tokens of this context-parallel rank."""

    tokens: Tensor
    """`[T]`, int64."""

    targets: Tensor
    """`[T]`, int64: the token after each."""

    plan: Plan
    """The plan of the sequences of all context-parallel ranks."""

    @classmethod
    def of(cls, batch: Batch, plan: Plan, device: torch.device) -> DeviceBatch:
        """The tokens of `batch` that `plan` gives this rank, on `device`.

        They go to a GPU from pinned memory: the host goes on at once, also where the device has not
        yet come to the copy. Torch keeps that memory until it has.
        """
        shares = (plan.shard(torch.from_numpy(array)) for array in (batch.tokens, batch.targets))
        if device.type == "cuda":
            shares = (share.pin_memory() for share in shares)
        tokens, targets = (share.to(device, non_blocking=True) for share in shares)
        return cls(tokens, targets, plan)


class ReadAhead:
    """Batches of a run, of which a thread reads the next one while the last is computed.

    What is read does not depend on it. The thread ends with this object. On a CPU it would take the
    processor from what computes, so there `TrainBatches` are read themselves.

    Args:
        batches: Batches to read.
    """

    def __init__(self, batches: TrainBatches) -> None:
        self._batches = batches
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="pcomm reads batches")
        self._next: tuple[_Asked, Future[Batch]] | None = None

    def batch(
        self, step: int, *, dp_rank: int, dp_size: int, micro: int, shares: Sequence[int]
    ) -> Batch:
        """See `TrainBatches.batch`, whose errors it raises; then the one behind it is begun."""
        asked = self._asked(step, micro, dp_rank, dp_size, tuple(shares))
        ready, self._next = self._next, None
        found = ready[1].result() if ready and ready[0] == asked else self._read(asked)
        num_micro = self._batches.num_micro_batches(dp_size, dp_rank=dp_rank, shares=shares)
        place = (step, micro + 1) if micro + 1 < num_micro else (step + 1, 0)
        after = self._asked(*place, dp_rank, dp_size, tuple(shares))
        self._next = after, self._reader.submit(self._read, after)
        return found

    def _asked(
        self, step: int, micro: int, dp_rank: int, dp_size: int, shares: tuple[int, ...]
    ) -> _Asked:
        # Where a run goes on with batches of another size, a step begins at other rows.
        return _Asked(step, micro, dp_rank, dp_size, shares, self._batches.rows_before(step))

    def _read(self, asked: _Asked) -> Batch:
        return self._batches.batch(
            asked.step,
            micro=asked.micro,
            dp_rank=asked.dp_rank,
            dp_size=asked.dp_size,
            shares=asked.shares,
        )


class _Asked(NamedTuple):
    """What a batch depends on."""

    step: int
    micro: int
    dp_rank: int
    dp_size: int
    shares: tuple[int, ...]
    first_row: int
