"""Tokens of many rows at once: each as if it were alone, and distributed as it should be."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pcomm.inference.sampling.params import SamplingParams, SamplingRow
from pcomm.inference.sampling.sampler import Sampler

KINDS = [
    {"temperature": 0},
    {},
    {"temperature": 0.7, "logprobs": 3},
    {"top_k": 20},
    {"top_p": 0.9, "temperature": 1.3},
    {"top_k": 200, "top_p": 0.95, "min_p": 0.01},
    {"temperature": 0, "repetition_penalty": 1.3, "logprobs": 0},
    {"frequency_penalty": 0.5, "presence_penalty": 0.5, "logit_bias": {3: 2.0}},
    {"min_p": 0.1, "min_tokens": 9},
]


def row(position: int = 0, output=(), **settings) -> SamplingRow:
    return SamplingRow(SamplingParams(**settings), [1, 2], output, position, (0,))


def logits(number: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(number, vocabulary, generator=torch.Generator().manual_seed(seed)) * 2


def too_far(counts_V: torch.Tensor, probabilities_V: torch.Tensor) -> bool:
    """Whether a chi-square test at 1e-6 refuses the counts (Wilson and Hilferty's approximation).

    A token that cannot occur must not.
    """
    possible = probabilities_V > 0
    if counts_V[~possible].any():
        return True
    expected = probabilities_V[possible] * counts_V.sum()
    assert expected.min() > 5, "the test needs more draws"
    degrees = len(expected) - 1
    if degrees == 0:
        return False
    statistic = float(((counts_V[possible] - expected) ** 2 / expected).sum())
    width = 2 / (9 * degrees)
    return ((statistic / degrees) ** (1 / 3) - (1 - width)) / width**0.5 > 4.75


DISTRIBUTIONS = [{}, {"temperature": 2.5}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.2}]


@pytest.mark.parametrize(
    ("varied", "settings"),
    [*(("position", one) for one in DISTRIBUTIONS), ("seed", {}), ("seed", {"top_k": 4})],
    ids=str,
)
def test_draws_have_the_distribution_of_the_logits(settings: dict, varied: str) -> None:
    number, vocabulary = 20_000, 17
    one = logits(1, vocabulary)[0]
    probabilities = (one.double() / settings.get("temperature", 1)).softmax(0)
    ranked = probabilities.sort(descending=True)
    kept = torch.ones(vocabulary, dtype=torch.bool)
    kept[settings.get("top_k", vocabulary) :] = False
    kept &= ranked.values.cumsum(0) - ranked.values < settings.get("top_p", 1.1)
    kept &= ranked.values >= settings.get("min_p", 0) * ranked.values[0]
    probabilities[ranked.indices[~kept]] = 0
    probabilities /= probabilities.sum()

    if varied == "seed":
        rows = [row(3, seed=seed, **settings) for seed in range(number)]
    else:
        params = SamplingParams(seed=3, **settings)
        rows = [SamplingRow(params, [1], (), position) for position in range(number)]
    token_ids = Sampler(vocabulary, "cpu").sample(one.expand(number, -1), rows).token_ids
    counts = torch.tensor(token_ids).bincount(minlength=vocabulary).double()
    assert not too_far(counts, probabilities)
    # The test is one that a wrong distribution does not pass.
    wrong = probabilities ** (1 / 1.3)
    assert too_far(counts, wrong / wrong.sum())
    # One after the other they are independent.
    pairs = torch.tensor(token_ids[:-1]) * vocabulary + torch.tensor(token_ids[1:])
    likely = torch.outer(probabilities, probabilities).flatten()
    seen = pairs.bincount(minlength=vocabulary**2).double()
    rare = likely * number < 6
    joined = torch.cat([likely[~rare], likely[rare].sum()[None]])
    assert not too_far(torch.cat([seen[~rare], seen[rare].sum()[None]]), joined)


def test_draws_of_a_large_vocabulary_have_the_distribution_of_the_logits() -> None:
    number, vocabulary = 200, 151_936
    one = logits(1, vocabulary)[0]
    # 16 classes of tokens that lie far apart.
    classes = torch.arange(vocabulary) % 16
    probabilities = torch.zeros(16).double().index_add(0, classes, one.double().softmax(0))
    params = [SamplingParams(seed=seed) for seed in range(number)]
    rows = [SamplingRow(each, [1], (), 9) for each in params]
    found = Sampler(vocabulary, "cpu").sample(one.expand(number, -1), rows).token_ids
    counts = classes[found].bincount(minlength=16).double()
    assert not too_far(counts, probabilities)
    assert len(set(found)) > number / 2


# Two threads share the sums of one row alone, from 32,768 numbers; few rows, for a machine whose
# cores are busy.
@pytest.mark.parametrize(
    ("vocabulary", "number", "threads"), [(17, 64, 1), (151_936, 18, 1), (70_000, 5, 2)]
)
def test_a_row_gets_in_a_batch_what_it_gets_alone(vocabulary, number, threads) -> None:
    rows = [row(n, [5, 5, n % 17], seed=n // 3, **KINDS[n % len(KINDS)]) for n in range(number)]
    logits_LV = logits(number, vocabulary)
    sampler = Sampler(vocabulary, "cpu")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = sampler.sample(logits_LV, rows)
        for n in range(number):
            alone = sampler.sample(logits_LV[n : n + 1], rows[n : n + 1])
            assert alone.token_ids == together.token_ids[n : n + 1]
            assert alone.logprobs == together.logprobs[n : n + 1]
        backwards = sampler.sample(logits_LV.flip(0), rows[::-1])
    finally:
        torch.set_num_threads(before)
    assert backwards.token_ids == together.token_ids[::-1]
    assert backwards.logprobs == together.logprobs[::-1]
    assert len(set(together.token_ids)) > min(vocabulary, number) / 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("settings", [{"temperature": 0}, {"top_k": 1}])
def test_without_chance_it_is_the_largest_logit_and_the_lowest_id(settings, dtype) -> None:
    logits_LV = torch.zeros(3, 1000, dtype=dtype)
    logits_LV[0, [700, 30, 999]] = 2.0
    logits_LV[1, 999] = 0.5
    rows = [row(n, seed=n, **settings) for n in range(3)]
    assert Sampler(1000, "cpu").sample(logits_LV, rows).token_ids == [30, 999, 0]


def test_a_plain_greedy_batch_costs_one_argmax_and_a_number_of_each_row() -> None:
    called = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            called.append(function.overloadpacket.__name__)
            return function(*args, **(kwargs or {}))

    sampler, logits_LV = Sampler(17, "cpu"), logits(8, 17)
    rows = [row(temperature=0) for _ in range(8)]
    with Spy():
        found = sampler.sample(logits_LV, rows)
    # What `tolist` does to a tensor that is neither conjugate nor negative is nothing.
    assert [name for name in called if not name.startswith("resolve_")] == [
        *("argmax", "gather", "abs", "lt", "where", "select")
    ]
    assert found.token_ids == logits_LV.argmax(-1).tolist()
    assert found.logprobs == [None] * 8


def test_a_row_that_is_not_finite_disturbs_no_other() -> None:
    rows = [row(n, seed=n, **KINDS[n % len(KINDS)]) for n in range(27)]
    whole, broken = logits(27, 17), logits(27, 17)
    broken[9:18] = torch.nan
    expected = Sampler(17, "cpu").sample(whole, rows)
    found = Sampler(17, "cpu").sample(broken, rows)
    assert found.token_ids[:9] + found.token_ids[18:] == (
        expected.token_ids[:9] + expected.token_ids[18:]
    )
    assert found.logprobs[:9] + found.logprobs[18:] == (
        expected.logprobs[:9] + expected.logprobs[18:]
    )
    assert (expected.errors, list(found.errors)) == ({}, list(range(9, 18)))
    assert found.token_ids[9:18] == [-1] * 9
    assert found.logprobs[9:18] == [None] * 9


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_one_logit_that_is_no_number_is_an_error_of_its_row(kind, dtype) -> None:
    logits_LV = torch.zeros(5, 1000, dtype=dtype)
    logits_LV[0, 700], logits_LV[1, 700], logits_LV[2] = torch.nan, torch.inf, -torch.inf
    # Minus infinity is a logit like another one while a token is left.
    logits_LV[3, 1:] = -torch.inf
    logits_LV[4, 0] = -torch.inf
    found = Sampler(1000, "cpu").sample(logits_LV, [row(**kind | {"min_tokens": 0})] * 5)
    assert list(found.errors) == [0, 1, 2]
    assert found.token_ids[:4] == [-1, -1, -1, 0]
    assert found.token_ids[4] > 0
    for error, largest in zip(found.errors.values(), ("nan", "inf", "-inf"), strict=True):
        assert f"largest is {largest}" in error.found
        assert all((error.asked, error.why, error.fix))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_row_of_fp64_does_not_depend_on_the_settings_of_others(kind) -> None:
    # The two largest are one number in fp32.
    logits_LV = torch.zeros(2, 17, dtype=torch.float64)
    logits_LV[:, 3], logits_LV[:, 9] = 20.0, 20.0 + 1e-9
    alone = Sampler(17, "cpu").sample(logits_LV[:1], [row(seed=4, **kind)])
    mate = row(logit_bias={5: 1.0})
    together = Sampler(17, "cpu").sample(logits_LV, [row(seed=4, **kind), mate])
    assert together.token_ids[0] == alone.token_ids[0]
    assert together.logprobs[0] == alone.logprobs[0]


@pytest.mark.parametrize("temperature", [1e300, 1e-3, 1e-30, 1e-300, 5e-324])
def test_at_any_temperature_equal_tokens_are_likely_and_forbidden_ones_are_not(temperature) -> None:
    logits_LV = torch.full((60, 1000), -torch.inf)
    logits_LV[:, [700, 30, 999]] = 0.5
    rows = [row(seed=seed, temperature=temperature) for seed in range(60)]
    assert set(Sampler(1000, "cpu").sample(logits_LV, rows).token_ids) == {30, 700, 999}
    # Settings that forbid the rest are an error.
    rows = [
        SamplingRow(SamplingParams(min_tokens=least), [1], [3], 2, tuple(range(17)))
        for least in (2, 1)
    ]
    assert list(Sampler(17, "cpu").sample(logits(2, 17), rows).errors) == [0]


def test_logits_are_not_changed_and_no_rows_give_no_tokens() -> None:
    sampler, logits_LV = Sampler(17, "cpu"), logits(len(KINDS), 17)
    sampler.sample(logits_LV, [row(output=[1], **kind) for kind in KINDS])
    assert torch.equal(logits_LV, logits(len(KINDS), 17))
    assert sampler.sample(logits_LV[:0], []).token_ids == []
