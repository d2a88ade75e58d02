"""Settings of communication and of number formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from pcomm.core.errors import ConfigError

__all__ = ["CommPolicy", "Precision"]


@dataclass(frozen=True)
class CommPolicy:
    """The spread of gathers and reduces over time.

    Args:
        separate: `"always"` takes the gather and the reduce group as given; `"never"` sends both
            through the gather group; `"auto"` measures both ways when the model is sharded, and
            shares the gather group where separation gains less than 3 %.
        prefetch: Units that are gathered ahead of the one in use, forward and backward. The last
            `1 + prefetch` units of forward stay gathered for backward.
        prefetch_bytes: Most bytes of this rank's units gathered ahead; None for no limit. One unit
            may always be gathered ahead.
        inflight_reduce: Units with a reduce in flight while the next one computes. One keeps a link
            busy as long as units are of about the same size.
        max_padding: Largest fraction of a flat buffer that may be padding so that shards end at row
            boundaries; beyond it shards are cut inside rows.
        checks_first_step: True to have ranks compare their steps, through the store, before each
            gather that no schedule foresaw, such as those of the first step. With False, ranks
            with units in different orders find out where they depart from a schedule, at the end
            of that micro-batch, or by a time limit.
        prefetch_backward: Units that are gathered ahead in backward; None for `prefetch`. With 0 a
            gather is issued when the unit before it has ended, so that a unit's computation has
            one gathered unit less beside it. Each gather of backward is then waited for unless
            communication takes longer than computation anyway.
    """

    separate: Literal["auto", "always", "never"] = "always"
    prefetch: int = 1
    prefetch_bytes: int | None = None
    inflight_reduce: int = 1
    max_padding: float = 0.1
    checks_first_step: bool = True
    prefetch_backward: int | None = None

    @property
    def most_prefetch(self) -> int:
        """The larger depth of forward and backward."""
        return max(self.prefetch, self.prefetch_backward or 0)

    def __post_init__(self) -> None:
        if min(self.prefetch, self.prefetch_backward or 0) < 0 or self.inflight_reduce < 1:
            raise ConfigError(
                f"CommPolicy(prefetch={self.prefetch}, inflight_reduce={self.inflight_reduce}, "
                f"prefetch_backward={self.prefetch_backward})",
                found="a depth that cannot be",
                why="Nothing can be gathered before step 0, and a reduce needs a buffer to be in.",
                fix="Use prefetch >= 0, prefetch_backward >= 0 and inflight_reduce >= 1.",
            )
        if self.separate not in ("auto", "always", "never"):
            raise ConfigError(
                f"CommPolicy(separate={self.separate!r})",
                found="an unknown word",
                why="Gathers and reduces share a communicator, or they do not.",
                fix="Use 'auto', 'always' or 'never'.",
            )


@dataclass(frozen=True)
class Precision:
    """Number formats of one parameter's copies; None takes the next one named.

    Args:
        param_dtype: Dtype of unsharded parameters, of the computation and of gathers on the wire;
            None for that of the main weights.
        reduce_dtype: Dtype of unsharded gradients and of reduces on the wire; None for
            `param_dtype`.
        main_dtype: Dtype of shards and of their gradients, which the optimizer sees; None for the
            dtype that the parameter has when it is sharded.
        casts_inputs: True to cast floating-point inputs of a unit to `param_dtype`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    main_dtype: torch.dtype | None = None
    casts_inputs: bool = True
