"""A request under way: its tokens so far, and the places in memory that it holds."""

from __future__ import annotations

from array import array

from pcomm.inference.engine.request import Request, TokenLogprobs
from pcomm.inference.engine.sampling.sampling_row import GrammarState
from pcomm.inference.text.text_stream import TextStream

__all__ = ["NEVER", "LiveRequest"]

NEVER = 1 << 60
"""A number of tokens that no request reaches."""


class LiveRequest:
    """What scheduler, allocator and engine know of one request; queued or running.

    Args:
        request: Prompt and settings of the user.
        arrival: Number of requests that came before it.
        limit: Most tokens that prompt and text may have together.
        stop_ids: Token ids that end the text.

    Attributes:
        order: Scheduling order: priority, then arrival.
        tokens: The prompt and the tokens that were written.
        prompt: The prompt alone.
        output: Tokens that were written, alone.
        num_prompt: Length of the prompt.
        num_computed: Number of tokens whose keys, values and states are in memory.
        blocks: KV blocks in the order of the tokens.
        capacity: Number of tokens that `blocks` have room for.
        first_block: First of `blocks` while they are neighbours in ascending order; None otherwise.
        claim: First and end of the blocks that are kept free for it where that is possible.
        table_row: Row of the block tables; 0 while it has none.
        state_slot: State slot; 0 while it has none.
        keep_at: Number of computed tokens from which on the allocator has something to offer to the
            prefix cache.
        coming: Hashes that stand for what it computes of its prompt, until that is done.
        coming_until: Number of computed tokens from which on it is done.
        block_hashes: Chained hashes of its full blocks, as far as they were needed.
        num_published: Number of its blocks that the prefix cache was offered.
        is_orphan: True once the prefix cache has given up a block before one that is used, so that
            nothing can be offered behind it.
        snapshot_at: Numbers of tokens, ascending, after which the prefix cache wants a copy of the
            state.
        cached_tokens: Number of tokens of the prompt that came from the prefix cache when the
            request began; None before that.
        is_plain: True for one that gets tokens alone: no text, grammar or log-probabilities.
        text: Text of the tokens; None without a tokenizer.
        grammar: Grammar of the text; None for any text.
        num_failures: Number of steps of several requests that failed with it.
        alone_until: Number of computed tokens up to which it runs alone after such a step.
        error: Exception of its grammar or of its logits in the step under way, which ends it.
        prompt_logprobs: Log-probabilities of the prompt's tokens from the second on, as far as
            they are known; where the request asked for them.
    """

    __slots__ = (
        "alone_until",
        "arrival",
        "block_hashes",
        "blocks",
        "cached_tokens",
        "capacity",
        "claim",
        "coming",
        "coming_until",
        "error",
        "first_block",
        "grammar",
        "is_orphan",
        "is_plain",
        "keep_at",
        "limit",
        "num_computed",
        "num_failures",
        "num_prompt",
        "num_published",
        "order",
        "output",
        "params",
        "prompt",
        "prompt_logprobs",
        "request",
        "request_id",
        "snapshot_at",
        "state_slot",
        "stop_ids",
        "table_row",
        "text",
        "tokens",
    )

    def __init__(
        self, request: Request, *, arrival: int, limit: int, stop_ids: tuple[int, ...]
    ) -> None:
        self.request = request
        self.request_id = request.request_id
        self.params = request.params
        self.arrival = arrival
        self.order = (request.priority, arrival)
        self.limit = limit
        self.stop_ids = stop_ids
        self.prompt = array("q", request.prompt)
        self.output = array("q")
        self.tokens = array("q", request.prompt)
        self.num_prompt = len(request.prompt)
        self.num_computed = 0
        self.blocks: list[int] = []
        self.capacity = 0
        self.first_block: int | None = None
        self.claim = (0, 0)
        self.table_row = 0
        self.state_slot = 0
        self.keep_at = NEVER
        self.coming: list[bytes] = []
        self.coming_until = 0
        self.block_hashes: list[bytes] = []
        self.num_published = 0
        self.is_orphan = False
        self.snapshot_at: list[int] = []
        self.cached_tokens: int | None = None
        self.num_failures = 0
        self.alone_until = 0
        self.error: Exception | None = None
        given = (self.params.logprobs, self.params.prompt_logprobs)
        self.is_plain = given == (None, None)
        self.text: TextStream | None = None
        self.grammar: GrammarState | None = None
        self.prompt_logprobs: list[TokenLogprobs] = []

    def unknown_prompt_rows(self, start: int, stop: int) -> range:
        """Positions whose logits give log-probabilities of the prompt that are asked for.

        Args:
            start: Position of the first token that a step computes.
            stop: Position behind the last one.
        """
        if self.params.prompt_logprobs is None:
            return range(start, start)
        return range(max(start, len(self.prompt_logprobs)), min(stop, self.num_prompt - 1))
