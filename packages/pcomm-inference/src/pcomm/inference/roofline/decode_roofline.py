"""Counts what steps of decoding had to move, and how long they took."""

from __future__ import annotations

from collections import deque
from statistics import median, median_low
from typing import NamedTuple

import torch

from pcomm.inference.model import Model
from pcomm.inference.roofline.bandwidth_meter import BandwidthMeter
from pcomm.inference.roofline.decode_stats import DecodeStats
from pcomm.inference.roofline.step_bytes import KeptBytes, step_bytes
from pcomm.inference.roofline.step_weights import StepWeights, step_weights_of

__all__ = ["DecodeCounts", "DecodeRoofline"]


class DecodeCounts(NamedTuple):
    """The integers that decide how many bytes a step of decoding moves.

    Attributes:
        num_requests: Number of requests.
        num_tokens: Number of tokens that are computed, drafts included; each has logits.
        kept_tokens: Number of tokens of all requests that were in memory before the step.
    """

    num_requests: int
    num_tokens: int
    kept_tokens: int


class DecodeRoofline:
    """Steps of one engine. A step costs it one append; all else is computed when it is asked for.

    Args:
        model: The model.
        vocabulary: Number of token ids, the width of the logits.
        device: Device of the model.
        meter: Measures the memory of the device.
        kept: Number of steps that are kept.
    """

    def __init__(
        self,
        model: Model,
        *,
        vocabulary: int,
        device: torch.device,
        meter: BandwidthMeter,
        kept: int = 256,
    ) -> None:
        self._model = model
        self._vocabulary = vocabulary
        self._device = device
        self._meter = meter
        self._num_steps = self._all_ns = 0
        self._last: deque[tuple[DecodeCounts, int]] = deque(maxlen=kept)
        self._known: tuple[StepWeights, KeptBytes] | None = None

    def note(self, counts: DecodeCounts, step_ns: int) -> None:
        """Count a step that has succeeded.

        Args:
            counts: Requests and tokens of the step.
            step_ns: Nanoseconds that it took.
        """
        self._num_steps += 1
        self._all_ns += step_ns
        self._last.append((counts, step_ns))

    def stats(self, logits_dtype: torch.dtype) -> DecodeStats | None:
        """What is known of the steps; None before the first. Local.

        The first call asks for the bandwidth of the device, so that it may be measured.

        Args:
            logits_dtype: Dtype of the logits of the model.
        """
        if self._known is None:
            specs = self._model.memory_specs()
            self._known = step_weights_of(self._model), KeptBytes.of(specs)
        weights, kept = self._known
        bandwidth = self._meter.bandwidth(self._device, weights.largest)
        last = list(self._last)
        if not last:
            return None
        moved = [
            step_bytes(
                kept,
                weights=weights.most_read(counts.num_tokens),
                num_requests=counts.num_requests,
                kept_tokens=counts.kept_tokens,
                new_tokens=counts.num_tokens,
                num_logits=counts.num_tokens * self._vocabulary,
                logits_dtype=logits_dtype,
            )
            for counts, _ in last
        ]
        middle = median_low([one.total for one in moved])
        place = next(place for place, one in enumerate(moved) if one.total == middle)
        typical = last[place][0]
        return DecodeStats(
            steps=self._num_steps,
            mean_ms=self._all_ns / self._num_steps / 1e6,
            step_ms=median([taken for _, taken in last]) / 1e6,
            num_requests=typical.num_requests,
            moved=moved[place],
            is_upper_bound=not weights.is_exact(typical.num_tokens),
            bandwidth=bandwidth,
        )
