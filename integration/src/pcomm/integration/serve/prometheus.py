"""Metrics in Prometheus' format, with the meanings that vLLM's metrics of these names have."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pcomm.inference import Request, RequestOutput
from pcomm.inference.engine import EngineStats, PoolUse

__all__ = ["Metrics"]

_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)
_BETWEEN_TOKENS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6)
_REQUEST_S = (0.01, 0.05, 0.1, 0.3, 0.5, 1, 2, 5, 10, 20, 40, 60, 120, 300, 600)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)


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
        clock: Seconds that only grow.
    """

    def __init__(self, model: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._registry = clock, CollectorRegistry()
        self._times: dict[str, _Times] = {}
        self._model = model
        self._gauges = _EngineMetrics(model)
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

    def text(self, stats: EngineStats | None) -> bytes:
        """All metrics in Prometheus' text format.

        Args:
            stats: State of the engine; None for the newest that is known.
        """
        if stats is not None:
            self._gauges.stats = stats
        return generate_latest(self._registry)

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
    """What the engine counts itself, read when it is asked for."""

    def __init__(self, model: str) -> None:
        self._model = model
        self.stats: EngineStats | None = None

    def collect(self) -> Iterator[Metric]:
        """All gauges and counters of the newest state."""
        stats = self.stats
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
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(f"pcomm:{name}", text, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
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
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(f"pcomm:{name}", text, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter


def _used(pool: PoolUse) -> float:
    return pool.used / pool.size if pool.size else 0.0
