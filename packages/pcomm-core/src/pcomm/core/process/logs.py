"""Logging of pcomm: everything goes to the logger `pcomm`, and only a command attaches handlers.

Modules log with `logging.getLogger(__name__)`, whose names all start with `pcomm.`. A program
that uses pcomm as a library decides about handlers and levels itself; nothing here runs at
import, and the root logger is never touched.
"""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TextIO, cast

from pcomm.core.errors import PcommError, PeerError

__all__ = ["LogOutput", "RankFilter", "configure", "progress_stream", "tell_error"]


@dataclass(frozen=True)
class LogOutput:
    """In which form messages are written, and where to beside stderr.

    Args:
        is_json: True for an object a line: `time`, `level`, `rank`, `logger`, `message`.
        file: File to which messages are appended, once its folder exists; rank 3 has one of its
            own, with `.rank3` before the suffix. None for no file.
    """

    is_json: bool = False
    file: Path | None = None


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


class _TextFormatter(logging.Formatter):
    """A line with its time, which is local and has its offset from UTC."""

    def __init__(self, *, names_rank: bool) -> None:
        place = " rank %(rank)d" if names_rank else ""
        super().__init__(f"%(asctime)s %(levelname)s{place} %(name)s: %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return _iso(record, "seconds")


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, object] = {
            "time": _iso(record, "milliseconds"),
            "level": record.levelname.lower(),
            "rank": getattr(record, "rank", 0),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said, ensure_ascii=False)


def _iso(record: logging.LogRecord, precision: str) -> str:
    return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec=precision)


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


class _FileHandler(_CommandHandler):
    """Appends to a file; lines that come before its folder exists wait for it."""

    def __init__(self, path: Path) -> None:
        super().__init__(None)
        self._path, self._waiting = path, list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._waiting.append(self.format(record) + "\n")
            if self._path.parent.is_dir():
                text, self._waiting = "".join(self._waiting), []
                # Opened each time: one write, at the end of what other processes have written.
                with self._path.open("ab", buffering=0) as file:
                    file.write(text.encode(errors="replace"))
        except Exception:
            self.handleError(record)


def configure(
    level: str = "info",
    rank: int = 0,
    *,
    size: int = 1,
    stream: TextIO | None = None,
    output: LogOutput | None = None,
) -> None:
    """Write the messages of pcomm to `stream`; for the process that owns its output, a command.

    Calling it again replaces what the earlier call set, so no message is written twice.

    Args:
        level: `"debug"`, `"info"`, `"warning"` or `"error"`; see `PCOMM_LOG`.
        rank: This process, from 0; below WARNING only rank 0 writes.
        size: Number of processes; a line names the rank where there are several.
        stream: Stream to write to; stderr if absent.
        output: Form of the messages, and a file; None for text on the stream alone.
    """
    output = output or LogOutput()
    logger = logging.getLogger("pcomm")
    for handler in _own_handlers():
        logger.removeHandler(handler)
    handlers = [_CommandHandler(stream)]
    if (path := output.file) is not None:
        handlers.append(
            _FileHandler(path.with_name(f"{path.stem}.rank{rank}{path.suffix}") if rank else path)
        )
    for ours in handlers:
        is_named = size > 1 or rank > 0
        ours.setFormatter(
            _JsonFormatter() if output.is_json else _TextFormatter(names_rank=is_named)
        )
        # On the handler: a filter on the logger would not see what its children log.
        ours.addFilter(RankFilter(rank))
        logger.addHandler(ours)
    logger.setLevel(level.upper())


def _own_handlers() -> list[_CommandHandler]:
    handlers = logging.getLogger("pcomm").handlers
    return [handler for handler in handlers if isinstance(handler, _CommandHandler)]


def progress_stream(output: LogOutput | None = None) -> TextIO:
    """Where a command writes its progress: a terminal, else the log, whose lines have times."""
    if sys.stderr.isatty() and not (output or LogOutput()).is_json:
        return sys.stderr
    return cast(TextIO, _LoggedLines())


class _LoggedLines(io.TextIOBase):
    """A stream whose lines are messages."""

    def write(self, text: str) -> int:
        for line in text.splitlines():
            logging.getLogger("pcomm.progress").info("%s", line)
        return len(text)


def tell_error(error: PcommError) -> None:
    """Say why a command ends: on stderr, in its log file, and to torchrun, which says it last.

    Torchrun prints the errors of its processes when all have ended, below a traceback of its own;
    it is told in place of stderr, so that the text is there once. Of a process that it starts again
    it prints none, so stderr is told. It takes the earliest error for the cause: what another rank
    has met is dated a minute later, since a rank that fails may be the last one to say so.
    """
    text = f"{type(error).__name__}: {error}"
    record = logging.LogRecord("pcomm", logging.ERROR, "", 0, "%s", (text,), None)
    is_told = _tell_launcher(text, is_consequence=isinstance(error, PeerError))
    for handler in _own_handlers():
        is_json = isinstance(handler.formatter, _JsonFormatter)
        if isinstance(handler, _FileHandler) or is_json:
            handler.handle(record)
            is_told = is_told or (is_json and not isinstance(handler, _FileHandler))
    if not is_told:
        print(text, file=sys.stderr)


def _is_started_again() -> bool:
    """Whether torchrun starts this process again, and forgets with what error it has ended."""
    starts = [
        os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS")
    ]
    return all(map(str.isdecimal, starts)) and int(starts[0]) < int(starts[1])


# Torchrun counts whole seconds, and a process under load takes several to end.
_LATER_S = 60


def _tell_launcher(text: str, *, is_consequence: bool) -> bool:
    """Leave an error where torchrun looks for it; False where nobody does."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or _is_started_again():
        return False
    told_at = int(time.time()) + (_LATER_S if is_consequence else 0)
    # What another rank has met is told there in whole.
    shown = text.partition("\n")[0] if is_consequence else text
    said = {"message": {"message": shown, "extraInfo": {"timestamp": str(told_at)}}}
    with suppress(OSError):
        Path(path).write_text(json.dumps(said), encoding="utf-8")
        return True
    return False
