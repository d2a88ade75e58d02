"""Picks the tokens of each step within a budget: first text, then prompts in chunks.

Text may have drafts behind it, which `engine` compares with what is sampled. After a step that
failed the next ones are of one request each.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pcomm.inference.engine.allocator import Allocator
from pcomm.inference.engine.limits import INVARIANT_CHUNK, EngineSettings
from pcomm.inference.engine.request import RequestQueue, RequestState
from pcomm.inference.roofline.decode_stats import DecodeCounts

__all__ = ["MOST_FAILURES", "Chunk", "FaultIsolation", "Scheduler", "StepPlan", "draft_tokens"]


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

    live: RequestState
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
        decodes: Requests with one token to compute, the last one of their text or prompt.
        chunks: All others.
    """

    decodes: list[RequestState] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def requests(self) -> list[RequestState]:
        """All requests of the step, in the order of the batch."""
        return [*self.decodes, *(chunk.live for chunk in self.chunks)]

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the step, T."""
        return len(self.decodes) + sum(chunk.num_tokens for chunk in self.chunks)

    def decode_counts(self, windows: Sequence[int] = ()) -> DecodeCounts | None:
        """What a step of decoding computes; None if a prompt, or text a second time, is in it.

        A request decodes if it computes its last token, and drafts behind that. Tokens of prompts
        share the weights with many others, so arithmetic is their limit and not the memory.

        Args:
            windows: Windows of the model's layers.
        """
        kept = [live.num_computed for live in self.decodes]
        num_requests = num_tokens = len(self.decodes)
        for chunk in self.chunks:
            if chunk.stop - chunk.start != 1 or not chunk.is_sampled:
                return None
            num_requests += 1
            num_tokens += chunk.num_tokens
            kept.append(chunk.start)
        seen = tuple([sum([min(one, window - 1) for one in kept]) for window in windows])
        return DecodeCounts(num_requests, num_tokens, sum(kept), seen)


class Scheduler:
    """Requests that run and requests that wait.

    Args:
        allocator: Gives and takes blocks and slots.
        queue: Requests that wait.
        settings: Most tokens and requests of a step, and most drafts of a request.
    """

    def __init__(
        self,
        allocator: Allocator,
        queue: RequestQueue,
        settings: EngineSettings,
    ) -> None:
        self._allocator = allocator
        self._queue = queue
        self._max_batch_tokens = settings.max_batch_tokens
        self._max_requests = settings.max_requests
        self._chunk_multiple = allocator.chunk_multiple
        self._speculative_tokens = settings.speculative_tokens
        self._is_batch_invariant = settings.batch_invariant
        # Drafts that are wrong change a state; keys and values behind a token are not read.
        self._saves_states = allocator.pools.has_states
        # By priority, then arrival, like the queue.
        self.running: list[RequestState] = []
        self.num_preemptions = 0

    def schedule(self) -> StepPlan:
        """The tokens of the next step; their blocks are allocated.

        A plan without tokens means that there is no request.
        """
        plan, prompts, preempted = StepPlan(), [], self.num_preemptions
        decodes, running = plan.decodes, self.running
        position = 0
        # Preemption takes requests from the end, behind all that are in the plan already.
        while position < len(running):
            live = running[position]
            known = len(live.tokens)
            if known > live.capacity and not self._make_room(live):
                break
            if known - live.num_computed == 1:
                decodes.append(live)
            else:
                prompts.append(live)
            position += 1
        del decodes[self._max_batch_tokens :]
        budget = self._max_batch_tokens - len(decodes)
        if self._speculative_tokens:
            budget -= self._add_drafts(plan, budget)
        for live in prompts:
            budget -= self._add_chunk(plan, live, budget)
        if preempted == self.num_preemptions:
            self._begin_waiting(plan, budget)
        # Recurrent layers compute requests with one token in another way than longer ones, and find
        # them before those; those with something before that token come first, as in `StepBatch`.
        plan.chunks.sort(key=lambda chunk: (chunk.num_tokens > 1, chunk.start == 0))
        return plan

    def schedule_alone(self, live: RequestState) -> StepPlan:
        """The next tokens of one request; none if it waits and others leave it no memory."""
        plan = StepPlan()
        allocator = self._allocator
        if live.table_row:
            has_room = allocator.extend(live, allocator.wanted_tokens(live))
        else:
            has_room = self._begin(live, headroom=0)
        if not has_room:
            return plan
        self._add_chunk(plan, live, self._max_batch_tokens)
        return plan

    def preempt(self, live: RequestState) -> None:
        """Take a request's memory away and let it wait; it is computed again when it runs."""
        self.running.remove(live)
        self._allocator.release(live)
        self._queue.insert(live)

    def end(self, live: RequestState) -> None:
        """Take a request out, whether it runs or waits, and its memory back."""
        if live.table_row:
            self.running.remove(live)
        else:
            self._queue.remove(live)
        self._allocator.release(live)

    def _make_room(self, live: RequestState) -> bool:
        """Extend a request, preempting those that came last; False if that was itself."""
        num_tokens = self._allocator.wanted_tokens(live)
        while not self._allocator.extend(live, num_tokens):
            last = self.running[-1]
            self.preempt(last)
            self.num_preemptions += 1
            if last is live:
                return False
        return True

    def _begin_waiting(self, plan: StepPlan, budget: int) -> None:
        for live in self._queue.in_order():
            if budget <= 0 or len(self.running) == self._max_requests:
                return
            if self._allocator.is_prefix_in_flight(live):
                continue
            # A block for each of the others, or the next step would preempt this one again.
            if not self._begin(live, headroom=len(self.running)):
                return
            budget -= self._add_chunk(plan, live, budget)

    def _begin(self, live: RequestState, *, headroom: int) -> bool:
        if not self._allocator.admit(live, headroom=headroom):
            return False
        self._queue.remove(live)
        insort(self.running, live)
        return True

    def _add_drafts(self, plan: StepPlan, budget: int) -> int:
        """Plan drafts behind the requests that decode, and return their number."""
        decodes, plan.decodes = plan.decodes, []
        num_drafts = 0
        for live in decodes:
            known = len(live.tokens)
            most = min(self._speculative_tokens, budget - num_drafts, live.limit - known - 1)
            # A grammar's mask is known for the next token only.
            drafts = draft_tokens(live.tokens, most) if live.grammar is None else ()
            if drafts and not self._allocator.extend(live, known + len(drafts)):
                drafts = drafts[: live.capacity - known]
            saved = self._allocator.save_state(live) if drafts and self._saves_states else 0
            if not drafts or (self._saves_states and not saved):
                plan.decodes.append(live)
                continue
            plan.chunks.append(Chunk(live, known - 1, known, drafts, saved))
            num_drafts += len(drafts)
        return num_drafts

    def _add_chunk(self, plan: StepPlan, live: RequestState, budget: int) -> int:
        """Plan as many tokens of a prompt as the budget allows, and return their number."""
        start, stop = live.num_computed, len(live.tokens)
        if self._is_batch_invariant:
            return self._add_fixed_chunk(plan, live, budget)
        if stop - start > budget:
            stop = start + budget
            aligned = stop - stop % self._chunk_multiple
            stop = aligned if aligned > start else stop
        if live.snapshot_at and start < live.snapshot_at[0] < stop:
            stop = live.snapshot_at[0]
        if stop > start:
            plan.chunks.append(Chunk(live, start, stop))
        return max(stop - start, 0)

    def _add_fixed_chunk(self, plan: StepPlan, live: RequestState, budget: int) -> int:
        """Plan a chunk that depends on its request alone, or none, and return its length."""
        start, num_prompt = live.num_computed, live.num_prompt
        # Text that is computed again after a preemption was written token by token.
        stop = start + 1
        if start < num_prompt:
            stop = min(num_prompt, start - start % INVARIANT_CHUNK + INVARIANT_CHUNK)
        if stop - start > budget:
            return 0
        plan.chunks.append(Chunk(live, start, stop))
        return stop - start


