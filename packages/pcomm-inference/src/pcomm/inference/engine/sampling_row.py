"""What the sampler gets for one row of logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pcomm.inference.engine.sampling_params import SamplingParams

__all__ = ["GrammarState", "SamplingRow"]


class GrammarState(Protocol):
    """The place in a grammar that the text of one request has reached."""

    def allowed_words(self) -> Tensor:
        """int32 `[ceil(V / 32)]` on the CPU: bit `i % 32` of word `i // 32` allows token `i`.

        At least one bit is set until `is_finished`.
        """
        ...

    def accept(self, token_id: int) -> None:
        """Go on behind a token that was sampled under the mask of `allowed_words`."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens that were accepted."""
        ...

    @property
    def is_finished(self) -> bool:
        """Whether the text is complete and no token can follow but an end."""
        ...


# Not frozen: that makes it three times as slow to make, and a step makes one for each request.
@dataclass(slots=True)
class SamplingRow:
    """One row of logits: whose it is, and what has been written before it.

    Two rows with equal fields and logits get the same token, in any batch and order.

    Attributes:
        params: Settings of the request.
        prompt: Token ids of the prompt. Only penalties read them; `array("q")` is read fastest.
        output: Token ids written before the one that is sampled, drafts included. Only penalties
            and `min_tokens` read them; `array("q")` is read fastest.
        position: Position of the sampled token in the request, from 0: the length of prompt and
            output. With the seed it determines the random numbers.
        stop_ids: Token ids that end the request, see `stopping.stop_ids`; they are not sampled
            before `min_tokens` are written.
        grammar: State of the grammar behind `output`; None for any text.
    """

    params: SamplingParams
    prompt: Sequence[int]
    output: Sequence[int]
    position: int
    stop_ids: tuple[int, ...] = ()
    grammar: GrammarState | None = None
