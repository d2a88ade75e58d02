"""Logging of pcomm: everything goes to the logger `pcomm`, and only a command attaches a handler.

Modules log with `logging.getLogger(__name__)`, whose names all start with `pcomm.`. A program
that uses pcomm as a library decides about handlers and levels itself; nothing here runs at
import, and the root logger is never touched.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

__all__ = ["RankFilter", "configure"]

_FORMAT = "%(levelname)s rank %(rank)d %(name)s: %(message)s"


class RankFilter(logging.Filter):
    """Adds `rank` to each record, and below WARNING lets only rank 0 speak.

    Args:
        rank: This process, from 0.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether `record` is written."""
        record.rank = self.rank
        return self.rank == 0 or record.levelno >= logging.WARNING


class _CommandHandler(logging.Handler):
    """A type of its own, so that a second `configure` finds what the first one attached."""

    def __init__(self, stream: TextIO | None) -> None:
        super().__init__()
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        try:
            # stderr is looked up for each message: a later redirection takes effect.
            print(self.format(record), file=self._stream or sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


def configure(level: str = "info", rank: int = 0, *, stream: TextIO | None = None) -> None:
    """Write the messages of pcomm to `stream`; for the process that owns its output, a command.

    Calling it again replaces what the earlier call set, so no message is written twice.

    Args:
        level: `"debug"`, `"info"`, `"warning"` or `"error"`; see `PCOMM_LOG`.
        rank: This process, from 0; below WARNING only rank 0 writes.
        stream: Stream to write to; stderr if absent.
    """
    logger = logging.getLogger("pcomm")
    for handler in list(logger.handlers):
        if isinstance(handler, _CommandHandler):
            logger.removeHandler(handler)
    ours = _CommandHandler(stream)
    ours.setFormatter(logging.Formatter(_FORMAT))
    # On the handler: a filter on the logger would not see what its children log.
    ours.addFilter(RankFilter(rank))
    logger.addHandler(ours)
    logger.setLevel(level.upper())