_LONGEST, _SHORTEST = 4, 2


def draft_tokens(tokens: array[int], most: int) -> tuple[int, ...]:
    """Guess how a text goes on.

    Args:
        tokens: Prompt and text so far.
        most: Largest number of tokens to guess.

    Returns:
        What followed the latest earlier occurrence of the last four, three or two tokens, the
        longest of these that occurs; empty if none does.
    """
    if most < 1:
        return ()
    size = tokens.itemsize
    text = tokens.tobytes()
    for length in range(min(_LONGEST, len(tokens) - 1), _SHORTEST - 1, -1):
        wanted = text[-length * size :]
        # The last token is not part of an earlier occurrence.
        place = text.rfind(wanted, 0, len(text) - size)
        while place > 0 and place % size:
            place = text.rfind(wanted, 0, place + len(wanted) - 1)
        if place >= 0 and place % size == 0:
            first = place // size + length
            return tuple(tokens[first : first + most])
    return ()


MOST_FAILURES = 2
"""Steps of several requests that may fail with a request which succeeds alone, before it ends."""


class FaultIsolation:
    """Requests of a step that failed, which run alone until they are past the tokens of that step.

    Args:
        scheduler: Plans steps of one request.
        under_way: Requests by name; a suspect that is none of them has ended.
    """

    def __init__(self, scheduler: Scheduler, under_way: Mapping[str, RequestState]) -> None:
        self._scheduler = scheduler
        self._under_way = under_way
        self._suspected: list[RequestState] = []
        # Those of them that may not be past the tokens of that step yet.
        self._untried: list[RequestState] = []

    def plan(self) -> StepPlan | None:
        """The next step of the first suspect; None once there is no suspect."""
        while self._untried:
            live = self._untried[0]
            is_under_way = self._under_way.get(live.request_id) is live
            if is_under_way and live.num_computed < live.alone_until:
                plan = self._scheduler.schedule_alone(live)
                if plan.chunks:
                    return plan
            del self._untried[0]
        self._suspected.clear()
        return None

    def suspect(self, plan: StepPlan) -> list[RequestState]:
        """Suspect the requests of a step of several that failed.

        Returns:
            Requests that failed too often together with others, and have to end.
        """
        for live in plan.decodes:
            live.alone_until = len(live.tokens)
        for chunk in plan.chunks:
            chunk.live.alone_until = chunk.stop
        requests = plan.requests
        for live in requests:
            live.num_failures += 1
        lost = [live for live in requests if live.num_failures > MOST_FAILURES]
        self._suspected = [live for live in requests if live not in lost]
        self._untried = self._suspected.copy()
        return lost

    def clear_failures(self) -> None:
        """Forget the failures of those that were suspected together with one that failed alone."""
        for live in self._suspected:
            live.num_failures = 0

    def clear(self) -> None:
        """Suspect none."""
        self._suspected.clear()
        self._untried.clear()
