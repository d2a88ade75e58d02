"""The engine: requests come in, each step computes tokens of many of them, outputs come out."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pcomm.core import Group
from pcomm.core.errors import ClosedError, ConfigError
from pcomm.core.process.signals import Deferral, deferred_interrupt
from pcomm.inference.engine.allocator import Allocator
from pcomm.inference.engine.limits import EngineSettings, check_eos_ids, check_model, check_request
from pcomm.inference.engine.request import (
    Request,
    RequestOutput,
    RequestQueue,
    RequestState,
)
from pcomm.inference.engine.runner import ModelRunner, sampling_rows, without_prompts
from pcomm.inference.engine.scheduler import Chunk, FaultIsolation, Scheduler, StepPlan
from pcomm.inference.engine.stats import EngineStats, HostTimes
from pcomm.inference.layers.packed_weight import check_batch_invariant
from pcomm.inference.model import Model
from pcomm.inference.roofline.decode_stats import BandwidthMeter, DecodeRoofline
from pcomm.inference.sampling.grammars import GrammarCompiler
from pcomm.inference.sampling.params import TokenLogprobs
from pcomm.inference.sampling.sampler import NotFiniteLogitsError, Sampled, Sampler
from pcomm.inference.text import Tokenizer

__all__ = ["Engine", "OutputProcessor", "count_accepted"]


class Engine:
    """Continues many prompts at once with one model; synchronous, deterministic, without threads.

    Under tensor parallelism every rank has an engine of its own and makes the same calls.

    Args:
        model: The model.
        vocabulary: Number of token ids, the width of the logits.
        eos_ids: Token ids by which the model ends a text.
        tokenizer: Turns tokens into text for outputs, stop strings and grammars; None for none.
        max_model_len: Most tokens of a prompt and its text together.
        block_size: Tokens of a KV block.
        num_blocks: Number of KV blocks for all requests and cached prompts.
        num_state_slots: Number of states of recurrent layers, for requests that run and for
            snapshots of the prefix cache.
        max_batch_tokens: Most tokens of a step.
        max_requests: Most requests that run at once.
        max_queued: Most requests that wait.
        prefix_cache: True to keep what was computed of prompts for requests that begin alike.
        speculative_tokens: Most tokens that a step guesses from the text so far, for each request.
        batch_invariant: True for logits whose bits depend on the request alone: its prompt is
            computed by 256 tokens, its text token by token, also after a preemption, and nothing
            is kept in the prefix cache. The linear layers of the model have to be those of
            `pack_weights(model, batch_invariant=True)`, and its other operations have to compute
            a row without regard to the others, as torch's do on one thread or two.
        device: Device of the model.
        meter: Bandwidths of memory that its owner has measured, which `stats` compares steps of
            decoding with; None for no comparison. The engine itself measures nothing.
        group: Tensor-parallel group that shares the model, whose ranks record CUDA graphs together
            or not at all; None for a model of one rank.

    Attributes:
        step_error: The exception that the last step met while the model computed or tokens were
            chosen; None if it met none. Its requests are computed again, or have ended with it.

    Raises:
        ConfigError: A number is too small, a value has another type, the model has no
            `memory_specs()` or no `step()`, or it declares memory that cannot be allocated. With
            `batch_invariant`, there are drafts, too few tokens in a step, or a linear layer that is
            not packed for it.
    """

    def __init__(
        self,
        model: Model,
        *,
        vocabulary: int,
        eos_ids: Sequence[int] = (),
        tokenizer: Tokenizer | None = None,
        max_model_len: int,
        block_size: int = 16,
        num_blocks: int,
        num_state_slots: int,
        max_batch_tokens: int = 2048,
        max_requests: int = 64,
        max_queued: int = 256,
        prefix_cache: bool = True,
        speculative_tokens: int = 0,
        batch_invariant: bool = False,
        device: str | torch.device = "cpu",
        meter: BandwidthMeter | None = None,
        group: Group | None = None,
    ) -> None:
        check_model(model)
        specs, device = model.memory_specs(), torch.device(device)
        self._settings = settings = EngineSettings(
            vocabulary=vocabulary,
            max_model_len=max_model_len,
            block_size=block_size,
            num_blocks=num_blocks,
            num_state_slots=num_state_slots,
            max_batch_tokens=max_batch_tokens,
            max_requests=max_requests,
            max_queued=max_queued,
            speculative_tokens=speculative_tokens,
            prefix_cache=prefix_cache,
            batch_invariant=batch_invariant,
        )
        settings.check(specs)
        if batch_invariant:
            check_batch_invariant(model)
        self._eos_ids = check_eos_ids(eos_ids) + tuple(tokenizer.eos_ids if tokenizer else ())
        self._tokenizer = tokenizer
        self._allocator = Allocator(specs, settings, device)
        self._queue = RequestQueue(max_queued)
        self._scheduler = Scheduler(self._allocator, self._queue, settings)
        self._times = HostTimes()
        self._runner = ModelRunner(
            model, self._allocator, settings, device=device, times=self._times, group=group
        )
        self._sampler = Sampler(vocabulary, device)
        self._roofline: DecodeRoofline | None = None
        if meter is not None:
            self._roofline = DecodeRoofline(
                model, vocabulary=vocabulary, device=device, meter=meter
            )
        self._grammars = GrammarCompiler(tokenizer, vocabulary)
        # Requests that run or wait, by name.
        self._under_way: dict[str, RequestState] = {}
        self._outputs = OutputProcessor(self._allocator, self._scheduler, self._under_way)
        self._faults = FaultIsolation(self._scheduler, self._under_way)
        self._num_added = 0
        self._num_steps = self._num_computed = 0
        self.step_error: Exception | None = None
        # Those that an interrupt kept from the caller.
        self._unreturned: list[RequestOutput] = []
        # The method that changes requests and memory now, or that did not end: what an exception
        # has left half changed is not used again.
        self._changing = ""
        self._is_closed = False

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to compute, to return, or to raise."""
        return bool(self._under_way or self._changing or self._unreturned)

    def add(self, request: Request) -> None:
        """Queue a request; the next steps compute it.

        A grammar of `request.params` is compiled here, unless `request.grammar` is given: that may
        take seconds, in which no step is made.

        Raises:
            ConfigError: The request can never be served; the message names the limit. Or
                `request.grammar` is not that of its params, or was compiled for another model.
            QueueFullError: The queue holds `max_queued` requests.
            ClosedError: The engine is closed, or a change of its requests was cut short.
            KeyboardInterrupt: It passes; the request is queued or not, which `abort` tells.
        """
        self._check_open("add")
        check_request(
            request,
            known=self._under_way,
            vocabulary=self._settings.vocabulary,
            max_model_len=self._settings.max_model_len,
            has_tokenizer=self._tokenizer is not None,
        )
        self._check_blocks(request)
        self._queue.check_room(request.request_id)
        if request.grammar is not None:
            request.grammar.check(request.params, self._tokenizer, self._settings.vocabulary)
        compiled = request.grammar or self._grammars.compile(request.params)
        grammar = compiled.begin() if compiled is not None else None
        live = RequestState(
            request=request,
            arrival=self._num_added,
            max_model_len=self._settings.max_model_len,
            eos_ids=self._eos_ids,
            tokenizer=self._tokenizer,
            grammar=grammar,
        )
        with deferred_interrupt():
            self._changing = "add"
            self._num_added += 1
            self._queue.insert(live)
            self._under_way[request.request_id] = live
            self._changing = ""

    def step(self) -> list[RequestOutput]:
        """Compute the next tokens; collective under tensor parallelism.

        Returns:
            One output for each request that got a token or ended, in the order of the batch. A
            request whose grammar, text or step of the model raises an exception ends with
            `finish_reason` "error" and the exception as `error`. After an exception in a step of
            several requests each runs alone until it is past the tokens of that step, so that
            those which cannot are found and the others go on.

        Raises:
            ClosedError: The engine is closed, or a change of its requests was cut short.
            KeyboardInterrupt: It passes, and nothing is lost: during the computation the next call
                computes the step again; during the changes of requests before and after it comes
                behind them, and the next call returns the outputs. An exception that is no
                `Exception` from elsewhere, such as the handler of another signal, is as harmless
                during the computation; before and after it requests stay half changed, and `add`
                and `step` raise `ClosedError` from then on.
        """
        self._check_open("step")
        if not self._unreturned:
            with deferred_interrupt() as deferral:
                self._changing = "step"
                self._unreturned = self._compute(deferral)
                self._changing = ""
        # Python looks for signals at calls: nothing comes between these lines.
        outputs, self._unreturned = self._unreturned, []
        return outputs

    def _compute(self, deferral: Deferral) -> list[RequestOutput]:
        self._times.begin()
        plan = self._faults.plan() or self._scheduler.schedule()
        requests = plan.requests
        if not requests:
            return []
        self._times.lap("schedule")
        self.step_error = None
        self._num_steps += 1
        self._num_computed += plan.num_tokens
        try:
            sampled = deferral.heard(lambda: self._next_tokens(plan))
        except Exception as error:
            self.step_error = error
            return self._after_failure(plan, error)
        except BaseException:
            # An interrupt leaves states half written: what was under way is computed again.
            self._put_back(plan)
            self._changing = ""
            raise
        self._times.lap("sample")
        counts = None if self._roofline is None else plan.decode_counts(self._roofline.windows)
        outputs = self._outputs.advance(plan, sampled)
        self._times.lap("outputs")
        if self._roofline is not None and counts is not None:
            self._roofline.note(counts, self._times.step_ns)
        return outputs

    def abort(self, request_id: str) -> bool:
        """End a request at once, whether it runs or waits; its memory is free after the call.

        After a change that was cut short the request is forgotten, and `close` frees the memory.

        Returns:
            False if there is no such request, for example because it has finished.
        """
        # Not for the next request of this name.
        self._unreturned = [one for one in self._unreturned if one.request_id != request_id]
        if self._changing:
            return self._under_way.pop(request_id, None) is not None
        if request_id not in self._under_way:
            return False
        with deferred_interrupt():
            self._changing = "abort"
            live = self._under_way.pop(request_id)
            self._scheduler.end(live)
            self._changing = ""
        return True

    def record_graphs(self) -> None:
        """Record CUDA graphs of decoding for all numbers of requests now, as a server wants it.

        Otherwise each is recorded in the step that needs it first, which then takes longer. On a
        device without graphs nothing is done. Collective over the `group` of the engine, between
        two steps; a step that cannot be recorded is none of its errors, see `EngineStats`.

        Raises:
            Exception: The error of the model, where ranks share it.
            PeerError: The model of another rank has failed.
            ClosedError: The engine is closed, or a change of its requests was cut short.
        """
        self._check_open("record_graphs")
        self._runner.record_graphs()

    def stats(self) -> EngineStats:
        """Counters, the use of both pools, and how near steps are to the limit of the memory."""
        blocks, slots = self._allocator.uses()
        running, graphs = self._scheduler.running, self._runner.graphs
        roofline, logits_dtype = self._roofline, self._runner.logits_dtype
        return EngineStats(
            running=len(running),
            kept_tokens=sum(live.num_computed for live in running),
            waiting=len(self._queue),
            blocks=blocks,
            state_slots=slots,
            steps=self._num_steps,
            computed_tokens=self._num_computed,
            written_tokens=self._outputs.num_written,
            preemptions=self._scheduler.num_preemptions,
            looked_up_tokens=self._allocator.num_looked_up,
            cached_tokens=self._allocator.num_hit,
            drafted_tokens=self._outputs.num_drafted,
            accepted_tokens=self._outputs.num_accepted,
            graph_sizes=graphs.sizes if graphs else (),
            graph_refusal=graphs.refusal if graphs else "",
            host_us=self._times.medians_us(),
            decode=None if roofline is None else roofline.stats(logits_dtype),
        )

    def close(self) -> None:
        """End all requests and free the pools; a second call does nothing."""
        for request_id in list(self._under_way):
            self.abort(request_id)
        if self._changing:
            self._queue.clear()
            self._scheduler.running.clear()
            self._faults.clear()
            self._allocator.discard()
        else:
            self._changing = "close"
            self._allocator.close()
        self._unreturned.clear()
        self._is_closed, self._changing = True, ""

    def _next_tokens(self, plan: StepPlan) -> Sampled:
        """Run the model on a plan, and choose the tokens behind known text and drafts."""
        rows = sampling_rows(plan)
        logits, told = self._runner.run(plan, self._sampler.told(rows))
        return self._sampler.sample(without_prompts(plan, logits), rows, told)

    def _after_failure(self, plan: StepPlan, error: Exception) -> list[RequestOutput]:
        """End the request that a step has failed for, or find it by running each alone."""
        requests = plan.requests
        self._put_back(plan)
        if len(requests) == 1:
            self._faults.clear_failures()
            return [self._outputs.fail(requests[0], error)]
        return [self._outputs.fail(live, error) for live in self._faults.suspect(plan)]

    def _put_back(self, plan: StepPlan) -> None:
        """Let all requests of a step wait that did not complete; what it wrote is not used."""
        for chunk in plan.chunks:
            if chunk.saved_slot:
                self._allocator.drop_saved(chunk.live, chunk.saved_slot, restore=False)
        for live in plan.requests:
            self._scheduler.preempt(live)

    def _check_blocks(self, request: Request) -> None:
        limit = min(len(request.prompt) + request.params.max_tokens, self._settings.max_model_len)
        needed, most = self._allocator.most_blocks(limit - 1), self._allocator.blocks.size
        if needed <= most:
            return
        raise ConfigError(
            f"Engine.add: request {request.request_id!r}",
            found=f"up to {limit} tokens need {needed} KV blocks, and num_blocks is {most}",
            why="Keys and values of a request are in memory together, or where every layer has a "
            "window those of that and of one step, so it can never finish.",
            fix="Shorten the prompt, ask for fewer max_tokens, or raise num_blocks. With windows a "
            "smaller max_batch_tokens needs fewer.",
        )

    def _check_open(self, method: str) -> None:
        if self._is_closed:
            raise ClosedError(
                f"Engine.{method}",
                found="a closed engine",
                why="close() has freed its memory.",
                fix="Make a new Engine.",
            )
        if self._changing:
            raise ClosedError(
                f"Engine.{method}",
                found=f"an engine whose {self._changing}() was cut short",
                why="An interrupt or an error came while requests and memory were half changed.",
                fix="Call close(), make a new Engine, and add the requests again.",
            )


