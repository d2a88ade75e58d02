"""The engine: requests come in, each step computes tokens of many of them, outputs come out."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pcomm.core.errors import ClosedError, ConfigError
from pcomm.inference.engine.engine_settings import EngineSettings
from pcomm.inference.engine.engine_stats import EngineStats
from pcomm.inference.engine.live_request import LiveRequest
from pcomm.inference.engine.memory.engine_memory import EngineMemory
from pcomm.inference.engine.request import Request, RequestOutput
from pcomm.inference.engine.request_checks import check_request
from pcomm.inference.engine.request_queue import RequestQueue
from pcomm.inference.engine.runner.model_runner import ModelRunner
from pcomm.inference.engine.sampling.prompt_logprobs import note_prompt_logprobs
from pcomm.inference.engine.sampling.sampler import Sampled, Sampler
from pcomm.inference.engine.sampling.sampling_rows import sampling_rows
from pcomm.inference.engine.sampling.stopping import stop_ids
from pcomm.inference.engine.sampling.structured.grammar_compiler import GrammarCompiler
from pcomm.inference.engine.scheduler import Scheduler
from pcomm.inference.engine.step_outputs import StepOutputs
from pcomm.inference.engine.step_plan import StepPlan
from pcomm.inference.model import Model
from pcomm.inference.roofline.host_times import HostTimes
from pcomm.inference.text.text_stream import TextStream
from pcomm.inference.text.tokenizer import Tokenizer

__all__ = ["MOST_FAILURES", "Engine"]

MOST_FAILURES = 2
"""Steps of several requests that may fail with a request which succeeds alone, before it ends."""


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
        device: Device of the model.

    Raises:
        ConfigError: A number is too small, or the model declares memory that cannot be allocated.
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
        device: str | torch.device = "cpu",
    ) -> None:
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
        )
        settings.check(specs)
        self._eos_ids = tuple(eos_ids) + tuple(tokenizer.eos_ids if tokenizer else ())
        self._tokenizer = tokenizer
        self._memory = EngineMemory(specs, settings, prefix_cache=prefix_cache, device=device)
        self._queue = RequestQueue(max_queued)
        self._scheduler = Scheduler(self._memory, self._queue, settings)
        self._times = HostTimes()
        self._runner = ModelRunner(model, self._memory, settings, device=device, times=self._times)
        self._sampler = Sampler(vocabulary, device)
        self._grammars = GrammarCompiler(tokenizer, vocabulary)
        self._live: dict[str, LiveRequest] = {}
        self._outputs = StepOutputs(self._memory.allocator, self._scheduler, self._live)
        # Requests of a step that failed; each runs a step alone.
        self._suspects: list[LiveRequest] = []
        self._num_added = 0
        self._num_steps = self._num_computed = 0
        self._is_closed = False

    @property
    def has_work(self) -> bool:
        """Whether a request runs or waits."""
        return bool(self._live)

    def add(self, request: Request) -> None:
        """Queue a request; the next steps compute it.

        Raises:
            ConfigError: The request can never be served; the message names the limit.
            QueueFullError: As many requests wait as may.
            ClosedError: The engine is closed.
        """
        self._check_open("add")
        check_request(
            request,
            known=self._live,
            vocabulary=self._settings.vocabulary,
            max_model_len=self._settings.max_model_len,
            has_tokenizer=self._tokenizer is not None,
        )
        limit = min(len(request.prompt) + request.params.max_tokens, self._settings.max_model_len)
        self._check_blocks(request, limit)
        self._queue.check_room(request.request_id)
        grammar = self._grammars.compile(request.params)
        live = LiveRequest(
            request,
            arrival=self._num_added,
            limit=limit,
            stop_ids=stop_ids(request.params, self._eos_ids),
        )
        if self._tokenizer is not None:
            params = request.params
            live.text = TextStream(
                self._tokenizer,
                params.stop,
                min_tokens=params.min_tokens,
                prompt=request.prompt,
            )
            live.is_plain = False
            live.grammar = grammar
        self._num_added += 1
        self._live[request.request_id] = live
        self._queue.insert(live)

    def step(self) -> list[RequestOutput]:
        """Compute the next tokens; collective under tensor parallelism.

        Returns:
            One output for each request that got a token or ended, in the order of the batch. A
            request whose grammar, text or step of the model raises an exception ends with
            `finish_reason` "error" and the exception as `error`. After an exception in a step of
            several requests each runs a step alone, so that those which cannot are found and the
            others go on.

        Raises:
            ClosedError: The engine is closed.
        """
        self._check_open("step")
        self._times.begin()
        plan = self._schedule()
        requests = plan.requests
        if not requests:
            return []
        self._times.lap("schedule")
        self._num_steps += 1
        self._num_computed += plan.num_tokens
        try:
            sampled = self._sample(plan)
        except Exception as error:
            return self._after_failure(plan, error)
        except BaseException:
            # An interrupt leaves states half written: what was under way is computed again.
            self._put_back(plan)
            raise
        self._times.lap("sample")
        outputs = self._outputs.advance(plan, sampled)
        self._times.lap("outputs")
        return outputs

    def abort(self, request_id: str) -> bool:
        """End a request at once, whether it runs or waits; its memory is free after the call.

        Returns:
            False if there is no such request, for example because it has finished.
        """
        live = self._live.pop(request_id, None)
        if live is None:
            return False
        if live in self._suspects:
            self._suspects.remove(live)
        self._scheduler.end(live)
        return True

    def stats(self) -> EngineStats:
        """Counters and the use of both pools."""
        blocks, slots = self._memory.uses()
        running, graphs = self._scheduler.running, self._runner.graphs
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
            looked_up_tokens=self._memory.allocator.num_looked_up,
            cached_tokens=self._memory.allocator.num_hit,
            drafted_tokens=self._outputs.num_drafted,
            accepted_tokens=self._outputs.num_accepted,
            graph_sizes=graphs.sizes if graphs else (),
            graph_refusal=graphs.refusal if graphs else "",
            host_us=self._times.medians_us(),
        )

    def close(self) -> None:
        """End all requests and free the pools; a second call does nothing."""
        for request_id in list(self._live):
            self.abort(request_id)
        self._memory.close()
        self._is_closed = True

    def _schedule(self) -> StepPlan:
        while self._suspects:
            plan = self._scheduler.schedule_alone(self._suspects.pop(0))
            if plan.chunks:
                return plan
        return self._scheduler.schedule()

    def _sample(self, plan: StepPlan) -> Sampled:
        logits = self._runner.run(plan)
        rows, of_prompts = sampling_rows(plan)
        if of_prompts.places:
            note_prompt_logprobs(logits, of_prompts)
            others = of_prompts.other_places(len(logits))
            logits = logits[torch.tensor(others, dtype=torch.int64, device=logits.device)]
        return self._sampler.sample(logits, rows)

    def _after_failure(self, plan: StepPlan, error: Exception) -> list[RequestOutput]:
        """End the request that a step has failed for, or find it by running each alone."""
        requests = plan.requests
        self._put_back(plan)
        if len(requests) == 1:
            return [self._outputs.fail(requests[0], error)]
        for live in requests:
            live.num_failures += 1
        lost = [live for live in requests if live.num_failures > MOST_FAILURES]
        self._suspects = [live for live in requests if live not in lost]
        return [self._outputs.fail(live, error) for live in lost]

    def _put_back(self, plan: StepPlan) -> None:
        """Let all requests of a step wait that did not complete; what it wrote is not used."""
        for chunk in plan.chunks:
            if chunk.saved_slot:
                self._memory.allocator.drop_saved(chunk.live, chunk.saved_slot, restore=False)
        for live in plan.requests:
            self._scheduler.preempt(live)

    def _check_blocks(self, request: Request, limit: int) -> None:
        needed = self._memory.allocator.blocks_for(limit - 1)
        if needed <= (most := self._memory.allocator.blocks.num_blocks):
            return
        raise ConfigError(
            f"Engine.add: request {request.request_id!r}",
            found=f"up to {limit} tokens need {needed} KV blocks, and num_blocks is {most}",
            why="Keys and values of a request are in memory together, so it can never finish.",
            fix="Shorten the prompt, ask for fewer max_tokens, or raise num_blocks.",
        )

    def _check_open(self, method: str) -> None:
        if self._is_closed:
            raise ClosedError(
                f"Engine.{method}",
                found="a closed engine",
                why="close() has freed its memory.",
                fix="Make a new Engine.",
            )
