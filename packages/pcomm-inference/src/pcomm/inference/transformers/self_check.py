"""Whether the engine's way through a model of transformers gives the logits of its own forward."""

# Shape suffixes: T tokens of one text, V token ids.

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pcomm.core.errors import ConfigError
from pcomm.inference.model import (
    KVMemory,
    KVSpec,
    LayerMemory,
    Model,
    StateMemory,
    StateSpec,
    StepBatch,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pcomm.inference.transformers.recurrent_layers import RecurrentLayer

__all__ = ["check_logits", "without_padding"]

_BLOCK_SIZE = 4
# New tokens of three texts in each step: chunks and a prompt of one token beside each other, a
# chunk beside a decode, decodes of two and of one.
_STEPS = ((5, 3, 1), (3, 1, 0), (1, 2, 1), (1, 1, 0), (1, 0, 2))
_LENGTHS = tuple(map(sum, zip(*_STEPS, strict=True)))
# How far logits may be apart, by the dtype of the logits, over their largest: the same sums in
# another order, and in fp64 parts that transformers computes in fp32. A wrong mask or position is
# apart by more in each model that was tried.
_APART = {torch.float64: 2e-6, torch.float32: 2e-4}


def check_logits(
    served: Model,
    model: PreTrainedModel,
    logits_alone: Callable[[Tensor], Tensor],
    recurrent: Sequence[RecurrentLayer],
) -> None:
    """Compare the logits of some short texts, in chunks and decodes, with those of the model alone.

    Finds on the way whether recurrent layers take several tokens behind a state.

    Args:
        served: The model as the engine runs it.
        model: The model.
        logits_alone: Gives the logits `[T, V]` of a text by the model's own forward.
        recurrent: Recurrent layers of the model.

    Raises:
        ConfigError: They differ.
    """
    for layer in recurrent:
        layer.continues = True
    difference = _difference(served, model, logits_alone)
    if difference is not None and recurrent:
        for layer in recurrent:
            layer.continues = False
        difference = _difference(served, model, logits_alone)
    if difference is not None:
        if "position_ids" not in inspect.signature(model.forward).parameters:
            difference = f"a forward that takes no position_ids, and {difference}"
        raise ConfigError(
            f"TransformersModel({type(model).__name__})",
            found=difference,
            why="The model would write other text than by its own forward, without an error.",
            fix="Use transformers' generate for this model.",
        )


def _difference(
    served: Model, model: PreTrainedModel, logits_alone: Callable[[Tensor], Tensor]
) -> str | None:
    embeddings: Any = model.get_input_embeddings()
    device, vocabulary = model.device, embeddings.num_embeddings
    texts = [
        without_padding(
            (torch.arange(length, device=device) * (7 + 4 * number) + 5 + number) % vocabulary,
            model,
        )
        for number, length in enumerate(_LENGTHS)
    ]
    alone = [logits_alone(text_T) for text_T in texts]
    limits = [
        _limit(logits_alone, text_T, logits, model.dtype)
        for text_T, logits in zip(texts, alone, strict=True)
    ]
    memory = [_pool(spec, device) for spec in served.memory_specs()]
    done = [0] * len(texts)
    for news in _STEPS:
        batch, rows = _batch(texts, done, news, device)
        logits = served.step(batch, memory).flip(0)
        wanted = torch.cat([alone[number][start:stop] for number, start, stop in rows])
        limit = max(limits)
        apart = float((logits.double() - wanted.double()).abs().max())
        if not apart <= limit:
            return (
                f"logits that are {apart:.3g} apart from those of its own forward, where rounding "
                f"explains {limit:.3g} (chunks of {news} tokens behind {tuple(done)})"
            )
        done = [before + new for before, new in zip(done, news, strict=True)]
    return None


def without_padding(tokens_T: Tensor, model: PreTrainedModel) -> Tensor:
    """Tokens, the next one for padding, to which some families give no position of its own."""
    padding = getattr(model.config.get_text_config(), "pad_token_id", None)
    if not isinstance(padding, int):
        return tokens_T
    embeddings: Any = model.get_input_embeddings()
    return torch.where(tokens_T == padding, (padding + 1) % embeddings.num_embeddings, tokens_T)


def _limit(
    logits_alone: Callable[[Tensor], Tensor], text_T: Tensor, logits_TV: Tensor, dtype: torch.dtype
) -> float:
    """What rounding explains: the dtype's bound, or some times what a shorter text changes."""
    largest = float(logits_TV.double().abs().max())
    bound = largest * _APART.get(logits_TV.dtype, 2e-4)
    if dtype.itemsize > 2:
        return bound
    shorter = logits_alone(text_T[:-3]).double() - logits_TV[:-3].double()
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
            name: torch.zeros(1 + len(_LENGTHS), *shape, dtype=spec.dtypes[name], device=device)
            for name, shape in spec.shapes.items()
        }
    )


def _batch(
    texts: list[Tensor], done: list[int], news: tuple[int, ...], device: torch.device
) -> tuple[StepBatch, list[tuple[int, int, int]]]:
    """The next tokens of each text, decodes first, and which part of which text they are."""
    # Blocks of a text in the opposite order, so that neighbours are no blocks of a row.
    sizes = [-(-length // _BLOCK_SIZE) for length in _LENGTHS]
    tables = [
        list(range(last, last - size, -1))
        for last, size in zip(accumulate(sizes), sizes, strict=True)
    ]
    wanted = [n for n in range(len(texts)) if news[n]]
    numbers = sorted(wanted, key=lambda n: not (news[n] == 1 and done[n]))
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
        cu_seqlens_N1=torch.tensor(offsets, dtype=torch.int32, device=device),
        context_lens=contexts,
        context_lens_N=torch.tensor(contexts, dtype=torch.int32, device=device),
        block_tables_NB=blocks,
        slot_mapping_T=torch.cat(slots),
        first_blocks=(None,) * len(numbers),
        state_slots_N=torch.tensor([1 + n for n in numbers], device=device),
        # Not in order, as a model might take the last ones.
        logits_rows=torch.arange(offsets[-1], device=device).flip(0),
    )
    return batch, rows
