"""Steps over many requests against the forward pass of training, which sees each sequence whole."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from types import FunctionType

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from integration_support.step_pools import StepPools
from integration_support.step_shapes import SHAPES, VOCABULARY, model_of, shard_of, tokens_of
from pcomm.core.errors import UnsupportedError
from pcomm.core.testing import run_virtual
from pcomm.core.testing.virtual import VirtualCollectives
from pcomm.inference import Engine, Request, SamplingParams, StateMemory
from pcomm.inference.layers import pack_weights
from pcomm.integration.models.language_model import LanguageModel
from pcomm.integration.parallelize import plan_sequences


@torch.inference_mode()
def whole(model: LanguageModel, tokens: list[int]) -> Tensor:
    return model(torch.tensor(tokens), plan_sequences(model, (0, len(tokens))))


# Sizes on both sides of a chunk of the recurrent cores (64), of a block, and of a convolution.
CUTS = [(1,), (2, 1), (70, 1, 1), (63, 65, 1, 3), (1, 1, 1, 140, 2), (131,)]


@pytest.mark.parametrize("name", SHAPES)
def test_chunks_of_any_size_equal_the_forward_pass_of_training(name):
    model = model_of(name)
    for cuts in CUTS:
        tokens = tokens_of(sum(cuts))
        pools, found = StepPools(model, 1, len(tokens)), []
        offsets = [sum(cuts[:n]) for n in range(len(cuts) + 1)]
        for start, stop in pairwise(offsets):
            found.append(pools.step({0: tokens[start:stop]})[0])
        expected = whole(model, tokens)
        assert (torch.cat(found) - expected).abs().max() <= 1e-11 * expected.abs().max(), cuts


@pytest.mark.parametrize("name", SHAPES)
def test_requests_that_share_steps_do_not_see_each_other(name):
    """Some decode while others read a chunk of their prompt, begin, wait or begin anew."""
    model, source = model_of(name), random.Random(3)
    texts = [tokens_of(length, seed) for seed, length in enumerate((150, 9, 70, 1, 66))]
    pools = StepPools(model, len(texts), 150)
    found: list[list[Tensor]] = [[] for _ in texts]
    kinds = set()
    while waiting := [n for n, text in enumerate(texts) if pools.lengths[n] < len(text)]:
        new = {}
        for n in source.sample(waiting, source.randint(1, len(waiting))):
            count = source.choice((1, 1, 2, 5, 64, 65))
            new[n] = texts[n][pools.lengths[n] : pools.lengths[n] + count]
        kinds.add(len({len(part) > 1 for part in new.values()}))
        if source.random() < 0.1:
            again = source.choice(waiting)
            new.pop(again, None)
            pools.forget(again)
            found[again].clear()
        for n, logits in (pools.step(new) if new else {}).items():
            found[n].append(logits)
    assert kinds == {1, 2}
    for text, parts in zip(texts, found, strict=True):
        expected = whole(model, text)
        assert (torch.cat(parts) - expected).abs().max() <= 1e-11 * expected.abs().max()


BREAKS: dict[str, Callable[[StepPools], None]] = {
    "states of another": lambda pools: pools.slots.copy_(pools.slots.flip(0)),
    "no states": lambda pools: [
        pool.zero_()
        for memory in pools.memory
        if isinstance(memory, StateMemory)
        for pool in memory.pools.values()
    ],
    "blocks of another": lambda pools: pools.blocks.copy_(pools.blocks.flip(0)),
}


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        *((name, kind) for name in ("M", "G") for kind in ("states of another", "no states")),
        ("A", "blocks of another"),
    ],
)
def test_memory_of_another_request_is_seen(name, broken):
    model, texts = model_of(name), [tokens_of(80, 1), tokens_of(80, 2)]
    pools = StepPools(model, 2, 90)
    pools.step(dict(enumerate(texts)))
    BREAKS[broken](pools)
    found = pools.step({0: [5], 1: [5]})
    for n, text in enumerate(texts):
        expected = whole(model, [*text, 5])[-1]
        assert (found[n][0] - expected).abs().max() > 1e-3 * expected.abs().max()


@pytest.mark.parametrize("name", ["GGGA", "M"])
def test_states_have_the_dtype_that_was_asked_for(name):
    full = model_of(name, torch.bfloat16)
    states = [memory for memory in StepPools(full, 1, 8).memory if isinstance(memory, StateMemory)]
    assert {memory.pools["state"].dtype for memory in states} == {torch.float32}
    assert {memory.pools["halo"].dtype for memory in states} == {torch.bfloat16}
    small = LanguageModel(full.config, VOCABULARY, dtype=torch.bfloat16, state_dtype=torch.bfloat16)
    small.load_state_dict(full.state_dict())
    tokens = tokens_of(80)
    exact = whole(model_of(name), tokens)[-3:]
    errors = []
    for model in (full, small.eval()):
        pools = StepPools(model, 1, 80)
        pools.step({0: tokens[:77]})
        found = torch.cat([pools.step({0: [token]})[0] for token in tokens[77:]])
        errors.append(float((found - exact).abs().max() / exact.abs().max()))
    # Weights in bf16 alone bring errors of 2**-8 in each layer; states add as much again.
    assert errors[0] < 0.1
    assert errors[1] < 0.2
    for memory in pools.memory:
        if isinstance(memory, StateMemory):
            assert memory.pools["state"].dtype == torch.bfloat16


def engine_of(model: LanguageModel, **changes: object) -> Engine:
    settings = {"max_model_len": 160, "num_blocks": 64, "num_state_slots": 6, **changes}
    return Engine(model, vocabulary=VOCABULARY, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SHAPES)
def test_one_rank_enters_no_collective_and_no_autograd_function(name, monkeypatch):
    """Neither while prompts are read nor while text is written."""
    model = model_of(name, torch.float32)
    # The first chunk of a recurrent layer imports what looks for torch.distributed.
    StepPools(model, 1, 4).step({0: [1, 2, 3]})
    engine = engine_of(model)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("this is for several ranks, or for training")

    for module in (torch.distributed, torch.distributed.distributed_c10d):
        for key, value in list(vars(module).items()):
            if type(value) is FunctionType:
                monkeypatch.setattr(module, key, refuse)
    monkeypatch.setattr(torch.autograd.Function, "apply", refuse)
    for n in range(3):
        params = SamplingParams(temperature=0.5, max_tokens=12, ignore_eos=True)
        engine.add(Request(str(n), tuple(tokens_of(20 + n, n)), params))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert all(output.error is None for output in outputs)
    assert engine.stats().written_tokens == 36


class _CountElements(TorchDispatchMode):
    """Elements of all inputs and results of torch's operations."""

    total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        flat, _ = tree_flatten((args, kwargs, result))
        self.total += sum(x.numel() for x in flat if isinstance(x, Tensor))
        return result


