"""Metrics in Prometheus' format, with the meanings that vLLM's metrics of these names have."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pcomm.inference import Request, RequestOutput
from pcomm.inference.engine import EngineStats, PoolUse

__all__ = ["Metrics", "ServerState"]

_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)
_BETWEEN_TOKENS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6)
_REQUEST_S = (0.01, 0.05, 0.1, 0.3, 0.5, 1, 2, 5, 10, 20, 40, 60, 120, 300, 600)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)


@dataclass(frozen=True)
class ServerState:
    """What a server does with requests that come now.

    Attributes:
        is_ready: Whether the server takes requests.
        is_draining: Whether the server only finishes the requests under way.
        under_way: Number of those that it has.
        restarts: How often its ranks were started again.
    """

    is_ready: bool
    is_draining: bool
    under_way: int
    restarts: int


@dataclass
class _Times:
    """Seconds of the clock, and tokens, of one request under way."""

    began: float
    prompt: int
    last: float | None = None
    written: int = 0


class Metrics:
    """Counts what the step loop tells it; a registry of its own, so that servers do not mix.

    Args:
        model: Value of the label `model_name`.
        state: What the server does now.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        model: str,
        state: Callable[[], ServerState],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock, self._registry = clock, CollectorRegistry()
        self._times: dict[str, _Times] = {}
        self._model = model
        self._gauges = _EngineMetrics(model, state)
        self._registry.register(self._gauges)
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts that were read.")
        self._generation = self._counter("generation_tokens", "Tokens that were written.")
        self._finished = Counter(
            "pcomm:request_success",
            "Requests that have ended, by their reason.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        for reason in ("stop", "length", "abort", "error"):
            self._finished.labels(model, reason)
        self._refused = Counter(
            "pcomm:requests_refused",
            "Requests that were answered with 503, by the reason.",
            ["model_name", "reason"],
            registry=self._registry,
        )
        for reason in ("draining", "failed"):
            self._refused.labels(model, reason)
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "Time from a request to its first token.", _FIRST_TOKEN_S
        )
        self._between = self._histogram(
            "inter_token_latency_seconds", "Time between two tokens.", _BETWEEN_TOKENS_S
        )
        self._whole = self._histogram(
            "e2e_request_latency_seconds", "Time from a request to its end.", _REQUEST_S
        )
        self._prompts = self._histogram(
            "request_prompt_tokens", "Tokens of the prompt of a request.", _TOKENS
        )
        self._texts = self._histogram(
            "request_generation_tokens", "Tokens that a request has got.", _TOKENS
        )

    def added(self, request: Request) -> None:
        """See `StepObserver`."""
        self._times[request.request_id] = _Times(self._clock(), len(request.prompt))

    def stepped(self, outputs: Sequence[RequestOutput]) -> None:
        """See `StepObserver`."""
        now = self._clock()
        for output in outputs:
            times = self._times.get(output.request_id)
            if times is None:
                continue
            if count := len(output.token_ids):
                if times.last is None:
                    self._first_token.observe(now - times.began)
                    self._prompt_tokens.inc(times.prompt)
                else:
                    self._between.observe((now - times.last) / count)
                times.last = now
                times.written += count
                self._generation.inc(count)
            if output.finish_reason:
                self._end(output.request_id, output.finish_reason, now)

    def aborted(self, request_id: str) -> None:
        """See `StepObserver`."""
        self._end(request_id, "abort", self._clock())

    def refused(self, *, is_draining: bool) -> None:
        """A request was not taken, since the server is being stopped, or its model has failed."""
        self._refused.labels(self._model, "draining" if is_draining else "failed").inc()

    def text(self, stats: EngineStats | None) -> bytes:
        """All metrics in Prometheus' text format.

        Args:
            stats: State of the engine; None for the newest that is known.
        """
        if stats is not None:
            self._gauges.stats = stats
        return generate_latest(self._registry)

    def forget_engine(self) -> None:
        """Leave out the metrics of the engine, which has failed, until there is a new state."""
        self._gauges.stats = None

    def _end(self, request_id: str, reason: str, now: float) -> None:
        times = self._times.pop(request_id, None)
        if times is None:
            return
        self._finished.labels(self._model, reason).inc()
        self._whole.observe(now - times.began)
        self._prompts.observe(times.prompt)
        self._texts.observe(times.written)

    def _counter(self, name: str, text: str) -> Counter:
        found = Counter(f"pcomm:{name}", text, ["model_name"], registry=self._registry)
        return found.labels(self._model)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        found = Histogram(
            f"pcomm:{name}", text, ["model_name"], registry=self._registry, buckets=buckets
        )
        return found.labels(self._model)


