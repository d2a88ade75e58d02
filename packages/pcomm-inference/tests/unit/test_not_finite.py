"""What a model leaves behind that gives NaN once, in logits or in what it keeps."""

import math

import pytest
import torch

from pcomm.inference.engine.engine import Engine
from pcomm.inference.engine.request import Request
from pcomm.inference.model import KVMemory, KVSpec, StateMemory, StateSpec
from pcomm.inference.sampling.params import SamplingParams
from pcomm.inference.sampling.sampler import NotFiniteLogitsError

# Longer than two of the pieces behind which states are copied.
PROMPT = (1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5) * 11
PIECE = 64


class Sums:
    """The next token is the sum of all before it; `bad` in a token makes NaN of what is kept."""

    def __init__(self, *kinds: str) -> None:
        specs = {
            "attention": KVSpec(heads=1, head_dim=1, dtype=torch.float64),
            "recurrent": StateSpec({"sum": ()}, {"sum": torch.float64}),
        }
        self._specs = [specs[kind] for kind in kinds]
        self.bad = -1
        self.bad_rows = -1

    def memory_specs(self):
        return self._specs

    def step(self, batch, memory):
        values = batch.tokens_T.double()
        values[batch.tokens_T == self.bad] = torch.nan
        found = torch.zeros_like(values)
        for pools in memory:
            found += _kept_by(pools, batch, values)
        # NaN where a sum has one.
        logits = found[:, None] * 0 - (torch.arange(11) - (found % 11)[:, None]).abs()
        logits[batch.tokens_T == self.bad_rows] = torch.nan
        return logits[batch.logits_rows]


def _kept_by(pools, batch, values):
    found = torch.zeros_like(values)
    spans = list(zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False))[: batch.num_requests]
    if isinstance(pools, StateMemory):
        states = pools.read("sum", batch)
        for number, (start, stop) in enumerate(spans):
            found[start:stop] = states[number] + values[start:stop].cumsum(0)
            states[number] = found[stop - 1]
        pools.write("sum", batch, states)
        return found
    assert isinstance(pools, KVMemory)
    flat, size = pools.keys.view(-1), pools.keys.shape[1]
    flat[batch.slot_mapping_T] = values
    for number, (start, stop) in enumerate(spans):
        blocks = batch.block_tables_NB[number].tolist()
        places = [blocks[at // size] * size + at % size for at in range(batch.context_lens[number])]
        before = flat[torch.tensor(places, dtype=torch.int64)].sum()
        found[start:stop] = before + values[start:stop].cumsum(0)
    return found


def engine_for(model: Sums, **settings) -> Engine:
    given = {"vocabulary": 11, "max_model_len": 256, "block_size": 16, "num_blocks": 60}
    return Engine(model, **given | {"num_state_slots": 20, "max_batch_tokens": PIECE} | settings)


def asked(name: str, prompt=PROMPT, **params) -> Request:
    return Request(name, prompt, SamplingParams(temperature=0, max_tokens=3, **params))


def run(engine: Engine) -> dict:
    """The tokens or the error of each request, and how many of its tokens were cached."""
    found: dict = {}
    while engine.has_work:
        for output in engine.step():
            tokens, _, cached = found.get(output.request_id, ((), None, 0))
            found[output.request_id] = (
                tokens + output.token_ids,
                output.error,
                output.cached_tokens or cached,
            )
    stats = engine.stats()
    assert stats.blocks.used == stats.state_slots.used == 0
    for pool in (stats.blocks, stats.state_slots):
        assert pool.free + pool.cached == pool.size
    return found


KINDS = [("attention",), ("recurrent",), ("attention", "recurrent")]


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
@pytest.mark.parametrize("ends", ["error", "abort"])
def test_what_a_request_left_that_ended_so_is_served_to_no_other(kinds, ends) -> None:
    model = Sums(*kinds)
    engine = engine_for(model)
    engine.add(asked("expected"))
    expected = run(engine)["expected"][0]
    assert len(expected) == 3
    engine.close()

    engine = engine_for(model)
    model.bad = 3
    engine.add(asked("first"))
    if ends == "abort":
        # In the middle of its prompt, before anything says that it is wrong; the next request
        # begins from what it left, and is the last one to do so.
        engine.step()
        engine.step()
        engine.abort("first")
        model.bad = -1
        engine.add(asked("second"))
        _, error, cached = run(engine)["second"]
        assert cached > 0
    else:
        _, error, _ = run(engine)["first"]
        model.bad = -1
    assert isinstance(error, NotFiniteLogitsError)
    engine.add(asked("again"))
    assert run(engine)["again"] == (expected, None, 0)
    # What gave tokens is kept as ever.
    engine.add(asked("once more"))
    tokens, error, cached = run(engine)["once more"]
    assert (tokens, error) == (expected, None)
    assert cached >= 2 * PIECE


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_what_others_hang_on_stays_in_the_cache(kinds) -> None:
    model = Sums(*kinds)
    engine = engine_for(model)
    shared = PROMPT[: 2 * PIECE]
    for token in (9, 8):
        engine.add(asked(f"with {token}", shared + (token,) * 70))
        run(engine)
    model.bad = 10
    engine.add(asked("bad", (*shared, 10, *[6] * 70)))
    assert isinstance(run(engine)["bad"][1], NotFiniteLogitsError)
    engine.add(asked("other", (*shared, *[5] * 70)))
    assert run(engine)["other"][2] == 2 * PIECE


@pytest.mark.parametrize("place", [1, 70, 152])
def test_log_probabilities_of_a_prompt_that_are_no_numbers_end_their_request(place) -> None:
    model = Sums("attention")
    engine = engine_for(model, max_batch_tokens=50)
    model.bad_rows = 10
    prompt = (*PROMPT[:place], 10, *PROMPT[place + 1 :])
    engine.add(asked("asks", prompt, prompt_logprobs=2))
    engine.add(asked("does not", prompt))
    engine.add(asked("other", prompt_logprobs=0))
    found = run(engine)
    assert isinstance(found["asks"][1], NotFiniteLogitsError)
    assert found["asks"][0] == ()
    for name in ("does not", "other"):
        assert found[name][1] is None
        assert len(found[name][0]) == 3
    # It is computed no further than the first such row.
    engine.add(asked("at once", (1, 10, *PROMPT), prompt_logprobs=2))
    (output,) = engine.step()
    assert isinstance(output.error, NotFiniteLogitsError)
    assert not engine.has_work


def test_log_probabilities_of_a_prompt_may_be_minus_infinity() -> None:
    class Never(Sums):
        def step(self, batch, memory):
            logits = super().step(batch, memory)
            logits[:, 2] = -torch.inf
            return logits

    engine = engine_for(Never("attention"))
    engine.add(asked("asks", prompt_logprobs=0))
    entries = []
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            entries += output.prompt_logprobs
    assert [math.isinf(entry.logprob) for entry in entries] == [t == 2 for t in PROMPT[1:]]
