"""Penalties, biases and stop tokens that must not come yet."""

from array import array
from collections import Counter

import pytest
import torch
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from pcomm.inference.sampling.filters import edit_logits
from pcomm.inference.sampling.params import SamplingParams, SamplingRow

PROMPT, OUTPUT = [3, 3, 16, 0], [5, 3, 5, 5, 1]


def row(prompt=PROMPT, output=OUTPUT, stop_ids=(), **settings) -> SamplingRow:
    params = SamplingParams(**settings)
    return SamplingRow(params, prompt, output, len(prompt) + len(output), stop_ids)


def logits(number: int, vocabulary: int = 17) -> torch.Tensor:
    return torch.randn(number, vocabulary, generator=torch.Generator().manual_seed(0)) * 3


@pytest.mark.parametrize("vocabulary", [17, 151_936])
def test_the_repetition_penalty_is_that_of_transformers(vocabulary: int) -> None:
    found, before = logits(3, vocabulary), logits(3, vocabulary)
    rows = [row(repetition_penalty=1.3), row(), row([2, 2], [], repetition_penalty=0.7)]
    edit_logits(found, rows)
    for number, (penalty, ids) in {0: (1.3, PROMPT + OUTPUT), 2: (0.7, [2, 2])}.items():
        process = RepetitionPenaltyLogitsProcessor(penalty)
        expected = process(torch.tensor([ids]), before[number : number + 1].clone())[0]
        torch.testing.assert_close(found[number], expected)
        assert not torch.equal(found[number], before[number])
    assert torch.equal(found[1], before[1])


def test_presence_and_frequency_count_the_output_alone() -> None:
    # mu[j] - c[j] * alpha_frequency - (c[j] > 0) * alpha_presence, as OpenAI's reference has it.
    found, before = logits(4), logits(4)
    settings = [(0.5, 0.25), (0, -0.5), (2.0, 0), (0, 0)]
    rows = [row(presence_penalty=p, frequency_penalty=f) for p, f in settings]
    edit_logits(found, rows)
    counts = Counter(OUTPUT)
    for number, (presence, frequency) in enumerate(settings):
        for token, logit in enumerate(before[number].tolist()):
            expected = logit - counts[token] * frequency - (counts[token] > 0) * presence
            assert found[number, token].item() == pytest.approx(expected, abs=1e-6)


def test_a_penalty_for_a_token_that_stands_ten_thousand_times_is_exact() -> None:
    found = torch.full((1, 17), 1000.0)
    edit_logits(found, [row(output=[4] * 10_000, frequency_penalty=0.1)])
    assert found[0, 4] == 0.0


def test_biases_are_added_behind_penalties() -> None:
    found, before = logits(2), logits(2)
    edit_logits(found, [row(logit_bias={3: 5.0, 16: -100.0}), row(repetition_penalty=2.0)])
    changed = before[0].clone()
    changed[3] += 5.0
    changed[16] -= 100.0
    assert torch.equal(found[0], changed)
    both = before[:1].clone()
    edit_logits(both, [row(logit_bias={3: 5.0}, repetition_penalty=2.0)])
    penalised = before[0, 3] / 2 if before[0, 3] > 0 else before[0, 3] * 2
    assert both[0, 3] == penalised + 5.0


def test_stop_tokens_do_not_come_before_min_tokens() -> None:
    found, before = logits(3), logits(3)
    rows = [row(min_tokens=6, stop_ids=(2, 9)), row(min_tokens=5, stop_ids=(2,)), row()]
    edit_logits(found, rows)
    assert (found[0] == -torch.inf).nonzero()[:, 0].tolist() == [2, 9]
    assert torch.equal(found[1:], before[1:])


def test_ids_may_be_an_array_that_grows_again() -> None:
    settings = {"repetition_penalty": 1.2, "frequency_penalty": 0.3}
    prompt, output = array("q", PROMPT), array("q", OUTPUT)
    expected, found = logits(2), logits(2)
    edit_logits(expected, [row(**settings), row(output=[], **settings)])
    rows = [row(prompt, output, **settings), row(prompt, array("q"), **settings)]
    edit_logits(found, rows)
    assert torch.equal(found, expected)
    # Memory that a tensor still looked at could not be resized.
    output.extend(range(1000))
    prompt.append(1)