class OutputProcessor:
    """Gives requests their tokens, and ends those that are complete.

    Args:
        allocator: Allocator that keeps what was computed for the prefix cache.
        scheduler: Scheduler, from which requests that end are taken out.
        under_way: Requests by name; those that end are taken out.

    Attributes:
        num_written: Number of tokens that requests got.
        num_drafted: Number of drafts that were tried.
        num_accepted: Number of drafts that were right.
    """

    def __init__(
        self, allocator: Allocator, scheduler: Scheduler, under_way: dict[str, RequestState]
    ) -> None:
        self._allocator = allocator
        self._scheduler = scheduler
        self._under_way = under_way
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
                live.is_tokens_only
                and token >= 0
                and token not in live.stop_ids
                and len(live.tokens) + 1 < live.limit
            ):
                live.tokens.append(token)
                live.output.append(token)
                if live.num_computed >= live.note_at:
                    self._allocator.note_computed(live)
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
                    self._allocator.note_computed(chunk.live)
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

    def fail(self, live: RequestState, error: Exception) -> RequestOutput:
        """End a request for an exception, and free its memory."""
        if isinstance(error, NotFiniteLogitsError):
            self._allocator.withdraw(live)
        del self._under_way[live.request_id]
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
        self, live: RequestState, tokens: list[int], logprobs: list[TokenLogprobs | None]
    ) -> RequestOutput:
        try:
            if live.error is not None:
                raise live.error
            output = live.accept(tokens, logprobs)
        except Exception as error:
            return self.fail(live, error)
        self._allocator.note_computed(live)
        self.num_written += len(output.token_ids)
        if output.finish_reason:
            del self._under_way[live.request_id]
            self._scheduler.end(live)
        return output


def count_accepted(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """Number of drafts that are the tokens which were sampled in their place.

    Noise of a token depends on seed and position alone, so each sampled token is the one that would
    follow its predecessors without drafts: up to the first draft that differs, and that one's place
    included, the text is exactly that of an engine without speculation.

    Args:
        drafts: Guessed tokens.
        sampled: Tokens sampled behind the known text and behind each draft, one more than drafts.
    """
    for number, (draft, token) in enumerate(zip(drafts, sampled, strict=False)):
        if draft != token:
            return number
    return len(drafts)
