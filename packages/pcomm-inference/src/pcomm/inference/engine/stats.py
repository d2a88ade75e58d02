"""What the engine counts, and where the time of a step goes on the host."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

from pcomm.inference.roofline.decode_stats import DecodeStats

__all__ = ["EngineStats", "HostTimes", "PoolUse"]


class HostTimes:
    """Times of the phases of a step, one after the other; the last ones of each are kept.

    ```python
    times.begin()
    plan = scheduler.schedule()
    times.lap("schedule")
    logits = model.step(batch, memory)
    times.lap("model")
    ```

    Args:
        kept: Number of times of each phase that are kept.
        clock: Nanoseconds since any time.
    """

    def __init__(self, kept: int = 256, *, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._kept = kept
        self._clock = clock
        self._begun = self._last = 0
        self._phases: dict[str, deque[int]] = {}

    def begin(self) -> None:
        """Begin a step: the first phase is measured from here."""
        self._begun = self._last = self._clock()

    def lap(self, phase: str) -> None:
        """End a phase, which began with `begin` or where the one before it ended."""
        now = self._clock()
        if phase not in self._phases:
            self._phases[phase] = deque(maxlen=self._kept)
        self._phases[phase].append(now - self._last)
        self._last = now

    @property
    def step_ns(self) -> int:
        """Nanoseconds from the begin of the step to the end of its last phase so far."""
        return self._last - self._begun

    def medians_us(self) -> dict[str, float]:
        """Median of the kept times of each phase, in microseconds, in the order of first use."""
        return {phase: median(times) / 1e3 for phase, times in self._phases.items() if times}


@dataclass(frozen=True)
class PoolUse:
    """Places of one pool; free, used and cached ones together are all of it.

    Attributes:
        size: Number of blocks or slots.
        free: Number of those that hold nothing.
        used: Number of those that belong to requests.
        cached: Number of those that the prefix cache keeps and gives up when they are needed.
        bytes_each: Size of one in all layers, in bytes.
    """

    size: int
    free: int
    used: int
    cached: int
    bytes_each: int


@dataclass(frozen=True)
class EngineStats:
    """State of an engine between two steps; counters begin with the engine.

    Attributes:
        running: Number of requests that have memory.
        kept_tokens: Number of their tokens whose keys, values and states were computed; with
            windows, blocks of the first ones may have been given back.
        waiting: Number of requests in the queue.
        blocks: KV blocks.
        state_slots: State slots.
        steps: Number of steps that ran the model.
        computed_tokens: Number of tokens that steps computed, drafts included.
        written_tokens: Number of tokens that requests got.
        preemptions: Number of times a request lost its memory to another one.
        looked_up_tokens: Number of tokens in prompts of requests that began.
        cached_tokens: Number of those that the prefix cache had.
        drafted_tokens: Number of tokens that were guessed.
        accepted_tokens: Number of guesses that were right.
        graph_sizes: Numbers of requests of the decode steps that are replayed from graphs.
        graph_refusal: The reason why no decode steps of other sizes are recorded; empty where they
            are, and on devices without graphs.
        host_us: Median microseconds of the host in each phase of the last steps, by its name:
            `schedule`, `batch`, `model`, `sample`, `outputs`; the last one is text, what ends and
            what is kept. On a GPU `model` is the time to launch it, and `sample` waits for it.
        decode: Time and bytes of steps of decoding; None before the first.
    """

    running: int
    kept_tokens: int
    waiting: int
    blocks: PoolUse
    state_slots: PoolUse
    steps: int
    computed_tokens: int
    written_tokens: int
    preemptions: int
    looked_up_tokens: int
    cached_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    graph_sizes: tuple[int, ...]
    graph_refusal: str
    host_us: Mapping[str, float]
    decode: DecodeStats | None

    def __str__(self) -> str:
        lines = [f"requests: {self.running} run, {self.waiting} wait"]
        for name, pool in (("KV blocks", self.blocks), ("state slots", self.state_slots)):
            if pool.size:
                use = f"{pool.free} free, {pool.used} used, {pool.cached} cached"
                lines.append(f"{name}: {use} of {pool.size}, {pool.bytes_each} bytes each")
        lines.append(
            f"steps: {self.steps}, tokens computed {self.computed_tokens}, "
            f"written {self.written_tokens}, requests preempted {self.preemptions}"
        )
        if self.cached_tokens:
            lines.append(f"prefix cache: {self.cached_tokens} of {self.looked_up_tokens} tokens")
        if self.drafted_tokens:
            lines.append(f"drafts: {self.accepted_tokens} right of {self.drafted_tokens}")
        if self.graph_sizes or self.graph_refusal:
            lines.append(f"graphs: {self.graph_sizes or 'none'} {self.graph_refusal}".rstrip())
        if self.decode is not None:
            lines.append(str(self.decode))
        times = ", ".join(f"{phase} {time:.0f}" for phase, time in self.host_us.items())
        return "\n".join([*lines, f"host time of a step, us: {times or 'no step yet'}"])
