"""The engine: requests come in, each step computes tokens of many of them, outputs come out."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pcomm.core.errors import ClosedError, ConfigError
from pcomm.inference.engine.allocator import Allocator
from pcomm.inference.engine.block_manager import BlockManager
from pcomm.inference.engine.block_tables import BlockTables
from pcomm.inference.engine.engine_stats import EngineStats, PoolUse
from pcomm.inference.engine.live_request import LiveRequest
from pcomm.inference.engine.model_runner import ModelRunner
from pcomm.inference.engine.pools import Pools
from pcomm.inference.engine.request import Request, RequestOutput, TokenLogprobs
from pcomm.inference.engine.request_checks import check_request
from pcomm.inference.engine.request_queue import RequestQueue
from pcomm.inference.engine.sampler import Sampled, Sampler
from pcomm.inference.engine.sampling_rows import sampling_rows
from pcomm.inference.engine.scheduler import Scheduler
from pcomm.inference.engine.state_slots import StateSlots
from pcomm.inference.engine.step_builder import StepBuilder
from pcomm.inference.engine.step_plan import StepPlan
from pcomm.inference.engine.stopping import finish_reason, stop_ids
from pcomm.inference.model import Model
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
        device = torch.device(device)
        self._vocabulary = vocabulary
        self._eos_ids = tuple(eos_ids) + tuple(tokenizer.eos_ids if tokenizer else ())
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._pools = Pools(
            model.memory_specs(),
            num_blocks=num_blocks,
            block_size=block_size,
            num_slots=num_state_slots,
            device=device,
        )
        has_blocks = self._pools.has_blocks
        width = -(-(max_model_len - 1) // block_size) if has_blocks else 0
        tables = BlockTables(max_requests, width, device)
        self._allocator = Allocator(
            self._pools,
            BlockManager(num_blocks if has_blocks else 0),
            StateSlots(num_state_slots if self._pools.has_states else 0),
            tables,
            block_size=block_size,
        )
        self._queue = RequestQueue(max_queued)
        self._scheduler = Scheduler(
            self._allocator,
            self._queue,
            max_batch_tokens=max_batch_tokens,
            max_requests=max_requests,
        )
        builder = StepBuilder(tables, block_size=block_size, has_blocks=has_blocks, device=device)
        self._runner = ModelRunner(model, self._pools, builder, vocabulary=vocabulary)
        self._sampler = Sampler(vocabulary, device)
        self._live: dict[str, LiveRequest] = {}
        self._num_added = 0
        self._num_steps = self._num_computed = self._num_written = 0
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
            vocabulary=self._vocabulary,
            max_model_len=self._max_model_len,
            has_tokenizer=self._tokenizer is not None,
        )
        limit = min(len(request.prompt) + request.params.max_tokens, self._max_model_len)
        self._check_blocks(request, limit)
        self._queue.check_room(request.request_id)
        live = LiveRequest(
            request,
            arrival=self._num_added,
            limit=limit,
            stop_ids=stop_ids(request.params, self._eos_ids),
        )
        self._num_added += 1
        self._live[request.request_id] = live
        self._queue.insert(live)

    def step(self) -> list[RequestOutput]:
        """Compute the next tokens; collective under tensor parallelism.

        Returns:
            One output for each request that got a token or ended, in the order of the batch. An
            exception of the model ends the requests of the batch, with `finish_reason` "error" and
            the exception as `error`; others go on.

        Raises:
            ClosedError: The engine is closed.
        """
        self._check_open("step")
        plan = self._scheduler.schedule()
        requests = plan.requests
        if not requests:
            return []
        self._num_steps += 1
        try:
            sampled = self._sample(plan)
        except Exception as error:
            return [self._fail(live, error) for live in requests]
        except BaseException:
            # An interrupt leaves states half written: what was under way is computed again.
            for live in requests:
                self._scheduler.preempt(live)
            raise
        return self._advance(plan, sampled)

    def abort(self, request_id: str) -> bool:
        """End a request at once, whether it runs or waits; its memory is free after the call.

        Returns:
            False if there is no such request, for example because it has finished.
        """
        live = self._live.pop(request_id, None)
        if live is None:
            return False
        self._scheduler.end(live)
        return True

    def stats(self) -> EngineStats:
        """Counters and the use of both pools."""
        blocks, slots = self._allocator.blocks, self._allocator.slots
        return EngineStats(
            running=len(self._scheduler.running),
            waiting=len(self._queue),
            blocks=PoolUse(
                blocks.num_blocks,
                blocks.num_free,
                blocks.num_used,
                blocks.num_cached,
                self._pools.bytes_per_block,
            ),
            state_slots=PoolUse(
                slots.num_slots,
                slots.num_free,
                slots.num_used,
                slots.num_cached,
                self._pools.bytes_per_slot,
            ),
            steps=self._num_steps,
            computed_tokens=self._num_computed,
            written_tokens=self._num_written,
            preemptions=self._scheduler.num_preemptions,
        )

    def close(self) -> None:
        """End all requests and free the pools; a second call does nothing."""
        for request_id in list(self._live):
            self.abort(request_id)
        self._pools.free()
        self._is_closed = True

    def _sample(self, plan: StepPlan) -> Sampled:
        logits = self._runner.run(plan)
        rows, prompt_places = sampling_rows(plan)
        if prompt_places:
            raise NotImplementedError
        return self._sampler.sample(logits, rows)

    def _advance(self, plan: StepPlan, sampled: Sampled) -> list[RequestOutput]:
        """Give each request its tokens, and end those that are complete."""
        outputs = []
        for place, live in enumerate(plan.decodes):
            live.num_computed += 1
            outputs.append(
                self._accept(live, [sampled.token_ids[place]], [sampled.logprobs[place]])
            )
        place = len(plan.decodes)
        for chunk in plan.chunks:
            live = chunk.live
            live.num_computed = chunk.stop
            if chunk.is_sampled:
                token, logprob = sampled.token_ids[place], sampled.logprobs[place]
                outputs.append(self._accept(live, [token], [logprob]))
                place += 1
        return outputs

    def _accept(
        self, live: LiveRequest, tokens: list[int], logprobs: list[TokenLogprobs | None]
    ) -> RequestOutput:
        reason = None
        for token in tokens:
            live.tokens.append(token)
            live.output.append(token)
            written = len(live.output)
            room = self._max_model_len - len(live.tokens)
            reason = finish_reason(live.params, live.stop_ids, token, written, room)
        if reason:
            del self._live[live.request_id]
            self._scheduler.end(live)
        return RequestOutput(
            request_id=live.request_id,
            token_ids=tuple(tokens),
            finish_reason=reason,
            logprobs=tuple(entry for entry in logprobs if entry is not None),
            cached_tokens=live.cached_tokens,
        )

    def _fail(self, live: LiveRequest, error: Exception) -> RequestOutput:
        del self._live[live.request_id]
        self._scheduler.end(live)
        return RequestOutput(live.request_id, (), finish_reason="error", error=error)

    def _check_blocks(self, request: Request, limit: int) -> None:
        needed = self._allocator.blocks_for(limit - 1)
        if needed <= (most := self._allocator.blocks.num_blocks):
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
