"""What `stats()` says of steps of decoding: their bytes, and the limit of the memory."""

import pytest
import torch
from torch import nn

from inference_support.toy_model import ToyModel
from pcomm.inference import Engine, Request
from pcomm.inference.layers import pack_weights
from pcomm.inference.model import KVSpec, StateSpec
from pcomm.inference.roofline import BandwidthMeter, ExpertWeights, StepWeights
from pcomm.inference.roofline.decode_stats import DecodeCounts, DecodeRoofline, MemoryBandwidth
from pcomm.inference.roofline.step_bytes import step_weights_of
from pcomm.inference.sampling.params import SamplingParams

# A token in memory: key and value in fp64. A state: a hash and two tokens of eight bytes each.
TOKEN, STATE, LOGIT = 16, 24, 8
SPEED = MemoryBandwidth(copy=1e6, sum=3e6, matrix_vector=2e6)


class Meter(BandwidthMeter):
    """Says the same of every device, and remembers what it was asked to measure."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, torch.device]] = []

        def measure(num_bytes: int, device: torch.device) -> MemoryBandwidth:
            self.asked.append((num_bytes, device))
            return SPEED

        super().__init__(measure)


def measured() -> Meter:
    meter = Meter()
    meter.bandwidth(torch.device("cpu"), 0)
    return meter


MEASURED = measured()


def engine_for(
    model: ToyModel, meter: BandwidthMeter | None = MEASURED, **settings: object
) -> Engine:
    sizes = {"max_model_len": 64, "block_size": 4, "num_blocks": 40, "num_state_slots": 8}
    return Engine(model, vocabulary=model.vocabulary, meter=meter, **sizes | settings)


def request(name: str, prompt: list[int], max_tokens: int) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return Request(name, tuple(prompt), params)


def run(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def test_a_step_moves_what_its_requests_have_and_write():
    engine = engine_for(ToyModel(attention_layers=3, state_layers=2))
    engine.add(request("long", [1, 2, 3, 4, 5, 6, 7], 9))
    engine.add(request("short", [3, 1], 9))
    engine.step()
    # The tokens of prompts are no step of decoding.
    assert engine.stats().decode is None
    engine.step()
    decode = engine.stats().decode
    assert (decode.steps, decode.num_requests) == (1, 2)
    # Keys and values of 7 and 2 tokens are read, and two are written.
    assert decode.moved.keys_values == 3 * (7 + 2 + 2) * TOKEN
    assert decode.moved.states == 2 * 2 * 2 * STATE
    assert decode.moved.logits == 2 * 11 * LOGIT
    assert decode.moved.weights == 0
    assert not decode.is_upper_bound
    # Each step reads two tokens more; of an even number of steps it is the lower one.
    for number in range(2, 6):
        engine.step()
        tokens = 11 + 2 * ((number - 1) // 2)
        assert engine.stats().decode.moved.keys_values == 3 * tokens * TOKEN
    assert decode.floor_ms == 1e3 * decode.moved.total / 3e6
    assert decode.ratio == decode.floor_ms / decode.step_ms


def test_a_step_with_a_prompt_or_a_part_of_it_does_not_count():
    engine = engine_for(ToyModel(), max_batch_tokens=4)
    engine.add(request("first", [1, 2], 20))
    engine.step()
    for _ in range(3):
        engine.step()
    assert engine.stats().decode.steps == 3
    engine.add(request("second", [1, 2, 3, 4, 5, 6, 7, 8], 20))
    for _ in range(3):
        engine.step()
        assert engine.stats().decode.steps == 3
    engine.step()
    assert (engine.stats().decode.steps, engine.stats().steps) == (4, 8)


def test_drafts_are_tokens_of_a_step_of_decoding():
    # With two ids the last tokens are always found earlier in the text.
    model = ToyModel(vocabulary=2, attention_layers=1, state_layers=0)
    found = {}
    for drafts in (0, 3):
        engine = engine_for(model, speculative_tokens=drafts, num_state_slots=0)
        engine.add(request("a", [0, 1, 1, 0, 0, 0, 1, 0, 1, 1, 1], 12))
        engine.step()
        engine.step()
        found[drafts] = engine.stats().decode
        assert engine.stats().drafted_tokens == drafts
        run(engine)
        stats = engine.stats()
        # Without states no step computes a token again: all but the prompt's are of decoding.
        assert stats.decode.steps == stats.steps - 1
    # One token and three drafts behind it, in the place of one token.
    assert found[3].moved.logits == 4 * found[0].moved.logits == 4 * 2 * LOGIT
    assert found[3].moved.keys_values == found[0].moved.keys_values + 3 * TOKEN


def test_a_token_is_read_again_where_a_request_was_preempted_and_that_does_not_count():
    engine = engine_for(ToyModel(), num_blocks=6, prefix_cache=False)
    engine.add(request("a", [1, 2, 3, 4, 5], 14))
    engine.add(request("b", [1, 2, 3, 4, 6], 14))
    run(engine)
    stats = engine.stats()
    assert stats.preemptions > 0
    # Two prompts in one step, and one request again for each preemption.
    assert stats.decode.steps == stats.steps - 1 - stats.preemptions


def test_two_engines_in_one_process_count_their_own_steps():
    first, second = engine_for(ToyModel()), engine_for(ToyModel(state_layers=0))
    first.add(request("a", [1, 2, 3], 6))
    second.add(request("a", [1] * 9, 3))
    while first.has_work or second.has_work:
        first.step()
        second.step()
    assert (first.stats().decode.steps, second.stats().decode.steps) == (5, 2)
    assert first.stats().decode.moved.states > 0
    assert second.stats().decode.moved.states == 0
    untouched = engine_for(ToyModel())
    assert untouched.stats().decode is None


def test_the_engine_measures_nothing():
    meter = Meter()
    engines = [engine_for(ToyModel(), meter) for _ in range(2)]
    for engine in engines:
        engine.add(request("a", [1, 2, 3], 3))
        run(engine)
        assert engine.stats().decode is None
    assert meter.asked == []
    # Engines that share a meter share what it has measured; a toy has less than is ever measured.
    meter.bandwidth(torch.device("cpu"), 7)
    assert [engine.stats().decode.steps for engine in engines] == [2, 2]
    assert meter.asked == [(2**16, torch.device("cpu"))]
    alone = engine_for(ToyModel(), None)
    alone.add(request("a", [1, 2, 3], 3))
    run(alone)
    assert alone.stats().decode is None


def test_a_device_is_measured_once_for_each_number_of_threads(monkeypatch):
    meter, threads = Meter(), 1
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for device, size in (("cpu", 2**20), ("cuda:0", 5), ("cpu", 7), ("cuda:1", 2**40)):
        assert meter.bandwidth(torch.device(device), size) == SPEED
    # As many bytes as the model has; on a GPU more than its cache holds, and never above 1 GiB.
    assert [size for size, _ in meter.asked] == [2**20, 2**28, 2**30]
    threads = 2
    meter.bandwidth(torch.device("cpu"), 2**30 + 1)
    assert meter.asked[3] == (2**30, torch.device("cpu"))


def test_a_gpu_that_is_full_is_measured_with_fewer_bytes():
    asked = []

    def measure(num_bytes, device):
        asked.append(num_bytes)
        if num_bytes > room:
            raise torch.OutOfMemoryError("no room")
        return SPEED

    room = 2**26
    assert BandwidthMeter(measure).bandwidth(torch.device("cuda"), 2**30) == SPEED
    assert asked == [2**30, 2**28, 2**26]
    room = 0
    with pytest.raises(torch.OutOfMemoryError):
        BandwidthMeter(measure).bandwidth(torch.device("cuda"), 2**30)


class Plain(nn.Module):
    """A table of 10 rows, another one, a layer, a buffer, and a layer that may be tied."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(10, 4), nn.Embedding(99, 4, dtype=torch.bfloat16)
        self.layer, self.head = nn.Linear(4, 6), nn.Linear(4, 10, bias=False)
        self.register_buffer("scale", torch.ones(3, dtype=torch.float64), persistent=False)
        if tied:
            self.head.weight = self.tokens.weight

    def memory_specs(self):
        return [KVSpec(1, 4, torch.bfloat16), StateSpec({}, {})]


