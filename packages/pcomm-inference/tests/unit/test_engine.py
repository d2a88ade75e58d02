"""Requests through the engine give the tokens that a request gives alone."""

import pytest

from pcomm.inference.engine.engine import Engine
from pcomm.inference.engine.request import Request
from pcomm.inference.engine.sampling_params import SamplingParams
from pcomm.inference.testing.toy_model import ToyModel, expected_tokens

MODELS = {
    "attention": ToyModel(attention_layers=2, state_layers=0),
    "recurrent": ToyModel(attention_layers=0, state_layers=2),
    "hybrid": ToyModel(),
}


def engine_for(model, **settings):
    given = {"vocabulary": model.vocabulary, "max_model_len": 64, "block_size": 4}
    given |= {"num_blocks": 40, "num_state_slots": 8, "max_requests": 4}
    return Engine(model, **given | settings)


def greedy(name, prompt, max_tokens, **request):
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    return Request(name, tuple(prompt), params, **request)


def run(engine):
    """All tokens by request, with the invariant of both pools after every step."""
    tokens = {}
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
        check_pools(engine)
    return tokens


def check_pools(engine):
    stats = engine.stats()
    for pool in (stats.blocks, stats.state_slots):
        assert pool.free + pool.used + pool.cached == pool.size
        assert min(pool.free, pool.used, pool.cached) >= 0


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("max_batch_tokens", [1, 3, 8, 64])
def test_requests_get_the_tokens_that_they_get_alone(kind, max_batch_tokens):
    model = MODELS[kind]
    engine = engine_for(model, max_batch_tokens=max_batch_tokens)
    prompts = [[1], [2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7, 8, 9], [5] * 13, [10, 9, 8]]
    for number, prompt in enumerate(prompts):
        engine.add(greedy(str(number), prompt, max_tokens=6 + number))
    found = run(engine)
    for number, prompt in enumerate(prompts):
        assert found[str(number)] == expected_tokens(model, prompt, 6 + number)


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_a_request_without_blocks_is_computed_again(kind):
    model = MODELS[kind]
    engine = engine_for(model, num_blocks=9)
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8], [9, 9], [3]]
    for number, prompt in enumerate(prompts):
        engine.add(greedy(str(number), prompt, max_tokens=20))
    found = run(engine)
    assert engine.stats().preemptions > 0
    for number, prompt in enumerate(prompts):
        assert found[str(number)] == expected_tokens(model, prompt, 20)
