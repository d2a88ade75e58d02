"""An engine over paged attention: each request gets the bits that it gets alone."""

from __future__ import annotations

import random

import pytest
import torch

from inference_bench.plain_llama import PlainLlama, Shape
from pcomm.inference import Engine, Request, SamplingParams

SHAPE = Shape("small", 2, 64, 6, 2, 16, 64, 128)
LENGTHS = (1, 5, 17, 40, 66, 130, 190, 200)
MOST_TOKENS = 16

Written = list[tuple[int, float]]


def prompt(index: int) -> tuple[int, ...]:
    chance = random.Random(index)
    return tuple(chance.randrange(SHAPE.vocabulary) for _ in range(LENGTHS[index]))


def written(
    model: PlainLlama, chosen: list[int], *, num_blocks: int, **limits: int
) -> dict[int, Written]:
    """Tokens of each request, with the log-probabilities that the model gave them."""
    sizes = {"max_model_len": 256, "num_blocks": num_blocks, "num_state_slots": 2, **limits}
    engine = Engine(model, vocabulary=SHAPE.vocabulary, prefix_cache=False, **sizes)
    params = SamplingParams(temperature=0.0, max_tokens=MOST_TOKENS, ignore_eos=True, logprobs=0)
    for index in chosen:
        engine.add(Request(str(index), prompt(index), params))
    found: dict[int, Written] = {index: [] for index in chosen}
    while engine.has_work:
        for output in engine.step():
            found[int(output.request_id)] += [
                (one.token_id, one.logprob) for one in output.logprobs
            ]
    stats = engine.stats()
    assert (stats.preemptions > 0) == (num_blocks < 40)
    engine.close()
    return found


@pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(),
    reason="the order of sums in torch's products is known for AVX-512 BF16 alone",
)
def test_bits_do_not_depend_on_batch_chunks_blocks_or_preemption() -> None:
    model = PlainLlama(SHAPE, 256)
    everyone = list(range(len(LENGTHS)))
    alone: dict[int, Written] = {}
    for index in everyone:
        alone |= written(model, [index], num_blocks=64)
    assert all(len(tokens) == MOST_TOKENS for tokens in alone.values())
    assert len({token for tokens in alone.values() for token, _ in tokens}) > 8
    assert written(model, everyone, num_blocks=64) == alone
    assert written(model, everyone, num_blocks=64, max_batch_tokens=24) == alone
    assert written(model, everyone, num_blocks=22) == alone
    assert written(model, everyone, num_blocks=900, block_size=1) == alone
    assert written(model, everyone[::-1], num_blocks=64, speculative_tokens=3) == alone
