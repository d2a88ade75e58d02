"""Runs a model on the tokens of a step, and says which rows of logits a token is sampled from."""

# Shape suffixes: T tokens of the step, N requests, B blocks, L rows of logits, V token ids.

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from contextlib import nullcontext
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

__all__ = ["ModelRunner", "sampling_rows"]


class ModelRunner:
    """Builds the batch of a plan, and calls the model.

    All integers of a step are appended to one array, sent to the device as one tensor and cut there
    into views; only the block tables are kept between steps.

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
                self._pack_decodes,
                recorder,
                max_requests=settings.max_requests,
                device=device,
                group=group,
            )

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> Tensor:
        """Compute the tokens of a plan.

        Returns:
            `[L, V]`: logits of the rows that the batch asks for.

        Raises:
            ConfigError: The model returned something else: no tensor, integers, or another shape.
                What the model raises passes through.
        """
        self._tables.send()
        if self.graphs is not None and not plan.chunks:
            logits = self.graphs.run(plan.decodes)
            if logits is not None:
                self._times.lap("model")
                return logits
        batch = self._build(plan)
        self._times.lap("batch")
        # Recorded steps are replayed before and after it, and not meanwhile.
        with nullcontext() if self._group is None else self._group.collectives.sequence():
            logits = self._step(batch)
        self._times.lap("model")
        return logits

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

    def _build(self, plan: StepPlan) -> StepBatch:
        """The batch of a plan: requests that decode, then chunks."""
        decodes, chunks = plan.decodes, plan.chunks
        requests = plan.requests if chunks else decodes
        contexts = [live.num_computed for live in requests]
        lengths = [1] * len(decodes)
        tokens = [live.tokens[-1] for live in decodes]
        positions = contexts[: len(decodes)]
        rows = list(range(len(decodes)))
        places = self._decode_places(decodes)
        for chunk in chunks:
            count = chunk.num_tokens
            rows += [len(tokens) + row for row in chunk.logits_rows()]
            tokens += chunk.live.tokens[chunk.start : chunk.stop]
            tokens += chunk.drafts
            positions += range(chunk.start, chunk.start + count)
            places += self._chunk_places(chunk.live, chunk.start, chunk.start + count)
            lengths.append(count)
        packed = array("q", tokens)
        for numbers in (
            positions,
            places,
            [live.state_slot for live in requests],
            [live.table_row for live in requests],
            contexts,
            rows,
        ):
            packed.extend(numbers)
        host = torch.frombuffer(packed, dtype=torch.int64)
        sent = host if self._device.type == "cpu" else host.to(self._device)
        width = max([len(live.blocks) for live in requests]) if self._has_blocks else 0
        return self._batch_of(
            sent,
            cu_seqlens=(0, *accumulate(lengths)) if chunks else tuple(range(len(requests) + 1)),
            context_lens=tuple(contexts),
            first_blocks=tuple([live.first_block for live in requests]),
            width=width,
        )

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
            packed: int64: token, position and place of keys and values of each token; state slot,
                table row and context length of each request; rows of the logits.
            cu_seqlens: Offsets of the requests in the tokens.
            context_lens: Number of tokens of each request before the step.
            first_blocks: First of the blocks of each request, where they are neighbours.
            width: Number of columns of the block tables.
        """
        num_tokens, num_requests = cu_seqlens[-1], len(context_lens)
        num_rows = packed.shape[0] - 3 * (num_tokens + num_requests)
        sizes = [num_tokens] * 3 + [num_requests] * 3 + [num_rows]
        tokens_T, positions_T, places_T, slots_N, tables_N, contexts_N, rows_L = (
            packed.split_with_sizes(sizes)
        )
        return StepBatch(
            tokens_T=tokens_T,
            positions_T=positions_T,
            cu_seqlens=cu_seqlens,
            context_lens=context_lens,
            context_lens_N=contexts_N.to(torch.int32),
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

    def _pack_decodes(self, decodes: list[RequestState], size: int) -> Tensor:
        """The integers of a step of decoding, on the host.

        Args:
            decodes: Requests, at least one.
            size: Number of requests that the step is padded to; those behind the real ones read and
                write a block and a slot that belong to no request.

        Returns:
            int64 `[7 * size]`, which `_batch_of` reads.
        """
        contexts = [live.num_computed for live in decodes]
        packed = array("q")
        for numbers in (
            [live.tokens[-1] for live in decodes],
            contexts,
            self._decode_places(decodes),
            [live.state_slot for live in decodes],
            [live.table_row for live in decodes],
            contexts,
        ):
            packed.extend(numbers)
            packed.extend([0] * (size - len(decodes)))
        packed.extend(range(size))
        return torch.frombuffer(packed, dtype=torch.int64)

    def _padded_step(self, packed: Tensor, size: int) -> Tensor:
        """A step of decoding whose integers, from `_pack_decodes`, lie on the device."""
        return self._step(
            self._batch_of(
                packed,
                cu_seqlens=tuple(range(size + 1)),
                context_lens=(1,) * size,
                first_blocks=(None,) * size,
                width=self._tables.width,
            )
        )


def sampling_rows(plan: StepPlan, logits_LV: Tensor) -> tuple[Tensor, list[SamplingRow]]:
    """The logits of a step that continue a text, and what the sampler gets for each of them.

    Of the other rows, which are of prompts, their requests note the log-probabilities.
    """
    rows = [_row(live) for live in plan.decodes]
    prompt_rows: list[int] = []
    requests: list[RequestState] = []
    start = len(rows)
    for chunk in plan.chunks:
        stop = start + len(chunk.logits_rows())
        sampled = stop - len(chunk.drafts) - 1 if chunk.is_sampled else stop
        prompt_rows += range(start, sampled)
        requests += [chunk.live] * (sampled - start)
        if chunk.is_sampled:
            rows += _draft_rows(chunk)
        start = stop
    if prompt_rows:
        device = logits_LV.device
        _note_prompt_logprobs(logits_LV[torch.tensor(prompt_rows, device=device)], requests)
        others = sorted(set(range(len(logits_LV))) - set(prompt_rows))
        logits_LV = logits_LV[torch.tensor(others, dtype=torch.int64, device=device)]
    return logits_LV, rows


def _row(live: RequestState) -> SamplingRow:
    mask = None if live.grammar is None else _mask(live, live.grammar)
    return SamplingRow(live.params, live.prompt, live.output, len(live.tokens), live.stop_ids, mask)


def _mask(live: RequestState, grammar: GrammarMatcher) -> Tensor | None:
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
