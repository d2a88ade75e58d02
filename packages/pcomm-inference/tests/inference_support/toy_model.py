"""A model of integers whose next token depends on every token before it, in any order of steps.

Its logits are integers that a float holds exactly, so two ways of computing them are equal or one
of them is wrong. `expected_tokens` computes the same without steps, pools or tensors.
"""

# Shape suffixes: T tokens of a step, L rows of logits, V token ids.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pcomm.inference.model import (
    KVMemory,
    KVSpec,
    LayerMemory,
    LayerSpec,
    StateMemory,
    StateSpec,
    StepBatch,
)

__all__ = ["ToyModel", "expected_tokens"]

_PRIME = 1_000_003


@dataclass(frozen=True)
class ToyModel:
    """Layers that hash all tokens of a request: by what they keep of each, and by a state.

    Args:
        vocabulary: Number of token ids.
        attention_layers: Number of layers that keep a number for each token.
        state_layers: Number of layers that keep a hash and the last two tokens.
        window: Number of tokens that the first attention layer sees, each other one more than that
            before it; None for all.
    """

    vocabulary: int = 11
    attention_layers: int = 1
    state_layers: int = 1
    window: int | None = None

    def window_of(self, layer: int) -> int | None:
        """Number of tokens that an attention layer sees."""
        return None if self.window is None else self.window + layer

    def memory_specs(self) -> Sequence[LayerSpec]:
        """Attention layers, one that keeps nothing, then recurrent layers."""
        kept = [
            KVSpec(1, 1, torch.float64, window=self.window_of(layer))
            for layer in range(self.attention_layers)
        ]
        state = StateSpec({"hash": (), "halo": (2,)}, {"hash": torch.int64, "halo": torch.float64})
        return [*kept, None] + [state] * self.state_layers

    def step(self, batch: StepBatch, memory: Sequence[LayerMemory | None]) -> Tensor:
        """Logits of the rows that are asked for, `[L, V]` in float64."""
        hashes = [0] * batch.tokens_T.shape[0]
        for layer, pools in enumerate(memory):
            if isinstance(pools, KVMemory):
                _attend(layer, batch, pools, hashes, self.window_of(layer))
            elif isinstance(pools, StateMemory):
                _recur(layer, batch, pools, hashes)
        rows = [_logits(hashes[row], self.vocabulary) for row in batch.logits_rows.tolist()]
        return torch.tensor(rows, dtype=torch.float64).view(-1, self.vocabulary)


def expected_tokens(
    model: ToyModel, prompt: Sequence[int], max_tokens: int, *, eos_ids: Sequence[int] = ()
) -> list[int]:
    """The likeliest tokens that follow a prompt, up to `max_tokens` or a token that ends it."""
    tokens, written = list(prompt), list[int]()
    while len(written) < max_tokens and not (written and written[-1] in eos_ids):
        hashes = [0] * len(tokens)
        for layer in range(model.attention_layers):
            kept = [_kept(layer, token, found) for token, found in zip(tokens, hashes, strict=True)]
            hashes = _added(hashes, _attended(kept, model.window_of(layer)))
        for layer in range(model.state_layers):
            state, found = 0, []
            for position, token in enumerate(tokens):
                halo = sum(before + 1 for before in tokens[max(position - 2, 0) : position])
                number = layer + model.attention_layers + 1
                state = _next_state(number, state, token, hashes[position], halo)
                found.append(state)
            hashes = _added(hashes, found)
        logits = _logits(hashes[-1], model.vocabulary)
        written.append(logits.index(max(logits)))
        tokens.append(written[-1])
    return written


def _kept(layer: int, token: int, found: int) -> int:
    """What attention keeps of a token: from the second layer on, of all tokens before it, too."""
    return (token * 7 + found * 3 + layer + 1) % _PRIME


def _attended(kept: Sequence[int], window: int | None = None) -> list[int]:
    """A hash of each begin of a list, or of its last part, in which the order counts."""
    if window is not None:
        parts = [kept[max(end - window, 0) : end] for end in range(1, len(kept) + 1)]
        return [_attended(part)[-1] for part in parts]
    found, all_found = 0, []
    for number in kept:
        found = (found * 131 + number) % _PRIME
        all_found.append(found)
    return all_found


def _next_state(layer: int, state: int, token: int, found: int, halo: int) -> int:
    return (state * 31 + (token + 1) * 17 + found * 3 + halo * 5 + layer) % _PRIME


def _added(hashes: Sequence[int], more: Sequence[int]) -> list[int]:
    return [(one + other) % _PRIME for one, other in zip(hashes, more, strict=True)]


def _logits(found: int, vocabulary: int) -> list[int]:
    # A permutation of the hash for each id, so that ties are rare and no id is preferred.
    return [(found * (2 * token + 3) + token * 7919) % 10_007 for token in range(vocabulary)]


def _attend(
    layer: int, batch: StepBatch, pools: KVMemory, hashes: list[int], window: int | None
) -> None:
    flat, size = pools.keys.view(-1), pools.keys.shape[1]
    tokens = batch.tokens_T.tolist()
    new = [_kept(layer, token, found) for token, found in zip(tokens, hashes, strict=True)]
    flat[batch.slot_mapping_T] = torch.tensor(new, dtype=flat.dtype)
    tables = batch.block_tables_NB.tolist()
    for number, (before, blocks) in enumerate(zip(batch.context_lens, tables, strict=True)):
        start, stop = batch.cu_seqlens[number : number + 2]
        total = before + stop - start
        seen = 0 if window is None else max(before + 1 - window, 0)
        places = [blocks[at // size] * size + at % size for at in range(seen, total)]
        # Block 0 belongs to no request.
        assert min(places) >= size
        first = batch.first_blocks[number]
        if first is not None:
            assert places == list(range(first * size + seen, first * size + total))
        kept = flat[torch.tensor(places)].long().tolist()
        for row, found in enumerate(_attended(kept, window)[before - seen :], start=start):
            hashes[row] = (hashes[row] + found) % _PRIME


def _recur(layer: int, batch: StepBatch, pools: StateMemory, hashes: list[int]) -> None:
    states, halos = pools.read("hash", batch).tolist(), pools.read("halo", batch).tolist()
    tokens = batch.tokens_T.tolist()
    for number in range(batch.num_requests):
        for row in range(*batch.cu_seqlens[number : number + 2]):
            halo = int(sum(halos[number]))
            state = _next_state(layer, states[number], tokens[row], hashes[row], halo)
            states[number] = state
            halos[number] = [halos[number][1], tokens[row] + 1]
            hashes[row] = (hashes[row] + state) % _PRIME
    pools.write("hash", batch, torch.tensor(states))
    pools.write("halo", batch, torch.tensor(halos))
