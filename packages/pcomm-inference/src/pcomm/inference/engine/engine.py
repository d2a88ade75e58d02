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
from pcomm.inference.engine.prefix_cache import PrefixCache
from pcomm.inference.engine.prompt_logprobs import note_prompt_logprobs
from pcomm.inference.engine.request import Request, RequestOutput, TokenLogprobs
from pcomm.inference.engine.request_checks import check_request
from pcomm.inference.engine.request_queue import RequestQueue
from pcomm.inference.engine.sampler import Sampled, Sampler
from pcomm.inference.engine.sampling_rows import sampling_rows
from pcomm.inference.engine.scheduler import Scheduler
from pcomm.inference.engine.speculation.verification import count_accepted
from pcomm.inference.engine.state_slots import StateSlots
from pcomm.inference.engine.step_builder import StepBuilder
from pcomm.inference.engine.step_plan import Chunk, StepPlan
from pcomm.inference.engine.stopping import stop_ids
from pcomm.inference.engine.token_acceptance import accept_tokens
from pcomm.inference.model import Model
from pcomm.inference.text.text_stream import TextStream
from pcomm.inference.text.tokenizer import Tokenizer

__all__ = ["SNAPSHOT_INTERVAL", "STATE_CHUNK", "Engine"]

STATE_CHUNK = 64
"""Tokens that kernels of recurrent layers compute at once. Chunks of a prompt, and the snapshots of
the prefix cache, end at multiples of it, so that a prompt that is cut is computed like a whole one.
"""

SNAPSHOT_INTERVAL = 256
"""Tokens between two snapshots while text is written, so that the next turn of a chat begins from
its middle; a copy for so many steps costs less than 1 % of what they move."""


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
        blocks = BlockManager(num_blocks if has_blocks else 0)
        slots = StateSlots(num_state_slots if self._pools.has_states else 0)
        self._cache: PrefixCache | None = None
        if prefix_cache and (has_blocks or self._pools.has_states):
            self._cache = PrefixCache(
                blocks,
                slots,
                block_size=block_size,
                bytes_per_block=self._pools.bytes_per_block,
                bytes_per_slot=self._pools.bytes_per_slot,
            )
        multiple = -(-STATE_CHUNK // block_size) * block_size
        self._allocator = Allocator(
            self._pools,
            blocks,
            slots,
            tables,
            self._cache,
            block_size=block_size,
            snapshot_multiple=multiple,
            snapshot_interval=-(-SNAPSHOT_INTERVAL // multiple) * multiple,
        )
        self._queue = RequestQueue(max_queued)
        self._scheduler = Scheduler(
            self._allocator,
            self._queue,
            max_batch_tokens=max_batch_tokens,
            max_requests=max_requests,
            chunk_multiple=multiple if self._pools.has_states else 1,
            speculative_tokens=speculative_tokens,
            saves_states=self._pools.has_states,
        )
        builder = StepBuilder(tables, block_size=block_size, has_blocks=has_blocks, device=device)
        self._runner = ModelRunner(model, self._pools, builder, vocabulary=vocabulary)
        self._sampler = Sampler(vocabulary, device)
        self._live: dict[str, LiveRequest] = {}
        self._num_added = 0
        self._num_steps = self._num_computed = self._num_written = 0
        self._num_drafted = self._num_accepted = 0
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
        if self._tokenizer is not None:
            params = request.params
            live.text = TextStream(self._tokenizer, params.stop, min_tokens=params.min_tokens)
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
        self._num_computed += plan.num_tokens
        try:
            sampled = self._sample(plan)
        except Exception as error:
            self._drop_saved(plan)
            return [self._fail(live, error) for live in requests]
        except BaseException:
            # An interrupt leaves states half written: what was under way is computed again.
            self._drop_saved(plan)
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
            looked_up_tokens=self._allocator.num_looked_up,
            cached_tokens=self._allocator.num_hit,
            drafted_tokens=self._num_drafted,
            accepted_tokens=self._num_accepted,
        )

    def close(self) -> None:
        """End all requests and free the pools; a second call does nothing."""
        for request_id in list(self._live):
            self.abort(request_id)
        if self._cache is not None:
            self._cache.clear()
        self._pools.free()
        self._is_closed = True

    def _sample(self, plan: StepPlan) -> Sampled:
        logits = self._runner.run(plan)
        rows, of_prompts = sampling_rows(plan)
        if of_prompts.places:
            note_prompt_logprobs(logits, of_prompts)
            logits = logits[torch.tensor(of_prompts.other_places(len(logits)))]
        return self._sampler.sample(logits, rows)

    def _advance(self, plan: StepPlan, sampled: Sampled) -> list[RequestOutput]:
        """Give each request its tokens, and end those that are complete."""
        ids, logprobs, outputs = sampled.token_ids, sampled.logprobs, []
        for place, live in enumerate(plan.decodes):
            live.num_computed += 1
            outputs.append(self._accept(live, ids[place : place + 1], logprobs[place : place + 1]))
        place = len(plan.decodes)
        for chunk in plan.chunks:
            if not chunk.is_sampled:
                chunk.live.num_computed = chunk.stop
                self._allocator.keep(chunk.live)
                continue
            behind = place + len(chunk.drafts) + 1
            right = self._settle_drafts(chunk, ids[place:behind])
            end = place + right + 1
            outputs.append(self._accept(chunk.live, ids[place:end], logprobs[place:end]))
            place = behind
        return outputs

    def _settle_drafts(self, chunk: Chunk, sampled: list[int]) -> int:
        """Note what is computed after a chunk, and return the number of drafts that were right."""
        live, right = chunk.live, count_accepted(chunk.drafts, sampled)
        live.num_computed = chunk.stop + right
        self._num_drafted += len(chunk.drafts)
        self._num_accepted += right
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
            output = accept_tokens(live, tokens, logprobs)
        except Exception as error:
            return self._fail(live, error)
        if live.num_computed >= live.keep_at:
            self._allocator.keep(live)
        self._num_written += len(output.token_ids)
        if output.finish_reason:
            del self._live[live.request_id]
            self._scheduler.end(live)
        return output

    def _fail(self, live: LiveRequest, error: Exception) -> RequestOutput:
        del self._live[live.request_id]
        self._scheduler.end(live)
        return RequestOutput(
            live.request_id,
            (),
            finish_reason="error",
            cached_tokens=live.cached_tokens or 0,
            error=error,
        )

    def _drop_saved(self, plan: StepPlan) -> None:
        for chunk in plan.chunks:
            if chunk.saved_slot:
                self._allocator.drop_saved(chunk.live, chunk.saved_slot, restore=False)

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
