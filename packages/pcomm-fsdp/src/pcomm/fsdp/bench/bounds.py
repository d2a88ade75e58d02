"""The shortest time that a step of forward and backward can take on given links.

Each rank sends and receives the same amount, on links that carry so much each way. A ring, or an
all-to-all and a local sum, moves the least: of a unit of P bytes each of N ranks sends
(N - 1) / N * P to gather it, and as much to reduce its gradients. With

    G_f, G_b, R    time of all gathers in forward, of those in backward, and of all reduces
    C_f, C_b       time of all computation in forward and in backward
    g, r, c_f, c_b of one unit

no computation goes before the first gather, no reduce before the first computation of backward, and
nothing else is left to do during the last reduce; backward gathers go before the backward of the
unit that is last. So on links of their own for gathers and reduces

    F = max(g + C_f, G_f + c_f)              forward, and nothing of backward but gathers before
    B = max(C_b + r, c_b + R)                backward after that
    T >= max(F + B, G_f + G_b + c_b + r)

and on one link, which all bytes have to pass,

    T >= max(the same, G_f + G_b + R).

Headers are not counted, so no rank reaches these times; computation is that of the fastest round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Step", "lower_bounds_s"]


@dataclass(frozen=True)
class Step:
    """The least work of a step.

    Args:
        unit_bytes: Bytes of the parameters of each unit; gradients have as many.
        num_ranks: Ranks among which units are sharded.
        num_backward_gathers: Units that are gathered again in backward, the first ones.
        forward_s: Computation of forward, in seconds.
        backward_s: Computation of backward.
    """

    unit_bytes: Sequence[int]
    num_ranks: int
    num_backward_gathers: int
    forward_s: float
    backward_s: float

    def gather_bytes(self) -> float:
        """Bytes that each rank sends to gather, in forward and in backward."""
        again = self.unit_bytes[: self.num_backward_gathers]
        return self._share * (sum(self.unit_bytes) + sum(again))

    def reduce_bytes(self) -> float:
        """Bytes that each rank sends to reduce."""
        return self._share * sum(self.unit_bytes)

    @property
    def _share(self) -> float:
        return (self.num_ranks - 1) / self.num_ranks


def lower_bounds_s(step: Step, bytes_per_s: float) -> tuple[float, float]:
    """Seconds on one link, and on one for gathers and another for reduces; see above."""
    share = (step.num_ranks - 1) / step.num_ranks / bytes_per_s
    depth = len(step.unit_bytes)
    forward_gathers = share * sum(step.unit_bytes)
    backward_gathers = step.gather_bytes() / bytes_per_s - forward_gathers
    reduces = step.reduce_bytes() / bytes_per_s
    unit_forward, unit_backward = step.forward_s / depth, step.backward_s / depth
    first_gather = last_reduce = share * step.unit_bytes[0]
    forward = max(first_gather + step.forward_s, forward_gathers + unit_forward)
    backward = max(step.backward_s + last_reduce, unit_backward + reduces)
    gathers = forward_gathers + backward_gathers + unit_backward + last_reduce
    independent = max(forward + backward, gathers)
    return max(independent, forward_gathers + backward_gathers + reduces), independent
