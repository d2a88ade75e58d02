"""How fast a run is: tokens a second, what its parts take, its share of what a device can do."""

from __future__ import annotations

import resource
import time

import torch

__all__ = ["Speed", "measured_flops", "peak_memory_mib"]

# Steps over which tokens a second are averaged: what the user sees should not jump.
_STEPS = 20

# Side of the square product whose speed is the measured peak, and how often it is timed.
_SIDE = {"cpu": 768, "cuda": 8192}
_TURNS = 5


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


def measured_flops(device: torch.device, dtype: str) -> float:
    """Operations a second of a square product on this device, in its fastest turn. Local.

    Args:
        device: Device of this rank; on a CPU, with the threads of this process.
        dtype: `"fp32"` or `"bf16"`, the format of the product.
    """
    side = _SIDE[device.type]
    a, b = torch.ones(2, side, side, device=device).unbind()
    if dtype == "bf16":
        a, b = a.bfloat16(), b.bfloat16()
    fastest = float("inf")
    with torch.inference_mode():
        for _ in range(_TURNS):
            start = time.perf_counter()
            product = a @ b
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            fastest = min(fastest, time.perf_counter() - start)
            del product
    return 2 * side**3 / fastest


def peak_memory_mib(device: torch.device) -> float:
    """Most MiB that were allocated on a CUDA device, else that this process had. Local."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
