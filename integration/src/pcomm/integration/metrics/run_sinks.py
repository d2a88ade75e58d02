"""The sinks that a training run writes to."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

from pcomm.integration.metrics.json_lines import JsonLinesSink
from pcomm.integration.metrics.progress import ProgressSink
from pcomm.integration.metrics.sink import Sink, SinkGroup
from pcomm.integration.metrics.tensorboard import open_tensorboard

__all__ = ["open_sinks"]


def open_sinks(
    run_dir: Path,
    *,
    rank: int,
    total_steps: int,
    stream: TextIO,
    keep_through: int | None = None,
) -> SinkGroup:
    """All sinks of a run on rank 0: file, progress line, TensorBoard if installed. Else none.

    Args:
        run_dir: Folder of `metrics.jsonl` and `tensorboard/`. Must exist on rank 0.
        rank: This process's rank in the world.
        total_steps: The step that ends the run.
        stream: Stream of the progress line.
        keep_through: The step that a resumed run goes on from; None for a new run.

    Raises:
        ConfigError: The metrics of the run to resume are damaged.
    """
    if rank:
        return SinkGroup()
    sinks: list[Sink] = [
        JsonLinesSink(run_dir / "metrics.jsonl", keep_through=keep_through),
        ProgressSink(stream, total_steps=total_steps, first_step=keep_through or 0),
    ]
    tensorboard = open_tensorboard(run_dir / "tensorboard", keep_through=keep_through)
    return SinkGroup([*sinks, tensorboard] if tensorboard else sinks)