@pytest.mark.parametrize(("tied", "per_token"), [(False, 16 + 8), (True, 8)])
def test_of_a_table_that_nothing_else_reads_a_token_reads_one_row(tied, per_token):
    found = step_weights_of(Plain(tied=tied))
    assert found == StepWeights(4 * (4 * 6 + 6) + 24 + 160, per_token)
    assert found.most_read(3) == 304 + 3 * per_token
    assert found.is_exact(3)


def test_what_a_model_declares_comes_before_what_it_has():
    class Declared(Plain):
        def step_weights(self):
            return StepWeights(5)

    assert step_weights_of(Declared(tied=True)) == StepWeights(5)
    assert step_weights_of(ToyModel()) == StepWeights(0)
    # A table of its own kind it has to name.
    module = nn.Sequential(nn.Linear(4, 10, bias=False), nn.Linear(4, 3, bias=False))
    assert StepWeights.of(module) == StepWeights(160 + 48)
    assert StepWeights.of(module, tables=[module[0]]) == StepWeights(48, 16)


def test_a_weight_that_was_packed_counts_as_before() -> None:
    # In fp32, which is packed with any instructions.
    model = nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 512, bias=False))
    before = StepWeights.of(model)
    assert pack_weights(model) == ("0", "1")
    assert StepWeights.of(model) == before
    shared = nn.Linear(512, 512, bias=False)
    both = nn.ModuleList([shared, nn.Linear(512, 512, bias=False)])
    both[1].weight = shared.weight
    pack_weights(both)
    assert StepWeights.of(both).every_step == 4 * 512 * 512


