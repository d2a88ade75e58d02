"""Makes the tensors of a step out of Python integers: two copies to the device in all."""

# Shape suffixes: T tokens of the step, N requests, B blocks, L rows of logits.

from __future__ import annotations

from array import array
from itertools import accumulate

import torch
from torch import Tensor

from pcomm.inference.engine.live_request import LiveRequest
from pcomm.inference.engine.runner.block_tables import BlockTables
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
        has_blocks: True if the model keeps keys and values.
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
        packed = array("q", tokens)
        for numbers in (
            positions,
            slots,
            [live.state_slot for live in requests],
            [live.table_row for live in requests],
            contexts,
            rows,
        ):
            packed.extend(numbers)
        host = torch.frombuffer(packed, dtype=torch.int64)
        sent = host if self._device.type == "cpu" else host.to(self._device)
        width = max([len(live.blocks) for live in requests]) if self._has_blocks else 0
        return self.batch_of(
            sent,
            cu_seqlens=(0, *accumulate(lengths)) if chunks else tuple(range(len(requests) + 1)),
            context_lens=tuple(contexts),
            first_blocks=tuple([live.first_block for live in requests]),
            width=width,
        )

    def pack_decodes(self, decodes: list[LiveRequest], size: int) -> Tensor:
        """The integers of a step of decoding, on the host.

        Args:
            decodes: Requests, at least one.
            size: Number of requests that the step is padded to; those behind the real ones read and
                write a block and a slot that belong to no request.

        Returns:
            int64 `[7 * size]`, which `batch_of` reads.
        """
        contexts = [live.num_computed for live in decodes]
        packed = array("q")
        for numbers in (
            [live.tokens[-1] for live in decodes],
            contexts,
            self._decode_slots(decodes),
            [live.state_slot for live in decodes],
            [live.table_row for live in decodes],
            contexts,
        ):
            packed.extend(numbers)
            packed.extend([0] * (size - len(decodes)))
        packed.extend(range(size))
        return torch.frombuffer(packed, dtype=torch.int64)

    def batch_of(
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
        tokens_T, positions_T, slots_T, states_N, tables_N, contexts_N, rows_L = (
            packed.split_with_sizes(sizes)
        )
        return StepBatch(
            tokens_T=tokens_T,
            positions_T=positions_T,
            cu_seqlens=cu_seqlens,
            context_lens=context_lens,
            context_lens_N=contexts_N.to(torch.int32),
            block_tables_NB=self._tables.select(tables_N, width),
            kv_slots_T=slots_T,
            first_blocks=first_blocks,
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
