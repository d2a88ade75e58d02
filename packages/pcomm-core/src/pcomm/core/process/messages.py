"""Messages that a session sends to its ranks, and what each rank answers."""

from __future__ import annotations

import contextlib
import pickle
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["Answer", "End", "Messages", "portable_error"]


@dataclass(frozen=True)
class End:
    """The last message of a session."""


@dataclass(frozen=True)
class Answer:
    """What one rank says to one message.

    Attributes:
        value: Result of the rank.
        error: An exception that came up meanwhile and that the rank has survived; None for none.
    """

    value: Any
    error: BaseException | None = None


class Messages:
    """The messages of a session on one rank; an iterator that ends with the session.

    Each message is answered before the next one is read.

    Args:
        caller: Connection to the process that has opened the session.
    """

    def __init__(self, caller: Connection) -> None:
        self._caller = caller
        self._is_over = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """The next message; waits for it without using the processor. Local."""
        message: Any = End()
        if not self._is_over:
            with contextlib.suppress(EOFError, ConnectionResetError):
                message = self._caller.recv()
        self._is_over = isinstance(message, End)
        if self._is_over:
            raise StopIteration
        return message

    def answer(self, value: object, error: BaseException | None = None) -> None:
        """Answer the last message, or the start of the session. Local.

        Args:
            value: Anything that pickles.
            error: An exception that this rank has survived. Ranks that have met the same one answer
                soon; those that do not are taken to wait for this one, and the session ends.
        """
        answer = Answer(value, None if error is None else portable_error(error))
        # By value: the connection's own pickling would hand tensors over as open files.
        self._caller.send_bytes(pickle.dumps(answer))


def portable_error(error: BaseException) -> BaseException:
    """The exception itself if another process can load it, else its words. Local."""
    with contextlib.suppress(Exception):
        pickle.loads(pickle.dumps(error))
        return error
    return RuntimeError(traceback.format_exception_only(error)[0].strip())
