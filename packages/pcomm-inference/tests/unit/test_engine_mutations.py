"""What keeps requests apart is needed: without it, a request gets other tokens."""

from array import array
from dataclasses import replace
from unittest.mock import patch

import pytest

from inference_support.toy_model import ToyModel, expected_tokens
from pcomm.inference.engine import allocator
from pcomm.inference.engine.engine import Engine
from pcomm.inference.engine.pools import Pools
from pcomm.inference.engine.prefix_cache import PrefixCache, extend_hashes
from pcomm.inference.engine.request import Request
from pcomm.inference.sampling.params import SamplingParams

ATTENTION = ToyModel(attention_layers=2, state_layers=0)
RECURRENT = ToyModel(attention_layers=0, state_layers=1)
HYBRID = ToyModel()


def run_all(model, prompts, **settings):
    """Whether requests that run after each other get the right tokens, and what was counted."""
    given = {"block_size": 2, "num_blocks": 20, "num_state_slots": 8, "max_model_len": 40}
    with patch.multiple(allocator, STATE_CHUNK=2, SNAPSHOT_INTERVAL=8):
        engine = Engine(model, vocabulary=model.vocabulary, **given | settings)
    right = True
    for number, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0, max_tokens=6)
        engine.add(Request(str(number), tuple(prompt), params))
        found = []
        while engine.has_work:
            for output in engine.step():
                found += output.token_ids
        right &= found == expected_tokens(model, prompt, 6)
    return right, engine.stats()


# The second prompt has the first one's second block behind another first one; the third one would
# take it for its own. Then one that begins like another, from a state in its middle.
PROMPTS = [[1, 2, 3, 4, 5], [6, 7, 3, 4, 9], [6, 7, 3, 4, 8], [1, 2, 3, 4, 5, 6]]


def unchained(hashes, tokens, *, block_size, count):
    for number in range(len(hashes), count):
        hashes.append(tokens[number * block_size : (number + 1) * block_size].tobytes())


def alias(pools, source, target):
    """A snapshot that is the state itself: what is written later shows in it."""
    for stack in pools._states:
        stack[:, target] = 0


MUTANTS = {
    "chain": (ATTENTION, lambda: patch.object(allocator, "extend_hashes", unchained)),
    "zeroing": (RECURRENT, lambda: patch.object(Pools, "zero", lambda self, slot: None)),
    "copy": (RECURRENT, lambda: patch.object(Pools, "copy", lambda self, source, target: None)),
    "copy of zeros": (HYBRID, lambda: patch.object(Pools, "copy", alias)),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_gives_other_tokens(name):
    model, mutant = MUTANTS[name]
    right, stats = run_all(model, PROMPTS)
    assert right
    assert stats.cached_tokens > 0
    with mutant():
        assert not run_all(model, PROMPTS)[0]


def test_a_snapshot_is_needed_at_exactly_that_token():
    original = PrefixCache.find

    def blocks_alone(cache, hashes):
        with patch.object(cache, "_bytes_per_slot", 0):
            return replace(original(cache, hashes), snapshot=0)

    assert run_all(HYBRID, PROMPTS, num_state_slots=1)[0]
    with patch.object(PrefixCache, "find", blocks_alone):
        assert not run_all(HYBRID, PROMPTS, num_state_slots=1)[0]


def test_states_are_restored_after_wrong_drafts():
    prompts = [[1, 2, 3, 1, 2, 3, 1, 2], [4, 5, 4, 5, 4, 5, 4]]
    right, stats = run_all(HYBRID, prompts, speculative_tokens=3)
    assert right
    assert stats.drafted_tokens > stats.accepted_tokens
    original = allocator.Allocator.drop_saved

    def kept(self, live, slot, *, restore):
        original(self, live, slot, restore=False)

    with patch.object(allocator.Allocator, "drop_saved", kept):
        assert not run_all(HYBRID, prompts, speculative_tokens=3)[0]


def test_hashes_of_different_begins_differ():
    first, second = [], []
    extend_hashes(first, array("q", [1, 2, 3, 4]), block_size=2, count=2)
    extend_hashes(second, array("q", [5, 2, 3, 4]), block_size=2, count=2)
    assert len({*first, *second}) == 4
    again = []
    for count in (1, 2):
        extend_hashes(again, array("q", [1, 2, 3, 4]), block_size=2, count=count)
    assert again == first
