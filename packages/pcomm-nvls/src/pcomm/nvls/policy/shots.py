"""In how many steps an all-reduce with barriers goes: a pure function, equal on all ranks."""

from __future__ import annotations

__all__ = ["is_one_shot"]

# Bytes that a link moves while a barrier takes place: 2 us at 371 and at 722 GB/s. A model, not
# measured. Under the interpreter it is small, so that tests reach both sides.
_BARRIER_BYTES = {"sm_90": 740_000, "emulated": 1024}
_BARRIER_BYTES_LATER = 1_440_000


def is_one_shot(num_bytes: int, world_size: int, way: str, architecture: str) -> bool:
    """Whether each rank sums the whole tensor, with one barrier, or its range, with two.

    One step moves more bytes. It is taken where these cost less than the second barrier.

    Args:
        num_bytes: Size of the tensor, in bytes.
        world_size: Number of ranks.
        way: "multicast" or "peers".
        architecture: Architecture of the devices, such as `sm_90`.
    """
    n = world_size
    if way == "multicast":
        # Each rank sends its tensor to n readers, or a range of it to each and the sums to all.
        one, two = n * n, n + 1
    else:
        one, two = n * (n - 1), 2 * (n - 1)
    limit = _BARRIER_BYTES.get(architecture, _BARRIER_BYTES_LATER)
    return (one - two) * num_bytes <= n * limit
