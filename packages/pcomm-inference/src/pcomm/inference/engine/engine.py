"""The engine: requests come in, each step computes tokens of many of them, outputs come out."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pcomm.core import Group
from pcomm.core.errors import ClosedError, ConfigError
from pcomm.core.process.interrupts import Deferral, deferred_interrupt
from pcomm.inference.engine.engine_settings import EngineSettings
from pcomm.inference.engine.engine_stats import EngineStats
from pcomm.inference.engine.live_request import LiveRequest
from pcomm.inference.engine.memory.engine_memory import EngineMemory
from pcomm.inference.engine.memory.memory_specs import check_model
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
from pcomm.inference.engine.suspects import Suspects
from pcomm.inference.layers.packed_weight import check_batch_invariant
from pcomm.inference.model import Model
from pcomm.inference.roofline.bandwidth_meter import BandwidthMeter
from pcomm.inference.roofline.decode_roofline import DecodeRoofline
from pcomm.inference.roofline.host_times import HostTimes
from pcomm.inference.text.text_stream import TextStream
from pcomm.inference.text.tokenizer import Tokenizer

__all__ = ["Engine"]


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
            a row without regard to the others.
        device: Device of the model.
        meter: Measures the memory's bandwidth for `stats`, once for all engines that share it; None
            for one of its own.
        group: Tensor-parallel group that shares the model, whose ranks record CUDA graphs together
            or not at all; None for a model of one rank.

    Attributes:
        step_error: The exception that the last step met while the model computed or tokens were
            chosen; None if it met none. Its requests are computed again, or have ended with it.

    Raises:
        ConfigError: A number is too small, the model has no `memory_specs()` or no `step()`, or it
            declares memory that cannot be allocated. With `batch_invariant`, there are drafts, too
            few tokens in a step, or a linear layer that is not packed for it.
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
        )
        settings.check(specs)
        if batch_invariant:
            settings.check_batch_invariant()
            check_batch_invariant(model)
            prefix_cache = False
        self._eos_ids = tuple(eos_ids) + tuple(tokenizer.eos_ids if tokenizer else ())
        self._tokenizer = tokenizer
        self._memory = EngineMemory(specs, settings, prefix_cache=prefix_cache, device=device)
        self._queue = RequestQueue(max_queued)
        self._scheduler = Scheduler(
            self._memory, self._queue, settings, batch_invariant=batch_invariant
        )
        self._times = HostTimes()
        self._runner = ModelRunner(
            model, self._memory, settings, device=device, times=self._times, group=group
        )
        self._sampler = Sampler(vocabulary, device)
        self._roofline = DecodeRoofline(
            model, vocabulary=vocabulary, device=device, meter=meter or BandwidthMeter()
        )
        self._grammars = GrammarCompiler(tokenizer, vocabulary)
        self._live: dict[str, LiveRequest] = {}
        self._outputs = StepOutputs(self._memory.allocator, self._scheduler, self._live)
        self._suspects = Suspects(self._scheduler, self._live)
        self._num_added = 0
        self._num_steps = self._num_computed = 0
        self.step_error: Exception | None = None
        # Outputs of a step that an interrupt kept from the caller.
        self._computed: list[RequestOutput] = []
        # The method that changes requests and memory now, or that did not end: what an exception
        # has left half changed is not used again.
        self._changing = ""
        self._is_closed = False

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to compute, to return, or to raise."""
        return bool(self._live or self._changing or self._computed)

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
            known=self._live,
            vocabulary=self._settings.vocabulary,
            max_model_len=self._settings.max_model_len,
            has_tokenizer=self._tokenizer is not None,
        )
        limit = min(len(request.prompt) + request.params.max_tokens, self._settings.max_model_len)
        self._check_blocks(request, limit)
        self._queue.check_room(request.request_id)
        if request.grammar is not None:
            request.grammar.check(request.params, self._tokenizer, self._settings.vocabulary)
        compiled = request.grammar or self._grammars.compile(request.params)
        grammar = compiled.begin() if compiled is not None else None
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
        with deferred_interrupt():
            self._changing = "add"
            self._num_added += 1
            self._queue.insert(live)
            self._live[request.request_id] = live
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
        if not self._computed:
            with deferred_interrupt() as deferral:
                self._changing = "step"
                self._computed = self._compute(deferral)
                self._changing = ""
        # Python looks for signals at calls: nothing comes between these lines.
        outputs, self._computed = self._computed, []
        return outputs

    def _compute(self, deferral: Deferral) -> list[RequestOutput]:
        self._times.begin()
        plan = self._schedule()
        requests = plan.requests
        if not requests:
            return []
        self._times.lap("schedule")
        self.step_error = None
        self._num_steps += 1
        self._num_computed += plan.num_tokens
        try:
            sampled = deferral.heard(lambda: self._sample(plan))
        except Exception as error:
            self.step_error = error
            return self._after_failure(plan, error)
        except BaseException:
            # An interrupt leaves states half written: what was under way is computed again.
            self._put_back(plan)
            self._changing = ""
            raise
        self._times.lap("sample")
        counts = plan.decode_counts()
        outputs = self._outputs.advance(plan, sampled)
        self._times.lap("outputs")
        if counts is not None:
            self._roofline.note(counts, self._times.step_ns)
        return outputs

    def abort(self, request_id: str) -> bool:
        """End a request at once, whether it runs or waits; its memory is free after the call.

        After a change that was cut short the request is forgotten, and `close` frees the memory.

        Returns:
            False if there is no such request, for example because it has finished.
        """
        # Not for the next request of this name.
        self._computed = [one for one in self._computed if one.request_id != request_id]
        if self._changing:
            return self._live.pop(request_id, None) is not None
        if request_id not in self._live:
            return False
        with deferred_interrupt():
            self._changing = "abort"
            live = self._live.pop(request_id)
            self._scheduler.end(live)
            self._changing = ""
        return True

    def stats(self) -> EngineStats:
        """Counters, the use of both pools, and how near steps are to the limit of the memory.

        The first call measures the bandwidth of the memory with as many bytes as the model has, at
        most 1 GiB, which takes about a second on a CPU; `add` and `step` do not. Call it once
        before the first request where a later call must not wait.
        """
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
            decode=self._roofline.stats(self._runner.logits_dtype),
        )

    def close(self) -> None:
        """End all requests and free the pools; a second call does nothing."""
        for request_id in list(self._live):
            self.abort(request_id)
        if self._changing:
            self._queue.clear()
            self._scheduler.running.clear()
            self._suspects.clear()
            self._memory.discard()
        else:
            self._changing = "close"
            self._memory.close()
        self._computed.clear()
        self._is_closed, self._changing = True, ""

    def _schedule(self) -> StepPlan:
        return self._suspects.plan() or self._scheduler.schedule()

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
            self._suspects.acquit_others()
            return [self._outputs.fail(requests[0], error)]
        return [self._outputs.fail(live, error) for live in self._suspects.accuse(plan)]

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
        if self._changing:
            raise ClosedError(
                f"Engine.{method}",
                found=f"an engine whose {self._changing}() was cut short",
                why="An interrupt or an error came while requests and memory were half changed.",
                fix="Call close(), make a new Engine, and add the requests again.",
            )
