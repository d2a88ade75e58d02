"""Filters keep the tokens that transformers' logits processors keep."""

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pcomm.inference.sampling.filters import (
    candidates,
    filter_tokens,
    least_of_top,
    likeliest_first,
)
from pcomm.inference.sampling.params import SamplingParams

SETTINGS = [
    {"top_k": 1},
    {"top_k": 3},
    {"top_k": 50, "temperature": 0.5},
    {"top_k": 3000, "temperature": 2.0},
    {"top_p": 0.1},
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 0.3},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"min_p": 0.001, "temperature": 3.0},
    {"top_k": 40, "top_p": 0.8},
    {"top_k": 9, "top_p": 0.95, "min_p": 0.1, "temperature": 1.7},
    {"top_p": 0.7, "min_p": 0.02},
    {},
]


def by_transformers(logits_V: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    found = LogitsProcessorList([TemperatureLogitsWarper(float(params.temperature))])
    if params.top_k:
        found.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        found.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        found.append(MinPLogitsWarper(params.min_p))
    return found(torch.empty(1, 0), logits_V[None].double())[0]


def by_us(logits_RV: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    temperatures = torch.tensor([one.temperature for one in params])[:, None]
    below_RV = (logits_RV - logits_RV.amax(1, keepdim=True)) / temperatures
    ids_RC, below_RC = filter_tokens(below_RV, params)
    # Places behind the last candidate name token 0 and may not overwrite it.
    return torch.full_like(logits_RV, -torch.inf).scatter_reduce(1, ids_RC, below_RC, "amax")


# Up to 256 candidates are sorted as they are; of 257 and more, top-p looks for a bound first.
@pytest.mark.parametrize("vocabulary", [17, 256, 257, 151_936])
def test_what_is_kept_is_what_transformers_keeps(vocabulary: int) -> None:
    params = [SamplingParams(**one) for one in SETTINGS]
    generator = torch.Generator().manual_seed(vocabulary)
    logits_RV = torch.randn(len(params), vocabulary, generator=generator) * 3
    expected = torch.stack([by_transformers(*pair) for pair in zip(logits_RV, params, strict=True)])
    kept = by_us(logits_RV, params)
    assert torch.equal(kept.isfinite(), expected.isfinite())
    torch.testing.assert_close(kept.double().softmax(1), expected.softmax(1))


def test_of_equal_tokens_the_lowest_ids_are_kept() -> None:
    logits_RV = torch.zeros(4, 1000)
    logits_RV[:, 500:] = 1.0
    params = [SamplingParams(**one) for one in ({"top_k": 3}, {"top_k": 502}, {"top_p": 0.25}, {})]
    kept = [row.isfinite().nonzero()[:, 0].tolist() for row in by_us(logits_RV, params)]
    assert kept[0] == [500, 501, 502]
    assert kept[1] == [0, 1, *range(500, 1000)]
    # A quarter of 500 * (e + 1), in tokens of mass e.
    assert kept[2] == list(range(500, 500 + 171))
    assert kept[3] == list(range(1000))


def test_tokens_whose_mass_is_exactly_top_p_are_enough() -> None:
    params = [SamplingParams(top_p=one) for one in (0.25, 0.5, 0.75)]
    kept = [row.isfinite().nonzero()[:, 0].tolist() for row in by_us(torch.zeros(3, 4), params)]
    assert kept == [[0], [0, 1], [0, 1, 2]]


@pytest.mark.parametrize("number", [1, 2, 118, 119, 200, 4748, 9496, 9497, 151_936, 10**6])
def test_the_bound_of_the_likeliest_is_reached_by_enough_and_by_few_more(number: int) -> None:
    # 118 tokens and fewer are found with blocks of more than 128, which are cut to 64; from 9,497
    # on, blocks are single tokens.
    x_RV = torch.randn(2, 151_936, generator=torch.Generator().manual_seed(number))
    least_R = least_of_top(x_RV, [number, 0])
    reached = int((x_RV[0] >= least_R[0]).sum())
    wanted = min(number, 151_936)
    assert wanted <= reached <= 1.2 * wanted + 20
    assert least_R[1] == -torch.inf


def test_candidates_are_sorted_and_rows_without_any_are_empty() -> None:
    x_RV = torch.tensor([[1.0, 3.0, 2.0, 3.0], [0.0] * 4, [torch.nan] * 4])
    ids, x = likeliest_first(*candidates(x_RV, torch.tensor([2.0, 1.0, torch.nan])))
    assert ids.tolist() == [[1, 3, 2], [0, 0, 0], [0, 0, 0]]
    assert x[0].tolist() == [3.0, 3.0, 2.0]
    assert (x[1:] == -torch.inf).all()
