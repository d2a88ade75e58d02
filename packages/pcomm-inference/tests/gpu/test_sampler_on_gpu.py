"""Tokens on a GPU against the CPU; never run yet, because no GPU was at hand."""

from __future__ import annotations

import pytest
import torch

from pcomm.inference.sampling.noise import TokenNoise
from pcomm.inference.sampling.params import SamplingParams, SamplingRow
from pcomm.inference.sampling.sampler import Sampler

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

KINDS = [
    {"temperature": 0, "logprobs": 3},
    {},
    {"top_k": 20, "temperature": 0.7},
    {"top_p": 0.9},
    {"top_k": 200, "top_p": 0.95, "min_p": 0.01},
    {"frequency_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": {3: 2.0}},
    {"min_p": 0.1, "min_tokens": 9},
]


@pytest.mark.parametrize("vocabulary", [17, 151_936])
def test_a_gpu_draws_what_the_cpu_draws(vocabulary: int) -> None:
    logits = torch.randn(63, vocabulary, generator=torch.Generator().manual_seed(0)) * 2
    rows = [
        SamplingRow(SamplingParams(seed=n // 3, **KINDS[n % 7]), [1, 2], [5, n % 17], n, (0,))
        for n in range(63)
    ]
    expected = Sampler(vocabulary, "cpu").sample(logits, rows)
    found = Sampler(vocabulary, "cuda").sample(logits.cuda(), rows)
    assert found.token_ids == expected.token_ids
    for one, other in zip(found.logprobs, expected.logprobs, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert list(one.top) == list(other.top)
            assert one.logprob == pytest.approx(other.logprob, abs=1e-5)


def test_noise_is_that_of_the_cpu() -> None:
    seeds, positions = [0, 5, 2**64 - 1], [7, 0, 151_935]
    cpu, gpu = TokenNoise(151_936, "cpu"), TokenNoise(151_936, "cuda")
    keys = gpu.keys(seeds, positions)
    assert torch.equal(keys.cpu(), cpu.keys(seeds, positions))
    torch.testing.assert_close(gpu.gumbel(keys).cpu(), cpu.gumbel(keys.cpu()))