@pytest.mark.parametrize("name", ["M", "G", "A"])
def test_a_recurrent_token_costs_as_much_after_any_context(name):
    """Work is counted, not timed; attention is the check that growth would be seen."""
    model, work, memory = model_of(name, torch.float32), [], []
    for context in (3, 600):
        pools = StepPools(model, 1, 601)
        pools.step({0: tokens_of(context)})
        with _CountElements() as counted:
            pools.step({0: [1]})
        work.append(counted.total)
        memory.append(
            sum(pool.numel() for m in pools.memory for pool in getattr(m, "pools", {}).values())
        )
    assert memory[0] == memory[1]
    assert (work[0] == work[1]) == (name != "A")


@pytest.mark.parametrize("name", SHAPES)
def test_two_virtual_ranks_have_the_logits_of_one(name):
    one = model_of(name)
    texts = [tokens_of(70, 1), tokens_of(3, 2), tokens_of(5, 3)]
    rounds = [dict(enumerate(texts)), {0: [7], 1: [8, 9, 3], 2: [4]}, {2: [1]}, {0: [2], 1: [3]}]

    def steps(model: LanguageModel) -> list[Tensor]:
        pools = StepPools(model, 3, 80)
        return [logits for new in rounds for logits in pools.step(new).values()]

    def on_rank(collectives: VirtualCollectives) -> list[Tensor]:
        return steps(shard_of(one, collectives))

    expected = steps(one)
    for found in run_virtual(on_rank, 2):
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.shape == theirs.shape
            assert (mine - theirs).abs().max() <= 1e-11 * theirs.abs().max()


