"""The line that tells how far a training run is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TextIO

from pcomm.integration.metrics.rows import Row

__all__ = ["MovingMean", "ProgressSink", "duration"]

# Weight of what was before in the loss that is shown: a mean of about the last 20 steps.
_WEIGHT = 0.95


class MovingMean:
    """A mean in which older numbers count less, as TensorBoard smooths its curves.

    The mean after n numbers is `(1 - w) / (1 - w**n) * sum(w**(n - i) * x[i] for i in 1..n)`.

    Args:
        weight: w, in [0, 1): how much less a number counts than the next one; 0 keeps the last.
    """

    def __init__(self, weight: float) -> None:
        self._weight = weight
        self._sum = self._total = 0.0

    def add(self, value: float) -> float:
        """The mean with one number more; what is not finite comes back and does not count."""
        if not math.isfinite(value):
            return value
        self._sum = self._weight * self._sum + value
        self._total = self._weight * self._total + 1
        return self._sum / self._total


class ProgressSink:
    """Shows the newest training row: on a terminal in one line that is rewritten, else in lines.

    Its loss and tokens a second are means of the last steps.

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
        self._loss = MovingMean(_WEIGHT)
        self._shown = ""

    def write(self, row: Row) -> None:
        """Show a training row; remember the bits per byte of an evaluation row."""
        if "bits_per_byte" in row:
            self._bits_per_byte = row["bits_per_byte"]
        if "loss" not in row:
            return
        now = self._clock()
        unit = "bits/byte" if "train_bits_per_byte" in row else "nats/token"
        loss = self._loss.add(row.get("train_bits_per_byte", row["loss"]))
        line = self._line(row, f"loss {loss:.3f} {unit}", now)
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

    def _line(self, row: Row, loss: str, now: float) -> str:
        step = int(row["step"])
        done = step - self._first_step
        parts = [
            f"step {step:>{len(str(self._total_steps))}}/{self._total_steps}",
            loss,
        ]
        if self._bits_per_byte is not None:
            parts.append(f"held-out {self._bits_per_byte:.3f} bits/byte")
        if (speed := row.get("mean_tokens_per_s", row.get("tokens_per_s"))) is not None:
            parts.append(f"{speed:,.0f} tokens/s")
        if "mfu" in row:
            # A peak that was measured while others computed is too low, and so is a wrong one.
            parts.append(f"{row['mfu']:.1%} of peak" if row["mfu"] <= 1 else "above the peak")
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
