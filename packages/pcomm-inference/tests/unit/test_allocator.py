"""Which places requests get, and after which tokens a state is copied for others."""

import pytest
import torch

from inference_support.toy_model import ToyModel
from pcomm.inference.engine.allocator import SNAPSHOT_INTERVAL, STATE_CHUNK, Allocator
from pcomm.inference.engine.limits import EngineSettings
from pcomm.inference.engine.request import Request, RequestState
from pcomm.inference.sampling.params import SamplingParams


def memory_of(model=None, *, block_size=1, num_blocks=64, num_state_slots=4):
    settings = EngineSettings(
        vocabulary=11,
        max_model_len=1000,
        block_size=block_size,
        num_blocks=num_blocks,
        num_state_slots=num_state_slots,
        max_batch_tokens=1000,
        max_requests=4,
        max_queued=4,
        speculative_tokens=0,
    )
    specs = (model or ToyModel(state_layers=0)).memory_specs()
    return Allocator(specs, settings, torch.device("cpu"))


def request(tokens, *, limit=None):
    given = Request("a", tuple(tokens), SamplingParams(max_tokens=1000))
    return RequestState(request=given, max_model_len=limit or len(tokens) + 1)


def compute(memory, tokens, *, parts=(), limit=None):
    """Run a request through its tokens, in steps that end at `parts`, and end it."""
    live = request(tokens, limit=limit)
    assert memory.admit(live, headroom=0)
    for stop in [*(part for part in parts if part > live.num_computed), len(tokens)]:
        live.num_computed = stop
        memory.note_computed(live)
    first, cached = live.first_block, live.cached_tokens
    memory.release(live)
    return first, cached


def test_a_request_that_grows_keeps_its_neighbours():
    memory = memory_of(num_blocks=40)
    lives = [request([1, 2], limit=11), request([3], limit=11)]
    for live in lives:
        assert memory.admit(live, headroom=0)
    for length in range(3, 11):
        for live in lives:
            assert memory.extend(live, length)
    assert [live.first_block for live in lives] == [1, 11]
    rows = torch.tensor([lives[1].table_row])
    assert memory.tables.select(rows, 3).tolist() == [[11, 12, 13]]
    # Behind its blocks, and once they are taken back, a row is zero.
    assert memory.tables.select(rows, 12).tolist() == [[*range(11, 21), 0, 0]]
    memory.release(lives[1])
    assert memory.tables.select(rows, 12).tolist() == [[0] * 12]


def fill(memory, count, length):
    for number in range(count):
        compute(memory, [number, *range(length - 1)])


def test_a_full_cache_gives_up_blocks_so_that_a_request_has_neighbours():
    memory = memory_of(num_blocks=64)
    fill(memory, 8, 8)
    assert memory.uses()[0].cached == 64
    live = request([9, 9], limit=9)
    assert memory.admit(live, headroom=0)
    assert live.reservation[1] - live.reservation[0] == 8
    # A request that may take more than an eighth of the pool gets what it needs now.
    other = request([8, 8], limit=10)
    assert memory.admit(other, headroom=0)
    assert other.reservation == (0, 0)


@pytest.mark.parametrize("num_free", [15, 16])
def test_a_reservation_takes_cached_blocks_while_less_than_a_quarter_is_free(num_free):
    memory = memory_of(num_blocks=64)
    fill(memory, 4, 8)
    # Free blocks in pieces that no reservation of 8 fits into.
    taken = memory.blocks.allocate(32)
    for block in taken[::2][:num_free]:
        memory.blocks.release(block)
    assert memory.uses()[0].free == num_free
    live = request([9], limit=9)
    assert memory.admit(live, headroom=0)
    is_low = num_free < 16
    assert memory.uses()[0].cached == (24 if is_low else 32)
    assert (live.reservation != (0, 0)) == is_low