def test_experts_count_as_often_as_tokens_can_meet_them():
    module = nn.Sequential(nn.Linear(4, 2, bias=False), nn.Linear(4, 80, bias=False))
    own = ExpertWeights(num_experts=8, per_token=3, bytes_each=160)
    weights = StepWeights.of(module, experts=[(module[1], own)])
    assert weights.every_step == 32
    assert [weights.most_read(n) - 32 for n in (1, 2, 3, 9)] == [480, 960, 1280, 1280]
    assert weights.largest == 32 + 1280
    # Two tokens may meet the same expert, and one cannot meet the same twice.
    assert [weights.is_exact(n) for n in (1, 2)] == [True, False]
    shared = StepWeights(32, 0, (ExpertWeights(8, 3, 160, on_ranks=True),))
    assert not shared.is_exact(1)


def test_the_line_says_what_was_measured():
    roofline = DecodeRoofline(
        Plain(tied=True), vocabulary=10, device=torch.device("cpu"), meter=MEASURED, kept=3
    )
    assert roofline.stats(torch.float32) is None
    for tokens, milliseconds in [(1, 500), (4, 1), (1, 2), (4, 9)]:
        roofline.note(DecodeCounts(tokens, tokens, 100), milliseconds * 1_000_000)
    found = roofline.stats(torch.bfloat16)
    # Of the last three; the mean is of all.
    assert (found.steps, found.mean_ms, found.step_ms, found.num_requests) == (4, 128.0, 2.0, 4)
    assert found.moved.total == 304 + 4 * 8 + 104 * 16 + 4 * 10 * 2
    assert str(found) == "a decode step 2 ms, floor 693 us (2.08 kB at 3 MB/s), ratio 0.35"
    weights = StepWeights(2**31, 0, (ExpertWeights(8, 3, 10**6),))
    roofline._known = (weights, roofline._known[1])
    assert "floor 718 s (at most 2.16 GB at 3 MB/s)" in str(roofline.stats(torch.bfloat16))
