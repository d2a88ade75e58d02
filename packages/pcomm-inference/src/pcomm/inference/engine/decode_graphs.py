"""Steps of decoding that were recorded once and are replayed: CUDA graphs by padded size."""

# Shape suffixes: V token ids.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from pcomm.core import Group
from pcomm.core.control.agreement import agree_in_group, vote
from pcomm.inference.upload import upload

__all__ = ["CudaRecorder", "DecodeGraphs", "GraphRecorder", "RecordedStep", "recorder_for"]


class GraphRecorder(Protocol):
    """Records what a function does on a device."""

    def warm_up(self, body: Callable[[], Tensor]) -> None:
        """Run a function as `record` will, so that it need not allocate or compile any more."""
        ...

    def record(self, body: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """Place of the result of a function, and a function that computes it there."""
        ...


class CudaRecorder:
    """Records CUDA graphs that share one pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, body: Callable[[], Tensor]) -> None:
        """Run it on a stream of its own."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            body()
        torch.cuda.current_stream().wait_stream(stream)

    def record(self, body: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """Capture it."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = body()
        return result, graph.replay


def recorder_for(device: torch.device) -> GraphRecorder | None:
    """What records steps on a device; None for one on which they always run eagerly."""
    return CudaRecorder() if device.type == "cuda" else None


@dataclass(frozen=True)
class RecordedStep:
    """A step of decoding that is replayed; made by `DecodeGraphs`.

    Attributes:
        size: Number of its requests.
    """

    size: int
    _packed: Tensor
    _logits: Tensor
    _replay: Callable[[], None]

    def run(self, packed: Tensor) -> Tensor:
        """Logits of each request, `[size, V]`, valid until the next step.

        Args:
            packed: Integers of the step on the device, as many as when it was recorded.
        """
        self._packed.copy_(packed)
        self._replay()
        return self._logits


class DecodeGraphs:
    """Recorded steps for 1, 2, 4, 8, ... requests, recorded at once or when each is needed first.

    All that changes between two steps are integers. They are copied on the device into one static
    tensor; the block tables are looked up there, within the graph.

    Args:
        step: Logits of a step of so many requests, whose integers lie on the device.
        padding: Integers of a step of so many requests which are all padding, on the host.
        recorder: Records a step.
        max_requests: Largest number of requests.
        device: Device of the model.
        group: Ranks that share the model and make the same steps; None for one rank.
    """

    def __init__(
        self,
        step: Callable[[Tensor, int], Tensor],
        padding: Callable[[int], Tensor],
        recorder: GraphRecorder,
        *,
        max_requests: int,
        device: torch.device,
        group: Group | None = None,
    ) -> None:
        self._step = step
        self._padding = padding
        self._recorder = recorder
        self._max_requests = max_requests
        self._device = device
        self._group = Group("tp", (0,), None) if group is None else group
        self._recorded: dict[int, RecordedStep] = {}
        self.refusal = ""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of requests of the steps that are recorded."""
        return tuple(sorted(self._recorded))

    def record_all(self) -> None:
        """Record the steps of all sizes, from the largest, whose memory the others take again.

        It ends at one that cannot be recorded.

        Raises:
            Exception: The error of `of`.
        """
        num_requests = self._max_requests
        while num_requests and self.of(num_requests) is not None:
            # The largest power of two below.
            num_requests = (1 << (num_requests - 1).bit_length()) >> 1

    def of(self, num_requests: int) -> RecordedStep | None:
        """The step that so many requests are padded to; None to run eagerly.

        Once a step could not be recorded, on any of the ranks that share the model, no other is,
        on all of them; `refusal` says why. Those that were recorded before serve their sizes on.

        Raises:
            Exception: The error of the warm-up, where ranks share the model: as in any step, they
                may have come to different collectives.
            PeerError: The warm-up of another rank has failed.
        """
        size = min(1 << (num_requests - 1).bit_length(), self._max_requests)
        found = self._recorded.get(size)
        if found is not None or self.refusal:
            return found
        try:
            found = self._recorded[size] = self._record(size)
        except Exception as error:
            self.refusal = str(error)
            if isinstance(error, _RefusedError):
                return None
            raise
        return found

    def _record(self, size: int) -> RecordedStep:
        # All requests of the recording are padding: it writes where no request reads.
        (packed,) = upload([self._padding(size)], self._device)
        body = partial(self._step, packed, size)

        def record() -> RecordedStep:
            return RecordedStep(size, packed, *self._recorder.record(body))

        error = _error_of(lambda: self._recorder.warm_up(body))
        if self._group.size == 1:
            if error is not None:
                raise _RefusedError(_text(error))
        else:
            agree_in_group(self._group, "inference: warm-up of a step", (), error=error)
        # Not known to all ranks before each has tried. Until then nothing of it has run.
        with self._group.collectives.recording():
            made: list[RecordedStep] = []
            error = _error_of(lambda: made.append(record()))
            told = "" if error is None else _text(error)
            found = vote(self._group, "inference: recording of a step", len(made), told)
            if not found.minimum:
                place = found.values.index(0)
                where = f"rank {self._group.ranks[place]}: " if self._group.size > 1 else ""
                raise _RefusedError(where + found.reasons[place])
        return made[0]


class _RefusedError(Exception):
    """A step cannot be recorded, and has not run."""


def _error_of(attempt: Callable[[], object]) -> Exception | None:
    try:
        attempt()
    except Exception as error:
        return error
    return None


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
