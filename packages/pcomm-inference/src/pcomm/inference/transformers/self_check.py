"""Whether the engine's way through a model of transformers gives the logits of its own forward."""

# Shape suffixes: T tokens of one text, V token ids.

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pcomm.core.errors import ConfigError
from pcomm.inference.model import KVMemory, KVSpec, LayerMemory, StateMemory, StateSpec, StepBatch

if TYPE_CHECKING:
    from pcomm.inference.transformers.adapter import TransformersModel

__all__ = ["check_logits"]

_BLOCK_SIZE = 4
# New tokens of two texts in each step: chunks beside each other, then a chunk beside a decode, then
# two decodes. The second text ends a step before the first.
_STEPS = ((5, 3), (3, 1), (1, 2), (1, 1), (1, 0))
_LENGTHS = tuple(map(sum, zip(*_STEPS, strict=True)))
# How far logits may be apart, by the dtype of the logits, over their largest: the same sums in
# another order. A wrong mask or position is apart by more in each model that was tried.
_APART = {torch.float64: 1e-8, torch.float32: 2e-4}


def check_logits(adapter: TransformersModel) -> None:
    """Compare the logits of two short texts, in chunks and decodes, with those of the model alone.

    Raises:
        ConfigError: They differ.
    """
    difference = _difference(adapter)
    if difference is not None and any(layer.continues for layer in adapter.recurrent):
        for layer in adapter.recurrent:
            layer.continues = False
        difference = _difference(adapter)
    if difference is not None:
        raise ConfigError(
            f"TransformersModel({type(adapter.model).__name__})",
            found=difference,
            why="The model would write other text than by its own forward, without an error.",
            fix="Use transformers' generate for this model.",
        )


def _difference(adapter: TransformersModel) -> str | None:
    model = adapter.model
    device, vocabulary = model.device, model.get_input_embeddings().num_embeddings
    texts = [
        (torch.arange(length, device=device) * (7 + 4 * number) + 5 + number) % vocabulary
        for number, length in enumerate(_LENGTHS)
    ]
    alone = [adapter.logits_alone(text_T) for text_T in texts]
    limits = [_limit(adapter, text_T, logits) for text_T, logits in zip(texts, alone, strict=True)]
    memory = [_pool(spec, device) for spec in adapter.memory_specs()]
    done = [0, 0]
    for news in _STEPS:
        batch, rows = _batch(texts, done, news, device)
        logits = adapter.step(batch, memory)
        wanted = torch.cat([alone[number][start:stop] for number, start, stop in rows])
        limit = max(limits)
        apart = float((logits.double() - wanted.double()).abs().max())
        if not apart <= limit:
            return (
                f"logits that are {apart:.3g} apart from those of its own forward, where rounding "
                f"explains {limit:.3g} (chunks of {news[0]} and {news[1]} tokens behind "
                f"{done[0]} and {done[1]})"
            )
        done = [before + new for before, new in zip(done, news, strict=True)]
    return None


def _limit(adapter: TransformersModel, text_T: Tensor, logits_TV: Tensor) -> float:
    """What rounding explains: some times as much as a shorter text changes, or the dtype's bound."""
    largest = float(logits_TV.double().abs().max())
    bound = largest * _APART.get(logits_TV.dtype, 2e-4)
    if adapter.model.dtype.itemsize > 2:
        return bound
    shorter = adapter.logits_alone(text_T[:-3]).double() - logits_TV[:-3].double()
    return max(bound, 8 * float(shorter.abs().max()), largest * 0.02)


def _pool(spec: object, device: torch.device) -> LayerMemory | None:
    num_blocks = 1 + sum(-(-length // _BLOCK_SIZE) for length in _LENGTHS)
    if isinstance(spec, KVSpec):
        shape = (num_blocks, _BLOCK_SIZE, spec.heads)
        return KVMemory(
            *(
                torch.zeros(*shape, width, dtype=spec.dtype, device=device)
                for width in (spec.head_dim, spec.width_of_values)
            )
        )
    assert isinstance(spec, StateSpec)
    return StateMemory(
        {
            name: torch.zeros(3, *shape, dtype=spec.dtypes[name], device=device)
            for name, shape in spec.shapes.items()
        }
    )


def _batch(
    texts: list[Tensor], done: list[int], news: tuple[int, ...], device: torch.device
) -> tuple[StepBatch, list[tuple[int, int, int]]]:
    """The next tokens of both texts, decodes first, and which part of which text they are."""
    # Blocks of the first text in the opposite order, so that neighbours are no blocks of a row.
    first = -(-_LENGTHS[0] // _BLOCK_SIZE)
    tables = [
        list(range(first, 0, -1)),
        list(range(first + 1, first + 1 + -(-_LENGTHS[1] // _BLOCK_SIZE))),
    ]
    numbers = sorted((n for n in (0, 1) if news[n]), key=lambda n: not (news[n] == 1 and done[n]))
    rows = [(n, done[n], done[n] + news[n]) for n in numbers]
    positions = [torch.arange(start, stop, device=device) for _, start, stop in rows]
    width = max(-(-stop // _BLOCK_SIZE) for _, _, stop in rows)
    blocks = torch.tensor(
        [(tables[n] + [0] * width)[:width] for n in numbers], dtype=torch.int32, device=device
    )
    offsets = [0]
    for _, start, stop in rows:
        offsets.append(offsets[-1] + stop - start)
    contexts = tuple(done[n] for n in numbers)
    slots = [
        torch.tensor(tables[n], device=device)[p // _BLOCK_SIZE] * _BLOCK_SIZE + p % _BLOCK_SIZE
        for n, p in zip(numbers, positions, strict=True)
    ]
    batch = StepBatch(
        tokens_T=torch.cat([texts[n][start:stop] for n, start, stop in rows]),
        positions_T=torch.cat(positions),
        cu_seqlens=tuple(offsets),
        context_lens=contexts,
        context_lens_N=torch.tensor(contexts, dtype=torch.int32, device=device),
        block_tables_NB=blocks,
        slot_mapping_T=torch.cat(slots),
        first_blocks=(None,) * len(numbers),
        state_slots_N=torch.tensor([1 + n for n in numbers], device=device),
        logits_rows=torch.arange(offsets[-1], device=device),
    )
    return batch, rows