def test_a_state_is_copied_behind_the_last_full_chunk_of_a_prompt():
    tokens = list(range(STATE_CHUNK + 1))
    for length, found in [(STATE_CHUNK, 0), (STATE_CHUNK + 1, STATE_CHUNK)]:
        memory = memory_of(ToyModel(attention_layers=0), num_blocks=0)
        live = request(tokens[:length])
        assert memory.admit(live, headroom=0)
        assert live.snapshot_at[0] == (found or SNAPSHOT_INTERVAL)
        memory.release(live)
        compute(memory, tokens[:length], parts=[STATE_CHUNK])
        assert compute(memory, tokens)[1] == found
        assert memory.uses()[1].cached == bool(found)


def test_chunks_of_other_block_sizes_are_multiples_of_both():
    memory = memory_of(ToyModel(), block_size=48, num_blocks=30)
    assert memory.chunk_multiple == 96
    tokens = [token % 7 for token in range(97)]
    compute(memory, tokens, parts=[96])
    assert compute(memory, tokens)[1] == 96


def test_a_state_is_copied_where_two_requests_part():
    memory = memory_of(ToyModel(attention_layers=0), num_blocks=0)
    first = [1] * 70 + [2] * 200
    second = [1] * 70 + [3] * 200
    third = [1] * 70 + [4] * 200
    compute(memory, first, parts=[256])
    live = request(second)
    assert memory.admit(live, headroom=0)
    assert live.snapshot_at == [64, 256]
    memory.release(live)
    assert compute(memory, second, parts=[64, 256])[1] == 0
    assert compute(memory, third, parts=[256])[1] == 64


def test_a_state_is_copied_now_and_then_while_text_is_written():
    memory = memory_of(ToyModel(attention_layers=0), num_blocks=0, num_state_slots=9)
    prompt = list(range(10))
    live = request(prompt, limit=900)
    assert memory.admit(live, headroom=0)
    for _ in range(3 * SNAPSHOT_INTERVAL):
        live.num_computed = len(live.tokens)
        memory.note_computed(live)
        live.tokens.append(5)
    assert memory.uses()[1].cached == 3
    text = list(live.tokens)
    memory.release(live)
    # The next turn of a chat begins from there.
    assert compute(memory, text[: SNAPSHOT_INTERVAL + 9])[1] == SNAPSHOT_INTERVAL
    assert compute(memory, text[:SNAPSHOT_INTERVAL])[1] == 0


def test_the_only_slot_is_taken_from_the_snapshot_that_would_be_used():
    memory = memory_of(ToyModel(attention_layers=0), num_blocks=0, num_state_slots=2)
    tokens = list(range(70))
    compute(memory, tokens, parts=[64])
    assert memory.uses()[1].cached == 1
    lives = [request(tokens), request(tokens)]
    assert all(memory.admit(live, headroom=0) for live in lives)
    assert [live.num_computed for live in lives] == [64, 0]
    assert memory.uses()[1].used == 2
    assert not memory.admit(request(tokens), headroom=0)


def test_nobody_waits_for_a_prompt_whose_blocks_the_cache_cannot_keep():
    memory, prompt = memory_of(num_blocks=24), [1, 2, 3, 4, *range(5, 15)]
    first, second = request([*prompt[:4], 20]), request(prompt)
    for live in (first, second):
        # Less than half of its tokens are those of the first.
        assert not memory.is_prefix_in_flight(live)
        assert memory.admit(live, headroom=0)
        assert memory.is_prefix_in_flight(request(prompt)) == (live is second)
    first.num_computed, second.num_computed = 5, 4
    for live in (first, second):
        memory.note_computed(live)
    # Another one needs the blocks of the first, which are those that the cache has of both.
    memory.release(first)
    assert memory.admit(request(range(50, 60)), headroom=0)
    assert memory.is_prefix_in_flight(request(prompt))
    second.num_computed = 6
    memory.note_computed(second)
    assert second.is_orphan
    assert not memory.is_prefix_in_flight(request(prompt))
