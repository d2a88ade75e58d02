"""Picks the tokens of each step within a budget: first text, then prompts in chunks."""

from __future__ import annotations

from bisect import insort

from pcomm.inference.engine.engine_settings import INVARIANT_CHUNK, EngineSettings
from pcomm.inference.engine.live_request import LiveRequest
from pcomm.inference.engine.memory.engine_memory import EngineMemory
from pcomm.inference.engine.request_queue import RequestQueue
from pcomm.inference.engine.speculation.n_gram import draft_tokens
from pcomm.inference.engine.step_plan import Chunk, StepPlan

__all__ = ["Scheduler"]


class Scheduler:
    """Requests that run and requests that wait.

    Args:
        memory: Gives and takes blocks and slots.
        queue: Requests that wait.
        settings: Most tokens and requests of a step, and most drafts of a request.
        batch_invariant: True to cut each prompt where no other request has a say.
    """

    def __init__(
        self,
        memory: EngineMemory,
        queue: RequestQueue,
        settings: EngineSettings,
        *,
        batch_invariant: bool,
    ) -> None:
        self._allocator = memory.allocator
        self._queue = queue
        self._max_batch_tokens = settings.max_batch_tokens
        self._max_requests = settings.max_requests
        self._chunk_multiple = memory.chunk_multiple
        self._speculative_tokens = settings.speculative_tokens
        self._is_batch_invariant = batch_invariant
        # Drafts that are wrong change a state; keys and values behind a token are not read.
        self._saves_states = memory.pools.has_states
        # By priority, then arrival, like the queue.
        self.running: list[LiveRequest] = []
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
            if known > live.capacity and not self._make_room(live, known):
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
        return plan

    def schedule_alone(self, live: LiveRequest) -> StepPlan:
        """The next tokens of one request; none if it waits and others leave it no memory."""
        plan = StepPlan()
        if not live.table_row and not self._begin(live, headroom=0):
            return plan
        self._add_chunk(plan, live, self._max_batch_tokens)
        return plan

    def preempt(self, live: LiveRequest) -> None:
        """Take a request's memory away and let it wait; it is computed again when it runs."""
        self.running.remove(live)
        self._allocator.release(live)
        self._queue.insert(live)

    def end(self, live: LiveRequest) -> None:
        """Take a request out, whether it runs or waits, and its memory back."""
        if live.table_row:
            self.running.remove(live)
        else:
            self._queue.remove(live)
        self._allocator.release(live)

    def _make_room(self, live: LiveRequest, num_tokens: int) -> bool:
        """Extend a request, preempting those that came last; False if that was itself."""
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
            if self._allocator.is_coming(live):
                continue
            # A block for each of the others, or the next step would preempt this one again.
            if not self._begin(live, headroom=len(self.running)):
                return
            budget -= self._add_chunk(plan, live, budget)

    def _begin(self, live: LiveRequest, *, headroom: int) -> bool:
        if not self._allocator.admit(live, headroom=headroom):
            return False
        self._queue.remove(live)
        insort(self.running, live, key=_order)
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

    def _add_chunk(self, plan: StepPlan, live: LiveRequest, budget: int) -> int:
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

    def _add_fixed_chunk(self, plan: StepPlan, live: LiveRequest, budget: int) -> int:
        """The same for a chunk that depends on its request alone: whole, or not in this step."""
        start, num_prompt = live.num_computed, len(live.request.prompt)
        # Text that is computed again after a preemption was written token by token.
        stop = start + 1
        if start < num_prompt:
            stop = min(num_prompt, start - start % INVARIANT_CHUNK + INVARIANT_CHUNK)
        if stop - start > budget:
            return 0
        chunk = Chunk(live, start, stop)
        if stop - start == 1:
            # Recurrent layers compute requests with one token in another way than longer ones, and
            # find them before those.
            plan.chunks.insert(0, chunk)
        else:
            plan.chunks.append(chunk)
        return stop - start


def _order(live: LiveRequest) -> tuple[int, int]:
    return live.order
