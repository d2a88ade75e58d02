"""A request from the call to its end: by a token or its length here, by a string in `text`."""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from typing import Literal

from pcomm.core.errors import PcommError
from pcomm.inference.sampling.grammars import CompiledGrammar, GrammarMatcher
from pcomm.inference.sampling.params import SamplingParams, TokenLogprobs
from pcomm.inference.text import TextStream, Tokenizer

__all__ = [
    "NEVER",
    "FinishReason",
    "QueueFullError",
    "Request",
    "RequestOutput",
    "RequestQueue",
    "RequestState",
]


FinishReason = Literal["stop", "length", "abort", "error"]
"""`stop`: a stop token or stop string; `length`: `max_tokens` or the longest context; `error`: an
exception in the model or the grammar, or logits that are not numbers. `abort` is for those who end
a request by `Engine.abort`: the engine says nothing of it after that."""


@dataclass(frozen=True)
class Request:
    """One prompt to continue once; `n` continuations are n requests that share a prefix.

    Attributes:
        request_id: Name that is unique among the requests under way.
        prompt: Token ids of the prompt, at least one.
        params: Sampling settings and limits.
        priority: Requests with a smaller number are scheduled first; equal ones in the order in
            which they came.
        grammar: Grammar of `params`, from `GrammarCompiler.compile`; None for `Engine.add` to
            compile it. It is no part of the request for another process, which compiles it itself.
    """

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    grammar: CompiledGrammar | None = field(default=None, compare=False, repr=False)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "grammar": None}


