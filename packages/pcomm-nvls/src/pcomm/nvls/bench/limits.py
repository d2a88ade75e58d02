"""The least time that an operation can take: a latency, and bytes over the rate of a link. Pure.

Bytes that a GPU sends and receives: NCCL's maintainers for gathers and reduce-scatters
(NVIDIA/nccl issues 1083 and 1506), NCCL's model in `sym_kernels.cc` for all-reduces in two steps.
"""

from __future__ import annotations

from pcomm.core.errors import ConfigError

__all__ = ["LINK_RATES", "bytes_of", "least_us"]

LINK_RATES = {"sm_90": 450e9, "sm_100": 900e9, "sm_103": 900e9}
"""Bytes a second in one direction of all NVLinks of a GPU, from public specifications."""


def bytes_of(operation: str, algorithm: str, num_bytes: int, world: int) -> tuple[float, float]:
    """What a GPU sends and receives, in bytes.

    Args:
        operation: "all_gather_into_tensor", "reduce_scatter_tensor" or "all_reduce" (two steps).
        algorithm: "multimem" for the switch, another one for each rank to each.
        num_bytes: Size of the whole tensor, in bytes.
        world: Number of ranks.

    Raises:
        ConfigError: Another operation.
    """
    part = num_bytes / world
    direct = (world - 1) * part
    by_switch = algorithm == "multimem"
    match operation:
        case "all_gather_into_tensor":
            return (part, num_bytes) if by_switch else (direct, direct)
        case "reduce_scatter_tensor":
            return (num_bytes, part) if by_switch else (direct, direct)
        case "all_reduce":
            both = num_bytes + part
            return (both, both) if by_switch else (2 * direct, 2 * direct)
    raise ConfigError(
        f"bytes_of: {operation!r}",
        found="an operation without a known limit",
        why="A ratio to a limit needs the bytes on the links.",
        fix="Use all_gather_into_tensor, reduce_scatter_tensor or all_reduce.",
    )


def least_us(
    operation: str, algorithm: str, num_bytes: int, world: int, *, rate: float, latency_us: float
) -> float:
    """Microseconds that an operation takes at least.

    Args:
        operation: Name of the operation, as in `bytes_of`.
        algorithm: Name of the algorithm, as in `bytes_of`.
        num_bytes: Size of the whole tensor, in bytes.
        world: Number of ranks.
        rate: Bytes a second in one direction.
        latency_us: Time of a barrier alone on the same machine, in microseconds.
    """
    sent, received = bytes_of(operation, algorithm, num_bytes, world)
    return latency_us + max(sent, received) / rate * 1e6