def test_a_stream_that_ranks_share_by_tokens_is_refused():
    def on_rank(collectives: VirtualCollectives) -> str:
        model = LanguageModel(model_of("A").config, VOCABULARY, collectives, sequence_parallel=True)
        with pytest.raises(UnsupportedError, match="sequence_parallel=False") as raised:
            model.memory_specs()
        return str(raised.value)

    assert len({*run_virtual(on_rank, 2)}) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["A", "A with everything"])
def test_in_sixteen_bits_a_text_goes_on_token_by_token(name, dtype):
    """Also where each query head has keys of its own, and so one row in a call for one token."""
    model, tokens = model_of(name, dtype), tokens_of(12)
    pools, cuts = StepPools(model, 1, 12), (9, 10, 11, 12)
    found = [pools.step({0: tokens[start:stop]})[0] for start, stop in pairwise((0, *cuts))]
    expected = whole(model_of(name), tokens)
    # Weights, stream and results are rounded to bf16, with an error of 2**-9 each.
    assert (torch.cat(found) - expected).abs().max() < 0.05 * expected.abs().max()


def written(
    model: LanguageModel, texts: dict[int, list[int]], **options: int
) -> dict[int, list[tuple[int, float]]]:
    """Ten tokens of each, drawn, with their log-probabilities, and those of the prompt's end."""
    engine = Engine(
        model,
        vocabulary=VOCABULARY,
        max_model_len=320,
        num_state_slots=8,
        batch_invariant=True,
        **{"num_blocks": 80, "max_requests": 5, **options},
    )
    found: dict[int, list[tuple[int, float]]] = {n: [] for n in texts}
    for n, text in texts.items():
        params = SamplingParams(seed=n, max_tokens=10, ignore_eos=True, logprobs=0)
        engine.add(Request(str(n), tuple(text), params))
    while engine.has_work:
        for output in engine.step():
            found[int(output.request_id)] += [(o.token_id, o.logprob) for o in output.logprobs]
    assert {len(one) for one in found.values()} == {10}
    stats = engine.stats()
    assert (stats.preemptions > 0) == ("num_blocks" in options)
    engine.close()
    return found


@pytest.mark.instructions
@pytest.mark.parametrize(
    ("name", "head_dim", "dtype"),
    [
        ("A with everything", 128, torch.bfloat16),
        ("A with everything", 128, torch.float32),
        ("M", 16, torch.bfloat16),
        ("M", 16, torch.float32),
        ("GGGA", 128, torch.bfloat16),
        pytest.param("GGGA", 128, torch.float32, marks=pytest.mark.soak),
    ],
)
def test_a_batch_invariant_request_gets_the_bits_that_it_gets_alone(name, head_dim, dtype):
    """With any instructions, in any company, cut by any limit, and computed again."""
    # Vectors that are not whole at the end of a tensor have other last bits.
    model = model_of(name, dtype, width=64, head_dim=head_dim)
    pack_weights(model, batch_invariant=True)
    # On both sides of a chunk of 256 tokens, and of the classes of rows of a product.
    lengths = (300, 1, 9, 257, 40)
    texts = {n: tokens_of(length, n) for n, length in enumerate(lengths)}
    alone = dict[int, list[tuple[int, float]]]()
    for n in texts:
        alone |= written(model, {n: texts[n]})
    assert written(model, texts) == alone
    # Room for one chunk in a step, requests in another order, and too few blocks for all of them.
    backwards = dict(reversed(texts.items()))
    assert written(model, backwards, max_batch_tokens=260) == alone
    if "A" in name:
        assert written(model, backwards, num_blocks=160, block_size=4) == alone


@pytest.mark.parametrize("name", ["A", "A with everything", "M", "experts"])
def test_in_bf16_no_bit_of_a_request_depends_on_the_others(name):
    """Torch's products of bf16 give a row the same bits, for sizes of whole vectors."""
    model = model_of(name, torch.bfloat16, width=64)
    texts = [tokens_of(length, seed) for seed, length in enumerate((70, 9, 66, 1, 30))]
    together, alone = StepPools(model, len(texts), 90), StepPools(model, len(texts), 90)
    # Prompts in one step, then tokens of all; the same requests one by one.
    rounds = [dict(enumerate(texts)), *({n: [t + n] for n in range(len(texts))} for t in (5, 40))]
    for new in rounds:
        found = together.step(new)
        for n, tokens in new.items():
            assert torch.equal(found[n], alone.step({n: tokens})[n]), n
