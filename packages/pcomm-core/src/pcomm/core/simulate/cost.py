"""Alpha-beta cost of one collective: steps, and the bytes that each member sends and receives.

For N ranks and b bytes that a rank puts in. What a rank keeps for itself never moves.

| algorithm | operation | steps | sends | receives |
|---|---|---|---|---|
| ring | all_gather | N-1 | (N-1) b, largest b | the same |
| | reduce_scatter | N-1 | (N-1)/N b | the same |
| | all_reduce | 2(N-1) | 2(N-1)/N b | the same |
| | broadcast | N-1 | b, last none | b, source none |
| direct | all_gather | 1 | (N-1) b | b of the others |
| | reduce_scatter (all-to-all and a local sum) | 1 | (N-1)/N b | the same |
| | all_reduce (both) | 2 | 2(N-1)/N b | the same |
| | broadcast | 1 | (N-1) b from the source | b, source none |
| in_network | all_gather (multicast) | 1 | b | b of the others |
| | reduce_scatter | 1 | (N-1)/N b | b/N |
| | all_reduce | 1 | b | b |
| | broadcast | 1 | b from the source | b, source none |

An all_to_all sends (N-1)/N b and receives 1/N of the others' b with any algorithm: in N-1 pairwise
steps on a ring, in one otherwise. Source: the usual bandwidth-optimal counts; those of in-network
reduction are inferred, not measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pcomm.core.simulate.cluster import Algorithm
from pcomm.core.simulate.task import Kind

__all__ = ["Load", "loads"]


class Load(NamedTuple):
    """Bytes that one member of a collective sends and receives."""

    sent_bytes: float
    received_bytes: float


def loads(
    operation: Kind, algorithm: Algorithm, num_bytes: Sequence[float], source: int = 0
) -> tuple[int, list[Load]]:
    """Number of steps, and the load of each member.

    Args:
        operation: Name of the collective.
        algorithm: Algorithm that moves its bytes.
        num_bytes: Bytes that each member puts in, in group order.
        source: Place of the sender of a broadcast.
    """
    size = len(num_bytes)
    if size == 1:
        return 0, [Load(0.0, 0.0)]
    steps = size - 1 if algorithm == "ring" else 1
    total = sum(num_bytes)
    if operation == "all_gather":
        if algorithm == "ring":
            # The ring moves in lock step, so each step lasts as long as its largest shard.
            return steps, [Load(steps * max(num_bytes), steps * max(num_bytes))] * size
        copies = size - 1 if algorithm == "direct" else 1
        return steps, [Load(copies * b, total - b) for b in num_bytes]
    if operation == "all_to_all":
        return steps, [Load(b * (size - 1) / size, (total - b) / size) for b in num_bytes]
    b = num_bytes[0]
    if operation == "broadcast":
        return steps, _broadcast(algorithm, b, size, source)
    others = b * (size - 1) / size
    if operation == "reduce_scatter":
        return steps, [Load(others, b / size if algorithm == "in_network" else others)] * size
    if algorithm == "in_network":
        return 1, [Load(b, b)] * size
    return 2 * steps, [Load(2 * others, 2 * others)] * size


def _broadcast(algorithm: Algorithm, b: float, size: int, source: int) -> list[Load]:
    sent = [0.0] * size
    received = [b] * size
    received[source] = 0.0
    if algorithm == "ring":
        sent = [b] * size
        sent[source - 1] = 0.0
    else:
        sent[source] = b * (size - 1) if algorithm == "direct" else b
    return [Load(*pair) for pair in zip(sent, received, strict=True)]
