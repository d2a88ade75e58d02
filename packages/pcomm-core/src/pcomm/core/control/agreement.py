"""Agreement before a collective as two functions, for callers with a store and no `Control`."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from pcomm.core.control.control import Control

__all__ = ["agree_on_lines", "fail_together"]


def agree_on_lines(
    store: dist.Store,
    topic: str,
    lines: Sequence[str],
    rank: int,
    ranks: Sequence[int],
    *,
    timeout_s: float,
) -> str:
    """Make sure that all ranks hold the same lines of text. Collective; see `Control.agree`.

    Args:
        store: Store that all ranks share.
        topic: Subject of the lines; part of the keys and of errors.
        lines: Facts that this rank holds, one a line.
        rank: Rank of this process, one of `ranks`.
        ranks: Ranks that take part, the same on every rank.
        timeout_s: Seconds to wait for the others.

    Returns:
        A name for what was agreed on: the same on all ranks, and new with each call.

    Raises:
        DivergenceError: On every rank, naming a rank that differs and the first line that does.
        PeerTimeoutError: Ranks did not arrive; names them. Every rank that was there gets it; one
            that comes later waits for the others to call again.
        FencedError: The job has gone on to a later generation.
    """
    control = Control(store, ranks, rank, timeout_s=timeout_s)
    return control.agree_on_lines(topic, lines)


def fail_together(
    store: dist.Store | None,
    topic: str,
    error: Exception | None,
    rank: int,
    ranks: Sequence[int],
    *,
    timeout_s: float,
) -> None:
    """Raise on every rank if any rank has an error, and return on every rank if none has.

    Collective: each rank calls it with what its own check found. A rank with an error raises
    that; the others raise a `PeerError` that repeats the first one.

    Args:
        store: Store that all ranks share; None when alone.
        topic: Subject of the check; part of the keys and of errors.
        error: Error that this rank found, or None.
        rank: Rank of this process, one of `ranks`.
        ranks: Ranks that take part, the same on every rank.
        timeout_s: Seconds to wait for the others.

    Raises:
        Exception: This rank's own `error`.
        PeerError: Another rank's.
        PeerTimeoutError: Ranks did not arrive; names them.
        FencedError: The job has gone on to a later generation.
    """
    Control(store, ranks, rank, timeout_s=timeout_s).fail_together(topic, error)
