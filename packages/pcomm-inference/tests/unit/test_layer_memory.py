"""What a layer reads and writes, and what it is told where it asks for something else."""

import copy
import pickle

import pytest
import torch

from pcomm.core.errors import ConfigError
from pcomm.inference.attention.paged_attention import paged_attention
from pcomm.inference.model import KVMemory, StateMemory, StepBatch

SLOTS = (3, 1)


def states():
    return StateMemory({"sum": torch.zeros(5, 4), "last": torch.zeros(5, dtype=torch.int64)})


def blocks():
    return KVMemory(torch.zeros(2, 16, 1, 8), torch.zeros(2, 16, 1, 8))


def batch():
    """Two requests, each with one token."""
    numbers = torch.zeros(2, dtype=torch.int64)
    return StepBatch(
        tokens_T=numbers,
        positions_T=numbers,
        cu_seqlens=(0, 1, 2),
        cu_seqlens_N1=torch.arange(3, dtype=torch.int32),
        context_lens=(0, 0),
        context_lens_N=numbers.int(),
        block_tables_NB=torch.zeros(2, 0, dtype=torch.int32),
        slot_mapping_T=numbers,
        first_blocks=(None, None),
        state_slots_N=torch.tensor(SLOTS),
        logits_rows=numbers,
    )


def test_states_are_read_and_written_in_the_slots_of_their_requests():
    memory = states()
    memory.write("sum", batch(), torch.tensor([[1.0] * 4, [2.0] * 4]))
    memory.write("last", batch(), torch.tensor([7.0, 8.0]))
    assert memory.pools["sum"][:, 0].tolist() == [0, 2, 0, 1, 0]
    assert memory.read("last", batch()).tolist() == [7, 8]
    for call in (memory.read, memory.write):
        with pytest.raises(ConfigError, match="'som': a layer whose StateSpec has 'sum', 'last'"):
            call("som", batch(), *[torch.zeros(2, 4)] * (call == memory.write))
    # An error that is not the shape's is torch's own.
    with pytest.raises(RuntimeError) as caught:
        memory.write("sum", batch(), torch.ones(2, 4, device="meta"))
    assert not isinstance(caught.value, ConfigError)


@pytest.mark.parametrize("shape", [(2, 3), (1, 4), (3, 4), (2, 4, 1), (2,), (4,), ()])
def test_states_of_another_shape_are_told_the_one_that_is_kept(shape):
    memory = states()
    with pytest.raises(ConfigError, match=r"each with a state of shape \(4,\)") as found:
        memory.write("sum", batch(), torch.ones(shape))
    assert "(2, 4)" in found.value.fix
    assert not memory.pools["sum"].any()


def test_keys_and_values_are_no_state():
    memory = blocks()
    with pytest.raises(ConfigError, match="keys and values of an attention layer"):
        memory.read("sum", batch())
    with pytest.raises(ConfigError, match="Declare a StateSpec"):
        memory.write("sum", batch(), torch.zeros(2, 4))
    # As of an object without the methods.
    assert not hasattr(memory, "read")
    with pytest.raises(AttributeError, match="other"):
        memory.other  # noqa: B018
    for again in (copy.deepcopy(memory), pickle.loads(pickle.dumps(memory))):
        assert torch.equal(again.keys, memory.keys)


@pytest.mark.parametrize(
    ("memory", "found"), [(states(), "a StateMemory"), (None, "a layer with nothing in memory")]
)
def test_attention_needs_a_layer_with_keys_and_values(memory, found):
    rows = torch.zeros(2, 1, 8)
    with pytest.raises(ConfigError, match=f"{found}[\\s\\S]*Declare a KVSpec"):
        paged_attention(rows, rows, rows, memory, batch())