class _EngineMetrics(Collector):
    """What the engine counts itself, and the state of the server, read when it is asked for."""

    def __init__(self, model: str, state: Callable[[], ServerState]) -> None:
        self._model, self._state = model, state
        self.stats: EngineStats | None = None

    def collect(self) -> Iterator[Metric]:
        """All gauges and counters of the newest state."""
        state, stats = self._state(), self.stats
        gauges: dict[str, tuple[str, float]] = {
            "ready": ("1 while requests are taken.", state.is_ready),
            "draining": ("1 while the server is being stopped.", state.is_draining),
            "requests_under_way": ("HTTP requests that have no answer yet.", state.under_way),
        }
        counters: dict[str, tuple[str, float]] = {
            "rank_restarts": ("Times that the ranks were started again.", state.restarts),
        }
        yield from self._metrics(GaugeMetricFamily, gauges)
        yield from self._metrics(CounterMetricFamily, counters)
        if stats is None:
            return
        gauges = {
            "num_requests_running": ("Requests that have memory.", stats.running),
            "num_requests_waiting": ("Requests in the queue.", stats.waiting),
            "kv_cache_usage_perc": ("Used share of the KV blocks; 1 is all.", _used(stats.blocks)),
            "state_slot_usage_perc": (
                "Used share of the state slots; 1 is all.",
                _used(stats.state_slots),
            ),
        }
        if (decode := stats.decode) is not None:
            gauges |= {
                "decode_step_seconds": ("Median time of a step of decoding.", decode.step_ms / 1e3),
                "decode_floor_seconds": (
                    "Time that the memory needs for the bytes of such a step.",
                    decode.floor_ms / 1e3,
                ),
                "decode_floor_ratio": ("That time by the median; 1 is the limit.", decode.ratio),
                "decode_step_bytes": ("Bytes of such a step.", decode.moved.total),
                "memory_bandwidth_bytes_per_second": (
                    "Bandwidth that was measured when the server started.",
                    decode.bandwidth.largest,
                ),
            }
        yield from self._metrics(GaugeMetricFamily, gauges)
        phases = GaugeMetricFamily(
            "pcomm:host_phase_seconds",
            "Median time of the host in a phase of a step.",
            labels=["model_name", "phase"],
        )
        for phase, us in stats.host_us.items():
            phases.add_metric([self._model, phase], us / 1e6)
        yield phases
        counters = {
            "prefix_cache_queries": ("Prompt tokens looked up.", stats.looked_up_tokens),
            "prefix_cache_hits": ("Prompt tokens that were cached.", stats.cached_tokens),
            "num_preemptions": ("Requests that lost their memory.", stats.preemptions),
            "engine_steps": ("Steps that ran the model.", stats.steps),
        }
        yield from self._metrics(CounterMetricFamily, counters)

    def _metrics(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        values: Mapping[str, tuple[str, float]],
    ) -> Iterator[Metric]:
        for name, (text, value) in values.items():
            metric = kind(f"pcomm:{name}", text, labels=["model_name"])
            metric.add_metric([self._model], value)
            yield metric


def _used(pool: PoolUse) -> float:
    return pool.used / pool.size if pool.size else 0.0
