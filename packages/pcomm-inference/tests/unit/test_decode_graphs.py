"""Steps of decoding from recordings give the tokens of eager ones, whatever they are padded to."""

from itertools import pairwise
from unittest.mock import patch

import pytest
import torch

from pcomm.core.errors import ClosedError
from pcomm.inference.engine import runner
from pcomm.inference.engine.decode_graphs import DecodeGraphs
from pcomm.inference.engine.engine import Engine
from pcomm.inference.engine.request import Request
from pcomm.inference.model import KVSpec, StateSpec
from pcomm.inference.sampling.params import SamplingParams

VOCABULARY = 13


class OnDevice:
    """A hash of all tokens, by operations on tensors alone, so that a step can be recorded."""

    def __init__(self):
        self.eager_sizes = []

    def memory_specs(self):
        state = StateSpec({"hash": ()}, {"hash": torch.float64})
        return [KVSpec(heads=1, head_dim=1, dtype=torch.float64), state]

    def step(self, batch, memory):
        if batch.num_decodes == batch.num_requests:
            self.eager_sizes.append(batch.num_requests)
            return self.decode(batch, memory)
        tokens = batch.tokens_T.tolist()
        memory[0].keys.view(-1)[batch.slot_mapping_T] = batch.tokens_T.double() + 1
        states = memory[1].read("hash", batch)
        for number in range(batch.num_requests):
            for row in range(*batch.cu_seqlens[number : number + 2]):
                states[number] = (states[number] * 3 + tokens[row] + 1) % 1009
        memory[1].write("hash", batch, states)
        # A prompt only has to be right at its last token; none of them begins in the cache.
        totals = [
            sum(token + 1 for token in tokens[start:stop])
            for start, stop in pairwise(batch.cu_seqlens)
        ]
        return self.logits(torch.tensor(totals, dtype=torch.float64) + states)

    def decode(self, batch, memory):
        # What a step is padded with belongs to no request.
        real = batch.state_slots_N[batch.state_slots_N > 0].tolist()
        assert len(set(real)) == len(real) == int((batch.slot_mapping_T > 0).sum())
        keys, size = memory[0].keys.view(-1), memory[0].keys.shape[1]
        keys.index_copy_(0, batch.slot_mapping_T, batch.tokens_T.double() + 1)
        width = batch.block_tables_NB.shape[1] * size
        places = batch.block_tables_NB.long()[:, :, None] * size + torch.arange(size)
        is_seen = torch.arange(width) <= batch.context_lens_N[:, None]
        totals = (keys[places.flatten(1)] * is_seen).sum(1)
        states = (memory[1].read("hash", batch) * 3 + batch.tokens_T + 1) % 1009
        memory[1].write("hash", batch, states)
        return self.logits((totals + states).index_select(0, batch.logits_rows))

    def logits(self, hashes):
        ids = torch.arange(VOCABULARY, dtype=torch.float64)
        return (hashes[:, None] * (2 * ids + 3) + ids * 7919) % 10_007


class Replay:
    """Records by keeping the function, and its result where a graph would have it."""

    def warm_up(self, body):
        body()

    def record(self, body):
        result = body().clone()
        return result, lambda: result.copy_(body())


class Refuse(Replay):
    def record(self, body):
        raise RuntimeError("operation not permitted when stream is capturing")


class NoMemory(Replay):
    def warm_up(self, body):
        raise MemoryError("out of memory")


class RoomForOne(Replay):
    """Has memory for one recording."""

    def __init__(self):
        self.num_recorded = 0

    def record(self, body):
        if self.num_recorded:
            raise MemoryError("out of memory")
        self.num_recorded += 1
        return super().record(body)


def tokens_of(recorder, prompts, begin=lambda engine: None, **settings):
    model = OnDevice()
    with patch.object(runner, "recorder_for", lambda device: recorder):
        sizes = {"max_model_len": 30, "block_size": 3, "num_blocks": 40, "num_state_slots": 6}
        engine = Engine(model, vocabulary=VOCABULARY, max_requests=6, **sizes | settings)
    begin(engine)
    for number, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0, max_tokens=4 + 2 * number)
        engine.add(Request(str(number), tuple(prompt), params))
    found = {}
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            found.setdefault(output.request_id, []).extend(output.token_ids)
    return found, engine.stats(), model


