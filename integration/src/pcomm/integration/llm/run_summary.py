"""What a command says of its speed when it has written its text."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass

from pcomm.core.errors import PcommError
from pcomm.inference.engine import EngineStats
from pcomm.integration.llm.llm import LLM

__all__ = ["RunSummary", "print_summary"]


@dataclass(frozen=True)
class RunSummary:
    """The tokens of a run, the time for them, and how near it was to the limit of the memory.

    Args:
        num_tokens: Number of tokens that were written.
        seconds: Seconds that this took, prompts included; None where a text is one of many.
        stats: State of the engine that wrote them, afterwards.
    """

    num_tokens: int
    seconds: float | None
    stats: EngineStats

    def __str__(self) -> str:
        took = "" if self.seconds is None else f" in {self.seconds:.2f} s"
        parts = [f"{self.num_tokens} tokens{took}"]
        if self.stats.decode is not None:
            parts.append(str(self.stats.decode))
        if host := self.stats.host_us:
            parts.append("host: " + ", ".join(f"{name} {us:.0f} us" for name, us in host.items()))
        return "; ".join(parts)

    def fields(self) -> dict[str, object]:
        """The same for JSON: `seconds`, `decode` (null before a step of it) and `host_us`."""
        decode = self.stats.decode
        return {
            "seconds": self.seconds,
            "decode": None
            if decode is None
            else {
                **asdict(decode),
                "moved": {**asdict(decode.moved), "total": decode.moved.total},
                "floor_ms": decode.floor_ms,
                "ratio": decode.ratio,
            },
            "host_us": dict(self.stats.host_us),
        }


def print_summary(llm: LLM) -> None:
    """Write the line of all texts of `llm` to stderr. Local.

    Nothing is written without a text, or where the engine has failed and cannot be asked.

    Args:
        llm: A model that is not closed.
    """
    try:
        stats = llm.stats()
    except PcommError:
        return
    if stats.written_tokens:
        print(RunSummary(stats.written_tokens, None, stats), file=sys.stderr)
