"""What communication costs by a model of latency and bytes, and the sizes that the model needs."""

from __future__ import annotations

from dataclasses import dataclass

from pcomm.core.errors import ConfigError
from pcomm.gdn_cp.specs.counts import is_integer
from pcomm.gdn_cp.strategies.traffic import Traffic

__all__ = ["Link", "Sizes"]


@dataclass(frozen=True)
class Link:
    """What a collective costs: a fixed time, and a time for each byte that a rank sends.

    Args:
        latency_us: Microseconds of an empty collective.
        gb_per_s: 10^9 bytes that one rank sends in a second.

    Raises:
        ConfigError: A number that is not positive.
    """

    latency_us: float = 20.0
    gb_per_s: float = 50.0

    def __post_init__(self) -> None:
        numbers = (self.latency_us, self.gb_per_s)
        if not all(isinstance(number, float | int) and number > 0 for number in numbers):
            raise ConfigError(
                "Link",
                found=f"latency_us={self.latency_us}, gb_per_s={self.gb_per_s}",
                why="A collective takes time, and a link carries bytes.",
                fix="Use positive numbers, those of the slowest link between the ranks.",
            )

    def time_us(self, traffic: Traffic) -> float:
        """Microseconds of communication, forward and backward."""
        return traffic.num_collectives * self.latency_us + traffic.sent_bytes / self.gb_per_s / 1e3


@dataclass(frozen=True)
class Sizes:
    """Sizes that the model needs and a specification does not have.

    Args:
        hidden_dim: Width of hidden states; None if unknown, and then `docs` cannot be weighed.
        element_bytes: Bytes of an element of activations: 1, 2, 4, 8 or 16.

    Raises:
        ConfigError: A width that is no integer >= 1, or bytes that no dtype has.
    """

    hidden_dim: int | None
    element_bytes: int

    def __post_init__(self) -> None:
        width = self.hidden_dim
        if width is not None and not (is_integer(width) and width >= 1):
            raise ConfigError(
                f"make_plan: hidden_dim={width!r}",
                found="no integer >= 1",
                why="It is the number of columns of hidden states, which strategy 'docs' sends.",
                fix="Pass the width of the model, or leave it away if it is unknown.",
            )
        if not (is_integer(self.element_bytes) and self.element_bytes in (1, 2, 4, 8, 16)):
            raise ConfigError(
                f"make_plan: element_bytes={self.element_bytes!r}",
                found="a size that no dtype has",
                why="It is the number of bytes of one number of the activations.",
                fix="Pass dtype.itemsize: 2 for bf16, 4 for fp32.",
            )
