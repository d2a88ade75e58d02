"""What the tokens of a step make of its requests."""

from __future__ import annotations

from pcomm.inference.engine.live_request import LiveRequest
from pcomm.inference.engine.memory.allocator import Allocator
from pcomm.inference.engine.request import RequestOutput, TokenLogprobs
from pcomm.inference.engine.sampling.not_finite import NotFiniteError
from pcomm.inference.engine.sampling.sampler import Sampled
from pcomm.inference.engine.scheduler import Scheduler
from pcomm.inference.engine.speculation.verification import count_accepted
from pcomm.inference.engine.step_plan import Chunk, StepPlan
from pcomm.inference.engine.token_acceptance import accept_tokens

__all__ = ["StepOutputs"]


class StepOutputs:
    """Gives requests their tokens, and ends those that are complete.

    Args:
        allocator: Keeps what was computed for the prefix cache.
        scheduler: Takes out requests that end.
        live: Requests under way by name; those that end are taken out.

    Attributes:
        num_written: Number of tokens that requests got.
        num_drafted: Number of drafts that were tried.
        num_accepted: Number of drafts that were right.
    """

    def __init__(
        self, allocator: Allocator, scheduler: Scheduler, live: dict[str, LiveRequest]
    ) -> None:
        self._allocator = allocator
        self._scheduler = scheduler
        self._live = live
        self.num_written = self.num_drafted = self.num_accepted = 0

    def advance(self, plan: StepPlan, sampled: Sampled) -> list[RequestOutput]:
        """Go on with all requests of a step that has succeeded.

        Args:
            plan: Work of the step.
            sampled: A token for each decode, and for each chunk that is sampled one behind its
                known tokens and one behind each draft. An error in place of one ends its request.

        Returns:
            One output for each request that got tokens or ended.
        """
        ids, logprobs, outputs = sampled.token_ids, sampled.logprobs, []
        for place, live in enumerate(plan.decodes):
            token = ids[place]
            live.num_computed += 1
            # Nearly all requests of nearly all steps: the same as below, four times as fast.
            if (
                live.is_plain
                and token >= 0
                and token not in live.stop_ids
                and len(live.tokens) + 1 < live.limit
            ):
                live.tokens.append(token)
                live.output.append(token)
                if live.num_computed >= live.keep_at:
                    self._allocator.keep(live)
                self.num_written += 1
                cached = live.cached_tokens or 0
                outputs.append(RequestOutput(live.request_id, (token,), cached_tokens=cached))
            else:
                live.error = live.error or sampled.errors.get(place)
                outputs.append(self._accept(live, [token], [logprobs[place]]))
        place = len(plan.decodes)
        for chunk in plan.chunks:
            if not chunk.is_sampled:
                chunk.live.num_computed = chunk.stop
                if chunk.live.error is None:
                    self._allocator.keep(chunk.live)
                else:
                    outputs.append(self.fail(chunk.live, chunk.live.error))
                continue
            behind = place + len(chunk.drafts) + 1
            right = self._settle_drafts(chunk, ids[place:behind])
            end = place + right + 1
            chunk.live.error = chunk.live.error or sampled.errors.get(place)
            outputs.append(self._accept(chunk.live, ids[place:end], logprobs[place:end]))
            place = behind
        return outputs

    def fail(self, live: LiveRequest, error: Exception) -> RequestOutput:
        """End a request for an exception, and free its memory."""
        if isinstance(error, NotFiniteError):
            self._allocator.withdraw(live)
        del self._live[live.request_id]
        self._scheduler.end(live)
        cached = live.cached_tokens or 0
        return RequestOutput(
            live.request_id, (), finish_reason="error", cached_tokens=cached, error=error
        )

    def _settle_drafts(self, chunk: Chunk, sampled: list[int]) -> int:
        """Note what is computed after a chunk, and return the number of drafts that were right."""
        live, right = chunk.live, count_accepted(chunk.drafts, sampled)
        if right and sampled[right] < 0:
            # No token behind right drafts: the next step finds the error in the same place, and
            # until then the request has what it would have without drafts.
            right -= 1
        live.num_computed = chunk.stop + right
        self.num_drafted += len(chunk.drafts)
        self.num_accepted += right
        if chunk.saved_slot:
            is_wrong = right < len(chunk.drafts)
            self._allocator.drop_saved(live, chunk.saved_slot, restore=is_wrong)
            if is_wrong:
                # The state has seen wrong tokens: the right ones are computed again from before.
                live.num_computed = chunk.start
        return right

    def _accept(
        self, live: LiveRequest, tokens: list[int], logprobs: list[TokenLogprobs | None]
    ) -> RequestOutput:
        try:
            if live.error is not None:
                raise live.error
            output = accept_tokens(live, tokens, logprobs)
        except Exception as error:
            return self.fail(live, error)
        self._allocator.keep(live)
        self.num_written += len(output.token_ids)
        if output.finish_reason:
            del self._live[live.request_id]
            self._scheduler.end(live)
        return output
