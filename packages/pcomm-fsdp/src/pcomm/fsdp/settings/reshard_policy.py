"""The stage of sharding as data: the time until which parameters and gradients stay unsharded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from pcomm.core.errors import ConfigError, near_misses

__all__ = ["Keep", "Reduce", "ReshardPolicy"]

Keep = Literal["use", "backward", "step", "always"]
Reduce = Literal["micro_batch", "step"]


@dataclass(frozen=True)
class ReshardPolicy:
    """The time until which a scope's parameters stay gathered, and when its gradients are reduced.

    Optimizer state and main weights are always shards. HSDP is none of these fields: it is a
    `replicate` group in `Roles`, and goes with each of them.

    Args:
        keep: The time that parameters stay gathered: `"use"` to the end of the unit's forward and
            of its backward, `"backward"` from its forward to the end of its backward, `"step"` to
            the last backward of the step, `"always"` until new values take the same memory.
        reduce: The time of the reduce, in each `"micro_batch"` or once a `"step"`; until then
            gradients add up unsharded, which is memory for communication.

    Raises:
        ConfigError: Another word.
    """

    keep: Keep = "use"
    reduce: Reduce = "micro_batch"

    def __post_init__(self) -> None:
        for name, value, words in (
            ("keep", self.keep, get_args(Keep)),
            ("reduce", self.reduce, get_args(Reduce)),
        ):
            if value not in words:
                raise ConfigError(
                    f"ReshardPolicy({name}={value!r})",
                    found=f"the value {value!r}",
                    why=f"{name} is one of {', '.join(words)}.",
                    fix=near_misses(str(value), words),
                )

    @classmethod
    def zero1(cls) -> ReshardPolicy:
        """Optimizer state sharded; parameters whole, gradients whole until the end of the step."""
        return cls("always", "step")

    @classmethod
    def zero2(cls) -> ReshardPolicy:
        """Gradients sharded too: reduced in each micro-batch; parameters gathered once a step."""
        return cls("step", "micro_batch")

    @classmethod
    def zero3(cls, *, reduce: Reduce = "micro_batch") -> ReshardPolicy:
        """Parameters sharded too: gathered for each use."""
        return cls("use", reduce)
