"""What makes the steps of an `LLM`: an engine of this process, or one on several ranks."""

from __future__ import annotations

from typing import Protocol

from pcomm.inference import Request, RequestOutput
from pcomm.inference.engine import EngineStats

__all__ = ["StepEngine"]


class StepEngine(Protocol):
    """The methods of `pcomm.inference.Engine`, with the same meaning and errors."""

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do, or to raise."""
        ...

    def add(self, request: Request) -> None:
        """Queue a request."""
        ...

    def step(self) -> list[RequestOutput]:
        """Compute the next tokens of the requests under way."""
        ...

    def abort(self, request_id: str) -> bool:
        """End a request; its memory is free after the call."""
        ...

    def stats(self) -> EngineStats:
        """Counters and the use of memory; on ranks those of the first one."""
        ...

    def close(self) -> None:
        """End all requests and free all memory."""
        ...
