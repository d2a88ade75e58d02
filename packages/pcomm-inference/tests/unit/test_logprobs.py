"""Log-probabilities that are returned with tokens."""

import pytest
import torch

import pcomm.inference.sampling.sampler as module
from pcomm.inference.sampling.params import SamplingParams, SamplingRow
from pcomm.inference.sampling.sampler import Sampler, token_logprobs


@pytest.mark.parametrize("vocabulary", [17, 151_936])
@pytest.mark.parametrize("block", [1, 2**24])
def test_they_are_those_of_the_softmax(vocabulary: int, block: int, monkeypatch) -> None:
    monkeypatch.setattr(module, "_BLOCK", block)
    logits_RV = torch.randn(5, vocabulary, generator=torch.Generator().manual_seed(1)) * 3
    expected = logits_RV.double().log_softmax(-1)
    token_ids, num_top = [3, 0, 16, 5, 5], [5, 0, 1, 17, 2]
    # Torch adds up exponentials in as many lanes as a vector has, and the fewer, the more each sum
    # is rounded: with AVX2 twice as much as with AVX-512. Numbers of up to 32 are rounded at 1e-6.
    rounding = 1e-6 + (logits_RV.log_softmax(-1) - expected).abs().max().item()
    found = token_logprobs(logits_RV, token_ids, num_top)
    for number, one in enumerate(found):
        assert one.token_id == token_ids[number]
        assert one.logprob == pytest.approx(expected[number, one.token_id].item(), abs=rounding)
        values, ids = expected[number].topk(num_top[number])
        assert list(one.top) == ids.tolist()
        assert list(one.top.values()) == pytest.approx(values.tolist(), abs=rounding)


def test_of_equal_ones_the_lowest_ids_come_first() -> None:
    logits_RV = torch.zeros(2, 151_936, dtype=torch.bfloat16)
    logits_RV[0, 70_000:] = 1.0
    first, second = token_logprobs(logits_RV, [0, 0], [3, 2])
    assert list(first.top) == [70_000, 70_001, 70_002]
    assert list(second.top) == [0, 1]


def test_they_are_those_before_settings_act_and_only_where_asked_for() -> None:
    logits_LV = torch.randn(4, 17, generator=torch.Generator().manual_seed(2))
    settings = [
        {"logprobs": 0},
        {"logprobs": 2, "temperature": 5.0, "top_k": 2, "logit_bias": {4: 50.0}},
        {},
        {"logprobs": 1, "temperature": 0, "repetition_penalty": 3.0},
    ]
    rows = [SamplingRow(SamplingParams(**one), [4, 5], [6], 3) for one in settings]
    sampled = Sampler(17, "cpu").sample(logits_LV, rows)
    assert sampled.token_ids[1] == 4
    assert sampled.logprobs[2] is None
    expected = logits_LV.log_softmax(-1)
    for number, num_top in {0: 0, 1: 2, 3: 1}.items():
        one = sampled.logprobs[number]
        assert one is not None
        assert one.token_id == sampled.token_ids[number]
        assert one.logprob == pytest.approx(expected[number, one.token_id].item(), abs=1e-6)
        assert list(one.top) == expected[number].topk(num_top).indices.tolist()
