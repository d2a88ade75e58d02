"""A sink takes the rows of a run: to a file, a terminal, TensorBoard, or several at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Protocol

from pcomm.core import PcommError

__all__ = ["Row", "Sink", "SinkGroup"]

Row = Mapping[str, int | float]
"""The numbers of one step. Each row has `step`.

A training row also has `loss` (mean nats per token), `tokens_per_s`, `step_ms`, `lr`, `grad_norm`
and `memory_mib` (allocated between two steps); an evaluation row has `bits_per_byte`.
"""


class Sink(Protocol):
    """Where rows go. Only the first rank of a run writes any."""

    def write(self, row: Row) -> None:
        """Take one row; the steps of a run never fall."""

    def close(self) -> None:
        """Finish; no row comes after it."""


class SinkGroup:
    """Several sinks as one. Without any it takes rows and keeps none, as on all other ranks."""

    def __init__(self, sinks: Sequence[Sink] = ()) -> None:
        self._sinks = tuple(sinks)
        self.error: PcommError | None = None
        """The first failure of a sink: all ranks stop together, and save, before it is raised."""

    def write(self, row: Row) -> None:
        """Give the row to each sink in order, until one of them has failed."""
        if self.error is None:
            try:
                for sink in self._sinks:
                    sink.write(row)
            except PcommError as error:
                self.error = error

    def close(self) -> None:
        """Close every sink, also after one of them fails; then raise that failure."""
        with ExitStack() as stack:
            for sink in self._sinks:
                stack.callback(sink.close)
