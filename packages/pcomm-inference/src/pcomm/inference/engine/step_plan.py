"""Which tokens of which requests the next step computes."""

from __future__ import annotations

from dataclasses import dataclass, field

from pcomm.inference.engine.live_request import LiveRequest
from pcomm.inference.roofline.decode_roofline import DecodeCounts

__all__ = ["Chunk", "StepPlan"]


@dataclass(slots=True)
class Chunk:
    """Neighbouring tokens of one request: of its prompt, or of its text with drafts behind it.

    Attributes:
        live: The request.
        start: Position of the first token, which is the number of tokens computed before.
        stop: Position behind the last token, without drafts.
        drafts: Tokens that may follow, to be computed and compared with what is sampled.
        saved_slot: State slot that holds the state before the chunk while drafts are tried; 0 for
            none.
    """

    live: LiveRequest
    start: int
    stop: int
    drafts: tuple[int, ...] = ()
    saved_slot: int = 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the step computes for the request."""
        return self.stop - self.start + len(self.drafts)

    @property
    def is_sampled(self) -> bool:
        """Whether the chunk ends with the last known token, so that the next one is sampled."""
        return self.stop == len(self.live.tokens)

    def logits_rows(self) -> range:
        """Tokens whose logits are wanted, counted from `start`: of the prompt, then to sample."""
        prompt = self.live.unknown_prompt_rows(self.start, self.stop)
        count = self.num_tokens
        first = count - len(self.drafts) - 1 if self.is_sampled else count
        # Rows of the prompt end right before the sampled one, or with the chunk.
        return range(prompt.start - self.start if prompt else first, count)


@dataclass(slots=True)
class StepPlan:
    """The work of one step.

    Attributes:
        decodes: Requests that compute their last token only.
        chunks: All others.
    """

    decodes: list[LiveRequest] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def requests(self) -> list[LiveRequest]:
        """All requests of the step, in the order of the batch."""
        return [*self.decodes, *(chunk.live for chunk in self.chunks)]

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.decodes) + sum(chunk.num_tokens for chunk in self.chunks)

    def decode_counts(self) -> DecodeCounts | None:
        """What a step of decoding computes; None if a prompt, or text a second time, is in it.

        A request decodes if it computes its last token, and drafts behind that. Tokens of prompts
        share the weights with many others, so arithmetic is their limit and not the memory.
        """
        kept = sum([live.num_computed for live in self.decodes])
        num_requests = num_tokens = len(self.decodes)
        for chunk in self.chunks:
            if chunk.stop - chunk.start != 1 or not chunk.is_sampled:
                return None
            num_requests += 1
            num_tokens += chunk.num_tokens
            kept += chunk.start
        return DecodeCounts(num_requests, num_tokens, kept)
