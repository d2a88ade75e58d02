"""The error of a store that is gone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from pcomm.core.errors import PeerError
from pcomm.ntp.session.headline import headline

__all__ = ["StoreLostError", "lost", "told"]


class StoreLostError(PeerError):
    """The store of a session does not answer any more, so that its ranks cannot agree."""


def lost(error: Exception) -> StoreLostError:
    """The error for a store that `error` came from."""
    found = StoreLostError(
        "Session: the store",
        found=headline(error),
        why="Ranks agree through the store, and the process that hosts it has ended or cannot be "
        "reached. Without it no rank can know who goes on.",
        fix="Start the job again from its last checkpoint; keep the store in a process that "
        "outlives the ranks.",
    )
    found.__cause__ = error
    return found


@contextmanager
def told() -> Iterator[None]:
    """Raise errors of the store that occur in the block as `StoreLostError`."""
    try:
        yield
    except dist.DistError as error:
        raise lost(error) from error
