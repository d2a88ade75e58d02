"""How fast a run is: tokens a second, what its parts take, its share of what a device can do.

Where the time goes in detail, torch's profiler tells of a range of steps.
"""

from __future__ import annotations

import logging
import resource
import time
from pathlib import Path
from typing import Literal

import torch
from torch.profiler import ProfilerActivity, profile

from pcomm.integration.config.sections import ResolvedTrain

__all__ = ["Speed", "StepProfile", "measured_flops", "own_flops", "peak_memory_mib"]

_log = logging.getLogger("pcomm.train")

# Steps over which tokens a second are averaged: what the user sees should not jump.
_STEPS = 20

# Sides of the square products whose speed is the measured peak, and how often each is timed. Larger
# ones are faster; a processor that has no bf16 would take seconds for the larger one.
_SIDES = {"cpu": (192, 768), "cuda": (8192,)}
_TURNS = 5
_LONGEST_S = 0.1


class Speed:
    """Times of the last steps of this start, on one rank.

    Args:
        step_tokens: Tokens of the global batch.
        flops_per_token: Operations of a token in forward and backward.
        peak_flops: Operations a second that all devices of the run together can do; None where
            that is not known, and then no share of it is told.
    """

    def __init__(self, step_tokens: int, flops_per_token: float, peak_flops: float | None) -> None:
        self._step_tokens, self._flops_per_token = step_tokens, flops_per_token
        self._peak_flops = peak_flops
        self._elapsed_s: dict[int, float] = {}
        self.data_s = 0.0
        """Seconds that the newest step has spent on its batches."""

    def row(self, index: int, elapsed_s: float) -> dict[str, float]:
        """What step `index` adds to its row; asked again about a step, it takes the newer time."""
        self._elapsed_s[index] = elapsed_s
        for old in [step for step in self._elapsed_s if step <= index - _STEPS]:
            del self._elapsed_s[old]
        mean_s = sum(self._elapsed_s.values()) / len(self._elapsed_s)
        mean = self._step_tokens / mean_s
        row = {
            "tokens_per_s": self._step_tokens / elapsed_s,
            "mean_tokens_per_s": mean,
            "step_ms": elapsed_s * 1e3,
            "data_ms": self.data_s * 1e3,
        }
        if self._peak_flops is not None:
            row["mfu"] = mean * self._flops_per_token / self._peak_flops
        return row


def own_flops(train: ResolvedTrain, device: torch.device) -> float:
    """Operations a second of one rank, as the configuration says or else as measured. Local."""
    named = train.peak_tflops
    return measured_flops(device, train.dtype) if named == "auto" else named * 1e12


def measured_flops(device: torch.device, dtype: str) -> float:
    """Operations a second of a square product on this device, in its fastest turn. Local.

    Args:
        device: Device of this rank; on a CPU, with the threads of this process.
        dtype: `"fp32"` or `"bf16"`, the format of the product.
    """
    fastest = 0.0
    for side in _SIDES[device.type]:
        if fastest and 2 * side**3 / fastest > _LONGEST_S:
            break
        fastest = max(fastest, 2 * side**3 / _fastest_turn(side, device, dtype))
    return fastest


def _fastest_turn(side: int, device: torch.device, dtype: str) -> float:
    """Seconds that a square product takes. Local."""
    a, b = torch.ones(2, side, side, device=device).unbind()
    if dtype == "bf16":
        a, b = a.bfloat16(), b.bfloat16()
    taken = []
    with torch.inference_mode():
        for _ in range(_TURNS):
            start = time.perf_counter()
            product = a @ b
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            taken.append(time.perf_counter() - start)
            del product
    return min(taken)


def peak_memory_mib(device: torch.device) -> float:
    """Most MiB that were allocated on a CUDA device, else that this process had. Local."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


class StepProfile:
    """Profiles the steps that `train.profile_steps` names, and writes what each rank did.

    Args:
        steps: First and last step, from 1; or `"none"`.
        folder: Folder of the files, made when there is something to write: `rankN.json`, a trace of
            operations with the spans data, forward, backward, optimizer and evaluation, and on a
            GPU `rankN.memory.pickle`, for https://pytorch.org/memory_viz. A run that goes on from
            step S within the range writes `rankN.from-stepS.json` beside them.
        rank: Global rank of this process.
        device: Device of this rank.
    """

    def __init__(
        self,
        steps: tuple[int, int] | Literal["none"],
        folder: Path,
        rank: int,
        device: torch.device,
    ) -> None:
        self._first, self._last = (0, 0) if steps == "none" else steps
        self._folder, self._rank, self._device = folder, rank, device
        self._running: profile | None = None
        self._begun = self._first

    def begin(self, step: int) -> None:
        """To be called before a step, of which the number is counted from 1. Local."""
        # A run that goes on in the middle of the range profiles what is left of it.
        if self._running is None and self._first <= step <= self._last:
            activities = [ProfilerActivity.CPU]
            if self._device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
                torch.cuda.memory._record_memory_history()
            self._begun = step
            self._running = profile(activities=activities)
            self._running.start()

    def end(self, step: int | None = None) -> None:
        """To be called after a step and what was due behind it, and at the end. Local.

        Args:
            step: The step; None to write what there is.
        """
        running = self._running
        if running is None or (step is not None and step < self._last):
            return
        running.stop()
        self._running, self._last = None, 0
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            part = "" if self._begun == self._first else f".from-step{self._begun}"
            stem = f"rank{self._rank}{part}"
            running.export_chrome_trace(str(self._folder / f"{stem}.json"))
            if self._device.type == "cuda":
                snapshot = self._folder / f"{stem}.memory.pickle"
                torch.cuda.memory._dump_snapshot(str(snapshot))
                torch.cuda.memory._record_memory_history(enabled=None)
        except (OSError, RuntimeError) as error:
            # The run is worth more than its profile.
            _log.warning("no profile in %s: %s", self._folder, error)
        else:
            _log.info(
                "profile from step %d on in %s, a file for each rank, to be opened at "
                "https://ui.perfetto.dev",
                self._begun,
                self._folder,
            )
