"""Runs a model on the tokens of a step, and says which rows of logits a token is sampled from."""

# Shape suffixes: T tokens of the step, N requests, B blocks, L rows of logits, V token ids.

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from pcomm.core import Group
from pcomm.core.errors import ConfigError
from pcomm.inference.engine.allocator import Allocator
from pcomm.inference.engine.decode_graphs import DecodeGraphs, recorder_for
from pcomm.inference.engine.limits import EngineSettings
from pcomm.inference.engine.request import RequestState
from pcomm.inference.engine.scheduler import Chunk, StepPlan
from pcomm.inference.engine.stats import HostTimes
from pcomm.inference.model import Model, StepBatch
from pcomm.inference.sampling.grammars import GrammarMatcher
from pcomm.inference.sampling.params import SamplingRow
from pcomm.inference.sampling.sampler import not_finite, token_logprobs
from pcomm.inference.upload import packed_int32, unpacked_int32, upload

__all__ = ["ModelRunner", "sampling_rows", "without_prompts"]


class ModelRunner:
    """Builds the batch of a plan, and calls the model.

    All integers of a step go to the device in one copy before the model is started, with what the
    sampler is told, and are cut there into views; only the block tables are kept between steps.

    Args:
        model: The model.
        allocator: Allocator of the pools of its layers, and of the block tables.
        settings: Sizes of vocabulary, blocks and steps.
        device: Device of the model.
        times: Times of the phases of a step.
        group: Ranks that share the model; None for one.

    Attributes:
        graphs: Recorded steps of decoding; None on a device without.
        logits_dtype: Dtype of the logits of the last step; fp32 before the first.
    """

    def __init__(
        self,
        model: Model,
        allocator: Allocator,
        settings: EngineSettings,
        *,
        device: torch.device,
        times: HostTimes,
        group: Group | None = None,
    ) -> None:
        self._model = model
        self._pools, self._tables = allocator.pools, allocator.tables
        self._vocabulary = settings.vocabulary
        self._times = times
        self.logits_dtype = torch.float32
        self._block_size, self._has_blocks = settings.block_size, allocator.pools.has_blocks
        self._device, self._group = device, group
        self.graphs: DecodeGraphs | None = None
        if (recorder := recorder_for(device)) is not None:
            self.graphs = DecodeGraphs(
                self._padded_step,
                lambda size: self._pack(StepPlan(), [], [], range(size + 1)),
                recorder,
                max_requests=settings.max_requests,
                device=device,
                group=group,
            )

    @torch.inference_mode()
    def record_graphs(self) -> None:
        """Record the steps of decoding of all sizes, where the device records any."""
        if self.graphs is not None:
            self.graphs.record_all()

    @torch.inference_mode()
    def run(self, plan: StepPlan, told: Sequence[Tensor] = ()) -> tuple[Tensor, Sequence[Tensor]]:
        """Compute the tokens of a plan.

        Args:
            plan: The tokens.
            told: int64 on the host, what else the device is told; `[]` each.

        Returns:
            `[L, V]`: logits of the rows that the batch asks for; and `told` on the device.

        Raises:
            ConfigError: The model returned something else: no tensor, integers, or another shape.
                What the model raises passes through.
        """
        decodes, chunks = plan.decodes, plan.chunks
        requests = plan.requests if chunks else decodes
        graph = None
        if self.graphs is not None and not chunks:
            graph = self.graphs.of(len(decodes))
        contexts = [live.num_computed for live in requests]
        padding = 0 if graph is None else graph.size - len(decodes)
        lengths = [1] * (len(decodes) + padding) + [chunk.num_tokens for chunk in chunks]
        cu_seqlens = tuple(accumulate(lengths, initial=0))
        changes = self._tables.changes()
        parts = [self._pack(plan, requests, contexts, cu_seqlens), *changes, *told]
        packed, *others = upload(parts, self._device)
        self._tables.apply(others[: len(changes)])
        if graph is not None:
            self._times.lap("batch")
            logits = graph.run(packed)[: len(decodes)]
        else:
            batch = self._batch_of(
                packed,
                cu_seqlens=cu_seqlens,
                context_lens=tuple(contexts),
                first_blocks=tuple([live.first_block for live in requests]),
                width=max([len(live.blocks) for live in requests]) if self._has_blocks else 0,
            )
            self._times.lap("batch")
            # Recorded steps are replayed before and after it, and not meanwhile.
            with nullcontext() if self._group is None else self._group.collectives.sequence():
                logits = self._step(batch)
        self._times.lap("model")
        return logits, others[len(changes) :]

    def _step(self, batch: StepBatch) -> Tensor:
        logits = self._model.step(batch, self._pools.memories)
        expected = (batch.logits_rows.shape[0], self._vocabulary)
        if not isinstance(logits, Tensor):
            found = f"a {type(logits).__name__}"
        elif not logits.is_floating_point():
            found = f"logits of {logits.dtype}"
        elif tuple(logits.shape) != expected:
            found = f"logits of shape {list(logits.shape)}"
        else:
            self.logits_dtype = logits.dtype
            return logits
        raise ConfigError(
            f"Engine.step: {type(self._model).__name__}.step",
            found=found,
            why=f"The batch asks for {expected[0]} rows of floating-point numbers, and the "
            f"vocabulary is {expected[1]}.",
            fix="Return the logits of batch.logits_rows as a tensor, one for each id of the "
            "vocabulary.",
        )

    def _pack(
        self,
        plan: StepPlan,
        requests: Sequence[RequestState],
        contexts: list[int],
        cu_seqlens: Sequence[int],
    ) -> Tensor:
        """The integers of a plan, requests that decode before chunks, as `_batch_of` reads them.

        Args:
            plan: The tokens.
            requests: Its requests.
            contexts: Number of tokens of each that are computed.
            cu_seqlens: Offsets of the requests in the tokens. There may be more requests of one
                token behind those of a plan without chunks: they read and write a block and a slot
                that belong to no request.

        Returns:
            int64 on the host, one dimension.
        """
        decodes = plan.decodes
        tokens = [live.tokens[-1] for live in decodes]
        positions = contexts[: len(decodes)]
        places = self._decode_places(decodes)
        padding = len(cu_seqlens) - 1 - len(requests)
        rows = list(range(len(decodes) + padding))
        for chunk in plan.chunks:
            rows += [len(tokens) + row for row in chunk.logits_rows()]
            tokens += chunk.live.tokens[chunk.start : chunk.stop]
            tokens += chunk.drafts
            stop = chunk.start + chunk.num_tokens
            positions += range(chunk.start, stop)
            places += self._chunk_places(chunk.live, chunk.start, stop)
        nothing = [0] * padding
        # Contexts first, where they are aligned: a kernel reads them.
        packed = packed_int32([*contexts, *nothing, *cu_seqlens])
        for numbers in (
            tokens,
            positions,
            places,
            [live.state_slot for live in requests],
            [live.table_row for live in requests],
        ):
            packed.extend(numbers)
            packed.extend(nothing)
        packed.extend(rows)
        return torch.frombuffer(packed, dtype=torch.int64)

    def _batch_of(
        self,
        packed: Tensor,
        *,
        cu_seqlens: tuple[int, ...],
        context_lens: tuple[int, ...],
        first_blocks: tuple[int | None, ...],
        width: int,
    ) -> StepBatch:
        """The batch whose integers lie in one tensor on the device; only operations of the device.

        Args:
            packed: int64: context lengths and `cu_seqlens`, of 32 bits; token, position and place
                of keys and values of each token; state slot and table row of each request; rows
                of the logits.
            cu_seqlens: Offsets of the requests in the tokens.
            context_lens: Number of tokens of each request before the step.
            first_blocks: First of the blocks of each request, where they are neighbours.
            width: Number of columns of the block tables.
        """
        num_tokens, num_requests = cu_seqlens[-1], len(context_lens)
        sizes = [num_requests + 1] + [num_tokens] * 3 + [num_requests] * 2
        sizes.append(packed.shape[0] - sum(sizes))
        narrow, tokens_T, positions_T, places_T, slots_N, tables_N, rows_L = (
            packed.split_with_sizes(sizes)
        )
        contexts_N, offsets_N1 = unpacked_int32(narrow, 2 * num_requests + 1).split_with_sizes(
            [num_requests, num_requests + 1]
        )
        return StepBatch(
            tokens_T=tokens_T,
            positions_T=positions_T,
            cu_seqlens=cu_seqlens,
            cu_seqlens_N1=offsets_N1,
            context_lens=context_lens,
            context_lens_N=contexts_N,
            block_tables_NB=self._tables.select(tables_N, width),
            slot_mapping_T=places_T,
            first_blocks=first_blocks,
            state_slots_N=slots_N,
            logits_rows=rows_L,
        )

    def _decode_places(self, decodes: list[RequestState]) -> list[int]:
        if not self._has_blocks:
            return [0] * len(decodes)
        size = self._block_size
        return [
            live.blocks[(at := live.num_computed) // size] * size + at % size for live in decodes
        ]

    def _chunk_places(self, live: RequestState, start: int, stop: int) -> list[int] | range:
        if not self._has_blocks:
            return [0] * (stop - start)
        size = self._block_size
        if live.first_block is not None:
            first = live.first_block * size
            return range(first + start, first + stop)
        blocks = live.blocks
        return [blocks[at // size] * size + at % size for at in range(start, stop)]

    def _padded_step(self, packed: Tensor, size: int) -> Tensor:
        """A step of decoding whose integers lie on the device."""
        return self._step(
            self._batch_of(
                packed,
                cu_seqlens=tuple(range(size + 1)),
                context_lens=(1,) * size,
                first_blocks=(None,) * size,
                width=self._tables.width,
            )
        )


def sampling_rows(plan: StepPlan) -> list[SamplingRow]:
    """What the sampler gets for each row of the logits of a step that continues a text."""
    rows = [_row(live) for live in plan.decodes]
    for chunk in plan.chunks:
        if chunk.is_sampled:
            rows += _draft_rows(chunk)
    return rows


def without_prompts(plan: StepPlan, logits_LV: Tensor) -> Tensor:
    """The logits of `sampling_rows`.

    Of the other rows, which are of prompts, their requests note the log-probabilities.
    """
    prompt_rows: list[int] = []
    sampled_rows = list(range(len(plan.decodes)))
    requests: list[RequestState] = []
    start = len(plan.decodes)
    for chunk in plan.chunks:
        stop = start + len(chunk.logits_rows())
        sampled = stop - len(chunk.drafts) - 1 if chunk.is_sampled else stop
        prompt_rows += range(start, sampled)
        sampled_rows += range(sampled, stop)
        requests += [chunk.live] * (sampled - start)
        start = stop
    if not prompt_rows:
        return logits_LV
    indices = [torch.tensor(rows, dtype=torch.int64) for rows in (prompt_rows, sampled_rows)]
    of_prompts_R, sampled_L = upload(indices, logits_LV.device)
    _note_prompt_logprobs(logits_LV[of_prompts_R], requests)
    return logits_LV[sampled_L]


def _row(live: RequestState) -> SamplingRow:
    allowed = None if live.grammar is None else partial(_allowed_words, live, live.grammar)
    params, stop_ids = live.params, live.stop_ids
    return SamplingRow(params, live.prompt, live.output, len(live.tokens), stop_ids, allowed)


def _allowed_words(live: RequestState, grammar: GrammarMatcher) -> Tensor | None:
    """What the grammar allows; an error is noted, so that other rows are sampled."""
    try:
        return grammar.allowed_words()
    except Exception as error:
        live.error = error
        return None


def _draft_rows(chunk: Chunk) -> list[SamplingRow]:
    """A row behind the known tokens, and one behind each draft as if those before were right."""
    live = chunk.live
    rows = [_row(live)]
    output = array("q", live.output)
    for number, draft in enumerate(chunk.drafts, start=1):
        output.append(draft)
        position = len(live.tokens) + number
        rows.append(SamplingRow(live.params, live.prompt, output[:], position, live.stop_ids))
    return rows


def _note_prompt_logprobs(logits_RV: Tensor, requests: Sequence[RequestState]) -> None:
    """Append to the request of each row the log-probabilities of its next known token.

    Logits that are no numbers give it an error instead, which ends it.
    """
    chosen, asked = [], []
    counts: dict[str, int] = {}
    for live in requests:
        # The first row of a request is that of the first token, which gives the second one.
        number = counts.get(live.request_id, len(live.prompt_logprobs)) + 1
        counts[live.request_id] = number
        chosen.append(live.prompt[number])
        asked.append(live.params.prompt_logprobs or 0)
    for live, entry in zip(requests, token_logprobs(logits_RV, chosen, asked), strict=True):
        live.prompt_logprobs.append(entry)
        # A logit that is NaN or infinite, or minus infinity in all, makes all of these NaN.
        if math.isnan(entry.logprob) and live.error is None:
            live.error = not_finite(entry.logprob)
