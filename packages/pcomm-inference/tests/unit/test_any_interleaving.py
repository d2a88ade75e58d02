"""Whatever runs beside it, a request gets the tokens that it gets alone, and pools never leak."""

from collections import Counter
from functools import cache
from random import Random
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_support.toy_model import ToyModel, expected_tokens
from pcomm.inference.engine import allocator
from pcomm.inference.engine.engine import Engine
from pcomm.inference.engine.request import QueueFullError, Request
from pcomm.inference.sampling.params import SamplingParams

# Few tokens, so that requests begin alike and guesses are right now and then.
MODELS = {
    "attention": ToyModel(3, attention_layers=2, state_layers=0),
    "recurrent": ToyModel(3, attention_layers=0, state_layers=1),
    "hybrid": ToyModel(3),
    # Layers that see three and four tokens: a request runs in fewer blocks than it has tokens for.
    "windows": ToyModel(3, attention_layers=2, state_layers=0, window=3),
    "windows and states": ToyModel(3, attention_layers=2, window=3),
}
LONGEST = 24
# Logits are integers up to 10,007. Drawn ones need their place, penalized ones the text before.
SETTINGS = [
    {"temperature": 0},
    {"temperature": 4000.0},
    {"temperature": 0, "frequency_penalty": 1500.0},
]

engines = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([1, 2, 3, 4, 8]),
        "max_batch_tokens": st.integers(1, 12),
        "max_requests": st.integers(1, 4),
        "num_state_slots": st.integers(1, 9),
        "prefix_cache": st.booleans(),
        "speculative_tokens": st.sampled_from([0, 1, 3]),
    }
)
prompts = st.one_of(
    st.lists(st.integers(0, 2), min_size=1, max_size=10),
    # What begins alike, with tails of every length.
    st.integers(1, 14).map(lambda length: ([0, 1, 2, 2, 0, 1, 1] * 2)[:length]),
)
adds = st.tuples(st.just("add"), prompts, st.integers(1, 9), st.integers(0, 1), st.integers(0, 2))
actions = st.lists(
    st.one_of(
        adds,
        adds,
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("abort"), st.integers(0, 7)),
    ),
    min_size=2,
    max_size=20,
)


@cache
def alone(kind, prompt, number, most, seed):
    """Tokens of one request; `number` is that of its settings."""
    model = MODELS[kind]
    if number == 0:
        return expected_tokens(model, prompt, most)
    engine = Engine(
        model,
        vocabulary=model.vocabulary,
        max_model_len=LONGEST,
        num_blocks=2,
        num_state_slots=1,
        prefix_cache=False,
    )
    params = SamplingParams(**SETTINGS[number], max_tokens=most, seed=seed)
    engine.add(Request("alone", prompt, params))
    found = []
    while engine.has_work:
        for output in engine.step():
            found += output.token_ids
    return found


def check_pools(engine):
    stats = engine.stats()
    for pool in (stats.blocks, stats.state_slots):
        assert pool.free + pool.used + pool.cached == pool.size
        assert min(pool.free, pool.used, pool.cached) >= 0
    if not engine.has_work:
        assert stats.blocks.used == stats.state_slots.used == 0


def fewest_blocks(model, settings):
    """Blocks for the longest request alone."""
    size, longest = settings["block_size"], LONGEST
    if model.window is None:
        return -(-longest // size)
    held = min(
        longest - 1, model.window + model.attention_layers - 2 + settings["max_batch_tokens"]
    )
    return min(-(-(longest - 1) // size), (held + size - 2) // size + 1)


def run(kind, settings, extra_blocks, state_chunk, steps):
    model = MODELS[kind]
    with patch.multiple(allocator, STATE_CHUNK=state_chunk, SNAPSHOT_INTERVAL=2 * state_chunk):
        engine = Engine(
            model,
            vocabulary=model.vocabulary,
            max_model_len=LONGEST,
            num_blocks=fewest_blocks(model, settings) + extra_blocks,
            max_queued=6,
            **settings,
        )
    requests, found, aborted, num_steps = {}, {}, set(), 0

    def step():
        for output in engine.step():
            assert output.error is None
            assert output.request_id not in aborted
            found[output.request_id] += output.token_ids
        assert engine.step_error is None
        check_pools(engine)

    for name, *given_values in steps:
        if name == "step":
            for _ in range(given_values[0]):
                step()
        elif name == "abort":
            request_id = str(given_values[0])
            if engine.abort(request_id):
                aborted.add(request_id)
            check_pools(engine)
        else:
            prompt, most, priority, number = given_values
            params = SamplingParams(**SETTINGS[number], max_tokens=most, seed=len(requests))
            request = Request(str(len(requests)), tuple(prompt), params, priority)
            try:
                engine.add(request)
            except QueueFullError:
                continue
            requests[request.request_id] = tuple(prompt), number, most, params.seed
            found[request.request_id] = []
    while engine.has_work:
        step()
        num_steps += 1
        assert num_steps < 2000, "the engine makes no progress"
    for request_id, request in requests.items():
        wanted = alone(kind, *request)
        if request_id in aborted:
            assert found[request_id] == wanted[: len(found[request_id])]
        else:
            assert found[request_id] == wanted
    stats = engine.stats()
    engine.close()
    return stats


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("number", [25, pytest.param(500, marks=pytest.mark.soak)])
def test_each_request_gets_the_tokens_that_it_gets_alone(kind, number):
    @settings(max_examples=number)
    @given(
        settings=engines,
        extra_blocks=st.integers(0, 12),
        state_chunk=st.integers(1, 4),
        steps=actions,
    )
    def check(settings, extra_blocks, state_chunk, steps):
        run(kind, settings, extra_blocks, state_chunk, steps)

    check()


@pytest.mark.parametrize("number", [50, pytest.param(400, marks=pytest.mark.soak)])
def test_long_runs_meet_all_that_may_happen(number):
    """Random runs that are longer than those above; what they met is counted."""
    draw, met = Random(7), Counter()
    for _ in range(number):
        settings = {
            "block_size": draw.choice([1, 2, 3, 4, 8]),
            "max_batch_tokens": draw.randint(1, 12),
            "max_requests": draw.randint(2, 4),
            "num_state_slots": draw.randint(1, 9),
            "prefix_cache": draw.random() < 0.8,
            "speculative_tokens": draw.choice([0, 1, 3]),
        }
        steps = []
        for _ in range(draw.randint(10, 25)):
            kind = draw.choices(["add", "step", "abort"], [11, 6, 3])[0]
            prompt = [draw.randint(0, 2) for _ in range(draw.randint(1, 10))]
            if draw.random() < 0.5:
                prompt = ([0, 1, 2, 2, 0, 1, 1] * 2)[: draw.randint(1, 14)]
            values = {
                "add": (prompt, draw.randint(1, 9), draw.randint(0, 1), draw.randint(0, 2)),
                "step": (draw.randint(1, 4),),
                "abort": (draw.randint(0, 9),),
            }
            steps.append((kind, *values[kind]))
        # The last one is short of slots before it is short of blocks.
        model = draw.choice(list(MODELS)[:-1])
        stats = run(model, settings, draw.choice([0, 0, 3, 12]), draw.randint(1, 4), steps)
        for name in ("preemptions", "cached_tokens", "accepted_tokens"):
            met[name, model] += getattr(stats, name)
        met["rejected", model] += stats.drafted_tokens - stats.accepted_tokens
    # Slots are given once and for all, so a recurrent model preempts nothing.
    never = {name for name, count in met.items() if not count}
    assert never == {("preemptions", "recurrent")}
