"""What bandwidth the loads in flight of a kernel allow: occupancy, and Little's law.

Arithmetic on published limits. None of its results was compared with a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["GPUS", "LIMITS", "LINK_LATENCY_S", "Gpu", "Limits", "Needs", "share"]


class Gpu(NamedTuple):
    """A GPU of one architecture. Assumptions from what is published; none was measured here."""

    name: str
    capability: int
    multiprocessors: int
    bytes_per_s: float
    """Of its memory."""

    bytes_in_flight: int
    """How many of a multiprocessor saturate that memory."""

    link_bytes_per_s: float
    """NVLink, one direction."""

    @property
    def latency_s(self) -> float:
        """Time of a load when memory is saturated, as those bytes imply."""
        return self.bytes_in_flight * self.multiprocessors / self.bytes_per_s


# Data sheets of NVIDIA for H100 SXM and B200. Bytes in flight: "CUDA Techniques to Maximize Memory
# Bandwidth and Hide Latency", GTC 2025.
GPUS = (
    Gpu("H100 SXM", 90, 132, 3.35e12, 32 << 10, 450e9),
    Gpu("B200", 100, 148, 8.0e12, 40 << 10, 900e9),
)
# A load from another GPU, through a switch. No published figure is behind this one.
LINK_LATENCY_S = 2e-6


class Limits(NamedTuple):
    """What a multiprocessor has."""

    warps: int
    blocks: int
    registers: int
    registers_at_a_time: int
    """Granularity of those of a warp, which has all of its own in one of four quarters."""

    shared_kib: int
    shared_at_a_time: int
    """Granularity in bytes; the system takes a KiB of each block beside."""

    tensor_columns: int
    """Of tensor memory, which Hopper has none of."""


# Of 9.0 and 10.0: CUDA C++ Programming Guide, technical specifications for each compute capability;
# granularities as in the occupancy calculator of Nsight Compute; tensor memory: PTX ISA, tcgen05.
LIMITS = Limits(64, 32, 1 << 16, 256, 228, 128, 512)


class Needs(NamedTuple):
    """What a block asks of a multiprocessor."""

    warps: int
    registers: int
    """Of a thread."""

    shared_bytes: int = 0
    tensor_columns: int = 0

    def fitting(self) -> tuple[int, str]:
        """How many blocks fit at a time, and what there would have to be more of."""
        has = LIMITS
        of_warp = _rounded(32 * self.registers, has.registers_at_a_time)
        warps = has.registers // 4 // of_warp * 4
        shared = _rounded(self.shared_bytes, has.shared_at_a_time) + 1024
        found = {
            "blocks": has.blocks,
            "threads": has.warps // self.warps,
            "registers": warps // self.warps,
            "shared memory": has.shared_kib * 1024 // shared,
        }
        if self.tensor_columns:
            found["tensor memory"] = has.tensor_columns // self.tensor_columns
        limit = min(found, key=lambda name: found[name])
        return found[limit], limit


def share(gpu: Gpu, needs: Needs, num_blocks: int, thread_bytes: int, *, over_link: bool) -> float:
    """Which part of the bandwidth the loads on their way can have, by Little's law; at most 1.

    Args:
        gpu: GPU.
        needs: What a block asks for.
        num_blocks: Blocks of the launch.
        thread_bytes: Bytes that a thread has on the way.
        over_link: Whether NVLink is the limit, in place of memory.
    """
    resident = min(num_blocks, needs.fitting()[0] * gpu.multiprocessors)
    on_the_way = resident * needs.warps * 32 * thread_bytes
    if over_link:
        return min(1.0, on_the_way / LINK_LATENCY_S / gpu.link_bytes_per_s)
    return min(1.0, on_the_way / gpu.latency_s / gpu.bytes_per_s)


def _rounded(number: int, unit: int) -> int:
    return -(-number // unit) * unit
