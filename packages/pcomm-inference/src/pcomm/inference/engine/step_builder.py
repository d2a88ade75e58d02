"""Makes the tensors of a step out of Python integers: two copies to the device in all."""

# Shape suffixes: T tokens of the step, N requests, B blocks, L rows of logits.

from __future__ import annotations

from array import array
from itertools import accumulate

import torch
from torch import Tensor

from pcomm.inference.engine.block_tables import BlockTables
from pcomm.inference.engine.live_request import LiveRequest
from pcomm.inference.engine.step_plan import StepPlan
from pcomm.inference.step_batch import StepBatch

__all__ = ["StepBuilder"]


class StepBuilder:
    """Builds step batches.

    All integers of a step are appended to one array, sent to the device as one tensor and cut there
    into views; only the block tables are kept between steps.

    Args:
        tables: Block tables of the running requests.
        block_size: Tokens of a block.
        has_blocks: Whether the model keeps keys and values.
        device: Device of the model.
    """

    def __init__(
        self, tables: BlockTables, *, block_size: int, has_blocks: bool, device: torch.device
    ) -> None:
        self._tables = tables
        self._block_size = block_size
        self._has_blocks = has_blocks
        self._device = device

    def build(self, plan: StepPlan) -> StepBatch:
        """The batch of a plan: requests that decode, then chunks."""
        decodes, chunks = plan.decodes, plan.chunks
        requests = plan.requests if chunks else decodes
        contexts = [live.num_computed for live in requests]
        lengths = [1] * len(decodes)
        tokens = [live.tokens[-1] for live in decodes]
        positions = contexts[: len(decodes)]
        rows = list(range(len(decodes)))
        slots = self._decode_slots(decodes)
        for chunk in chunks:
            count = chunk.num_tokens
            rows += [len(tokens) + row for row in chunk.logits_rows()]
            tokens += chunk.live.tokens[chunk.start : chunk.stop]
            tokens += chunk.drafts
            positions += range(chunk.start, chunk.start + count)
            slots += self._chunk_slots(chunk.live, chunk.start, chunk.start + count)
            lengths.append(count)
        num_tokens, num_requests = len(tokens), len(requests)
        packed = array("q", tokens)
        packed.extend(positions)
        packed.extend(slots)
        packed.extend([live.state_slot for live in requests])
        packed.extend([live.table_row for live in requests])
        packed.extend(contexts)
        packed.extend(rows)
        sent = self._send(packed)
        sizes = [num_tokens] * 3 + [num_requests] * 3 + [len(rows)]
        tokens_T, positions_T, slots_T, states_N, tables_N, contexts_N, rows_L = sent.split(sizes)
        width = max([len(live.blocks) for live in requests]) if self._has_blocks else 0
        return StepBatch(
            tokens_T=tokens_T,
            positions_T=positions_T,
            cu_seqlens=(0, *accumulate(lengths)) if chunks else tuple(range(num_requests + 1)),
            context_lens=tuple(contexts),
            context_lens_N=contexts_N.to(torch.int32),
            block_tables_NB=self._tables.select(tables_N, width),
            kv_slots_T=slots_T,
            first_blocks=tuple([live.first_block for live in requests]),
            state_slots_N=states_N,
            logits_rows=rows_L,
        )

    def _decode_slots(self, decodes: list[LiveRequest]) -> list[int]:
        if not self._has_blocks:
            return [0] * len(decodes)
        size = self._block_size
        return [
            live.blocks[(at := live.num_computed) // size] * size + at % size for live in decodes
        ]

    def _chunk_slots(self, live: LiveRequest, start: int, stop: int) -> list[int] | range:
        if not self._has_blocks:
            return [0] * (stop - start)
        size = self._block_size
        if live.first_block is not None:
            first = live.first_block * size
            return range(first + start, first + stop)
        blocks = live.blocks
        return [blocks[at // size] * size + at % size for at in range(start, stop)]

    def _send(self, packed: array[int]) -> Tensor:
        host = torch.frombuffer(packed, dtype=torch.int64)
        return host if self._device.type == "cpu" else host.to(self._device)