PROMPTS = [[1, 2, 3, 4], [5], [6, 7], [8, 9, 10, 11, 12], [1, 1, 1]]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_replayed_steps_give_the_same_tokens(prefix_cache):
    eager, stats, model = tokens_of(None, PROMPTS, prefix_cache=prefix_cache)
    assert stats.graph_sizes == ()
    assert max(model.eager_sizes) == 5
    found, stats, model = tokens_of(Replay(), PROMPTS, prefix_cache=prefix_cache)
    assert found == eager
    # 5 and 3 requests are padded; the largest size is that of the engine.
    assert stats.graph_sizes == (1, 2, 4, 6)
    assert set(model.eager_sizes) == {1, 2, 4, 6}
    assert stats.graph_refusal == ""


@pytest.mark.parametrize(
    ("recorder", "reason"),
    [
        (Refuse(), "RuntimeError: operation not permitted when stream is capturing"),
        (NoMemory(), "MemoryError: out of memory"),
    ],
)
def test_a_model_that_cannot_be_recorded_runs_eagerly_and_says_why(recorder, reason):
    eager, _, _ = tokens_of(None, PROMPTS)
    found, stats, _ = tokens_of(recorder, PROMPTS)
    assert found == eager
    assert stats.graph_sizes == ()
    assert stats.graph_refusal == reason
    assert f"graphs: none {reason}\n" in str(stats)


LARGEST = [64, 32, 16, 8, 4, 2, 1]


@pytest.mark.parametrize(
    ("largest", "sizes"),
    [
        (1, [1]),
        (2, [2, 1]),
        (3, [3, 2, 1]),
        (6, [6, 4, 2, 1]),
        (8, [8, 4, 2, 1]),
        (65, [65, *LARGEST]),
    ],
)
def test_all_sizes_are_recorded_at_once_from_the_largest(largest, sizes):
    made = []

    def padding(size):
        made.append(size)
        return torch.zeros(1, dtype=torch.int64)

    graphs = DecodeGraphs(
        lambda packed, size: packed.repeat(size, 1),
        padding,
        Replay(),
        max_requests=largest,
        device=torch.device("cpu"),
    )
    graphs.record_all()
    assert made == sizes
    assert all(graphs.of(number) is not None for number in range(1, largest + 1))
    assert made == sizes


def test_an_engine_that_has_recorded_all_records_none_in_a_step():
    eager, _, _ = tokens_of(None, PROMPTS)
    found, stats, model = tokens_of(Replay(), PROMPTS, begin=Engine.record_graphs)
    assert found == eager
    assert stats.graph_sizes == (1, 2, 4, 6)
    # Of each the warm-up and the recording, before the first request.
    assert model.eager_sizes[:8] == [6, 6, 4, 4, 2, 2, 1, 1]
    # On a device without graphs there is nothing to do.
    assert tokens_of(None, PROMPTS, begin=Engine.record_graphs)[0] == eager


@pytest.mark.parametrize("recorder", [None, Replay()])
def test_a_closed_engine_records_nothing_and_says_so(recorder):
    with pytest.raises(ClosedError, match=r"Engine\.record_graphs: a closed engine"):
        tokens_of(recorder, [], begin=lambda engine: (engine.close(), engine.record_graphs()))


def test_what_was_recorded_before_one_failed_is_replayed_on():
    graphs = DecodeGraphs(
        lambda packed, size: packed.repeat(size, 1),
        lambda size: torch.zeros(1, dtype=torch.int64),
        RoomForOne(),
        max_requests=6,
        device=torch.device("cpu"),
    )
    first = graphs.of(2)
    # Neither another size nor, from then on, one that would have fitted.
    assert [graphs.of(num_requests) for num_requests in (3, 5, 1)] == [None] * 3
    assert (graphs.sizes, graphs.refusal) == ((2,), "MemoryError: out of memory")
    assert graphs.of(2) is first
    assert first.run(torch.tensor([7])).tolist() == [[7], [7]]