# Not frozen: that makes it five times as slow to make, and a step makes one for each request.
@dataclass(slots=True)
class RequestOutput:
    """What one step did for one request; the engine keeps no reference to it.

    Attributes:
        request_id: The name of the request.
        token_ids: Tokens written in this step; the stop token, if one ended the text, is the last.
        text: Text that became certain in this step: no part of it can still be cut off by a stop
            string, and it ends in a whole character. Empty where the engine has no tokenizer.
        finish_reason: None while the request goes on.
        logprobs: One entry for each of `token_ids`, where the request asked for them.
        prompt_logprobs: One entry for each token of the prompt but the first, in the step that ends
            the prompt, where the request asked for them; otherwise empty.
        cached_tokens: Number of tokens of the prompt whose computation the prefix cache saved.
        error: The exception that ended the request, with `finish_reason` "error".
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str = ""
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    cached_tokens: int = 0
    error: Exception | None = None


NEVER = 1 << 60
"""A number of tokens that no request reaches."""


@dataclass(slots=True, eq=False, repr=False, kw_only=True)
class RequestState:
    """What scheduler, allocator and engine know of one request; queued or running.

    Args:
        request: Prompt and settings of the user.
        arrival: Number of requests that came before it.
        max_model_len: Most tokens that prompt and text may have together.
        eos_ids: Token ids by which the model ends a text.
        tokenizer: Turns its tokens into text; None for no text.
        grammar: Grammar of the text; None for any text.

    Attributes:
        order: Scheduling order: priority, then arrival.
        stop_ids: Token ids that end the text, ascending: the model's own, unless ignored, and those
            asked for.
        prompt: The prompt alone.
        output: Tokens that were written, alone.
        tokens: The prompt and the tokens that were written.
        num_prompt: Length of the prompt.
        limit: Number of tokens at which the request ends.
        is_tokens_only: True for one without text, a grammar (which needs text) and
            log-probabilities.
        text: Text of the tokens; None without a tokenizer.
        num_computed: Number of tokens whose keys, values and states are in memory.
        blocks: KV blocks in the order of the tokens; 0 for one that was given back.
        num_given_back: Number of `blocks` that were given back, the first ones.
        capacity: Number of tokens that `blocks` have room for.
        first_block: First of `blocks` while they are neighbours in ascending order, and none was
            given back; None otherwise.
        reservation: First and end of the blocks that are kept free for it where that is possible.
        table_row: Row of the block tables; 0 while it has none.
        state_slot: State slot; 0 while it has none.
        note_at: Number of computed tokens from which on the allocator has something to offer to
            the prefix cache, or a block to take back.
        in_flight_prefix: Hashes that stand for what it computes of its prompt, until that is done.
        in_flight_until: Number of computed tokens from which on it is done.
        block_hashes: Chained hashes of its full blocks, as far as they were needed.
        num_published: Number of its blocks that the prefix cache was offered.
        is_orphan: True once the prefix cache has given up a block before one that is used, so that
            nothing can be offered behind it.
        snapshot_at: Numbers of tokens, ascending, after which the prefix cache wants a copy of the
            state.
        cached_tokens: Number of tokens of the prompt that came from the prefix cache when the
            request began; None before that.
        num_failures: Number of steps of several requests that failed with it.
        alone_until: Number of computed tokens up to which it runs alone after such a step.
        error: Exception of its grammar or of its logits in the step under way, which ends it.
        prompt_logprobs: Log-probabilities of the prompt's tokens from the second on, as far as
            they are known; where the request asked for them.
    """

    request: InitVar[Request]
    arrival: InitVar[int] = 0
    max_model_len: InitVar[int]
    eos_ids: InitVar[Sequence[int]] = ()
    tokenizer: InitVar[Tokenizer | None] = None
    grammar: GrammarMatcher | None = None
    request_id: str = field(init=False)
    params: SamplingParams = field(init=False)
    order: tuple[int, int] = field(init=False)
    stop_ids: tuple[int, ...] = field(init=False)
    prompt: array[int] = field(init=False)
    output: array[int] = field(init=False)
    tokens: array[int] = field(init=False)
    num_prompt: int = field(init=False)
    limit: int = field(init=False)
    is_tokens_only: bool = field(init=False)
    text: TextStream | None = field(init=False, default=None)
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    num_given_back: int = 0
    capacity: int = 0
    first_block: int | None = None
    reservation: tuple[int, int] = (0, 0)
    table_row: int = 0
    state_slot: int = 0
    note_at: int = NEVER
    in_flight_prefix: list[bytes] = field(default_factory=list)
    in_flight_until: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    num_published: int = 0
    is_orphan: bool = False
    snapshot_at: list[int] = field(default_factory=list)
    cached_tokens: int | None = None
    num_failures: int = 0
    alone_until: int = 0
    error: Exception | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    def __post_init__(
        self,
        request: Request,
        arrival: int,
        max_model_len: int,
        eos_ids: Sequence[int],
        tokenizer: Tokenizer | None,
    ) -> None:
        self.request_id, self.params = request.request_id, request.params
        params = request.params
        self.order = (request.priority, arrival)
        own = () if params.ignore_eos else eos_ids
        self.stop_ids = tuple(sorted({*own, *params.stop_token_ids}))
        self.prompt, self.output = array("q", request.prompt), array("q")
        self.tokens = array("q", request.prompt)
        self.num_prompt = len(request.prompt)
        self.limit = min(self.num_prompt + params.max_tokens, max_model_len)
        self.is_tokens_only = tokenizer is None and params.logprobs is None
        self.is_tokens_only &= params.prompt_logprobs is None
        if tokenizer is not None:
            self.text = TextStream(
                tokenizer, params.stop, min_tokens=params.min_tokens, prompt=request.prompt
            )

    def __lt__(self, other: RequestState) -> bool:
        """Whether it is scheduled before another one."""
        return self.order < other.order

    def unknown_prompt_rows(self, start: int, stop: int) -> range:
        """Positions whose logits give log-probabilities of the prompt that are asked for.

        Args:
            start: Position of the first token that a step computes.
            stop: Position behind the last one.
        """
        if self.params.prompt_logprobs is None:
            return range(start, start)
        return range(max(start, len(self.prompt_logprobs)), min(stop, self.num_prompt - 1))

    def accept(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
    ) -> RequestOutput:
        """Append tokens until the request ends.

        Args:
            tokens: Next tokens of the request, at least one; those behind its end are dropped.
            logprobs: Log-probabilities of each, where the request asked for them.

        Returns:
            What the engine says of the request; with a `finish_reason` if it has ended.

        Raises:
            Exception: An error that the tokenizer or the grammar has raised.
        """
        prompt_logprobs = () if self.output else tuple(self.prompt_logprobs)
        text, reason, count = "", None, 0
        for token in tokens:
            self.tokens.append(token)
            self.output.append(token)
            count += 1
            reason = self._end(token)
            if self.text is not None:
                more, reason = self._follow(self.text, token, reason)
                text += more
            if reason:
                break
        return RequestOutput(
            request_id=self.request_id,
            token_ids=tuple(tokens[:count]),
            text=text,
            finish_reason=reason,
            logprobs=tuple([entry for entry in logprobs[:count] if entry is not None]),
            prompt_logprobs=prompt_logprobs,
            cached_tokens=self.cached_tokens or 0,
        )

    def _end(self, token: int) -> FinishReason | None:
        """The reason for which the request ends with its newest token, text aside.

        A stop token within `min_tokens`, which only a grammar can bring, does not end it.
        """
        is_complete = False
        if self.grammar is not None:
            self.grammar.accept(token)
            is_complete = self.grammar.is_finished
        if is_complete or (token in self.stop_ids and len(self.output) > self.params.min_tokens):
            return "stop"
        return "length" if len(self.tokens) >= self.limit else None

    def _follow(
        self, stream: TextStream, token: int, reason: FinishReason | None
    ) -> tuple[str, FinishReason | None]:
        """The text that a token makes certain, and the reason for which the request ends now."""
        text = ""
        # A token that ends the text by its id is no part of it.
        if token not in self.stop_ids:
            delta = stream.push(token)
            text, reason = delta.text, "stop" if delta.is_stopped else reason
        if reason and not stream.is_stopped:
            text += stream.flush()
            reason = "stop" if stream.is_stopped else reason
        return text, reason


class QueueFullError(PcommError):
    """As many requests wait as may; the caller tries again later, or tells its client to."""


class RequestQueue:
    """Requests by priority, then in the order in which they came.

    Args:
        most: Most new requests that wait at once. Preempted ones do not count: they were running.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: list[RequestState] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def in_order(self) -> list[RequestState]:
        """All requests; the list may be kept while the queue changes."""
        return self._waiting.copy()

    def check_room(self, request_id: str) -> None:
        """Refuse a new request while the queue is full.

        Raises:
            QueueFullError: The queue holds its largest number of requests.
        """
        if len(self._waiting) >= self._most:
            raise QueueFullError(
                f"Engine.add: request {request_id!r}",
                found=f"{len(self._waiting)} requests wait, and max_queued is {self._most}",
                why="A queue without a bound only makes every client wait longer.",
                fix="Call step() until some have finished and add it again, or raise max_queued.",
            )

    def insert(self, live: RequestState) -> None:
        """Put a request in its place by priority and arrival."""
        insort(self._waiting, live)

    def remove(self, live: RequestState) -> None:
        """Take a request out, wherever it stands."""
        self._waiting.remove(live)

    def clear(self) -> None:
        """Take all out."""
        self._waiting.clear()
