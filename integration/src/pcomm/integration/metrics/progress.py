"""The progress line: where the run is, how well it does, and when it will be done."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TextIO

from pcomm.integration.metrics.sink import Row

__all__ = ["ProgressSink", "duration"]


class ProgressSink:
    """Shows the newest training row: on a terminal in one line that is rewritten, else in lines.

    Args:
        stream: Stream to write to, for example `sys.stderr`.
        total_steps: The step that ends the run.
        first_step: Steps that were done before this process began.
        every_s: Seconds between lines where the stream is no terminal.
        clock: A monotonic clock in seconds.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        total_steps: int,
        first_step: int = 0,
        every_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._total_steps = total_steps
        self._first_step = first_step
        self._every_s = every_s
        self._clock = clock
        self._start = clock()
        self._last_line = -math.inf
        self._bits_per_byte: float | None = None
        self._shown = ""

    def write(self, row: Row) -> None:
        """Show a training row; remember the bits per byte of an evaluation row."""
        if "bits_per_byte" in row:
            self._bits_per_byte = row["bits_per_byte"]
        if "loss" not in row:
            return
        now = self._clock()
        line = self._line(row, now)
        if self._is_terminal:
            # Blanks cover what is left of a longer line before.
            self._stream.write("\r" + line.ljust(len(self._shown)))
            self._stream.flush()
        elif row["step"] == self._total_steps or now - self._last_line >= self._every_s:
            self._stream.write(line + "\n")
            self._stream.flush()
            self._last_line = now
        self._shown = line

    def close(self) -> None:
        """End the line, so that what follows begins on its own."""
        if self._is_terminal and self._shown:
            self._stream.write("\n")
            self._stream.flush()

    def _line(self, row: Row, now: float) -> str:
        step = int(row["step"])
        done = step - self._first_step
        parts = [
            f"step {step:>{len(str(self._total_steps))}}/{self._total_steps}",
            f"loss {row['loss']:.3f}",
        ]
        if self._bits_per_byte is not None:
            parts.append(f"held-out {self._bits_per_byte:.3f} bits/byte")
        if "tokens_per_s" in row:
            parts.append(f"{row['tokens_per_s']:,.0f} tokens/s")
        if done > 0:
            # The mean since the start, so evaluations and checkpoints to come are counted in.
            left = (now - self._start) / done * (self._total_steps - step)
            parts.append(f"ETA {duration(left)}")
        if "memory_mib" in row:
            parts.append(f"{row['memory_mib']:,.0f} MiB in use")
        return "  ".join(parts)


def duration(seconds: float) -> str:
    """Seconds as `m:ss`, or `h:mm:ss` from an hour on."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
