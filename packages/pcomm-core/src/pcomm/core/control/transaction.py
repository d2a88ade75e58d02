"""One step of a transaction of several ranks: done on all of them, or undone on all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar, cast

__all__ = ["all_or_none"]

T = TypeVar("T")
R = TypeVar("R")


def all_or_none(
    do: Callable[[], T],
    agree: Callable[[T | None, Exception | None], R],
    undo: Callable[[Exception | None], Iterable[Exception]],
) -> tuple[T, R]:
    """Do something on every rank, or undo it on every rank. Collective, as `agree` is.

    A step that fails on one rank fails on all: the ranks agree after it, and where that raises,
    also because a rank did not arrive, each rank undoes its own part before the error leaves.
    Several steps are several calls; each one undoes what those before it have done, too.

    Args:
        do: Part of this rank; local, or collective where its failure cannot leave others waiting.
        agree: Agreement of the ranks, called with what `do` returned and with its error; raises on
            every rank if any rank has an error. One of the two arguments is None.
        undo: Undoes the part of this rank, called with the error of `do` or None; it may be half
            done. Returns errors, which become notes of the one that is raised.

    Returns:
        What `do` returned, and what `agree` returned.
    """
    result: T | None = None
    failure: Exception | None = None
    try:
        try:
            result = do()
        except Exception as problem:
            failure = problem
        return cast(T, result), agree(result, failure)
    except BaseException as problem:
        for error in undo(failure):
            problem.add_note(str(error))
        raise
    finally:
        # The error refers to this frame; without this only a collection of cycles frees both.
        failure = None
