"""A setting that means nothing is an error that names it, when the settings are made."""

import pytest

from pcomm.core.errors import ConfigError
from pcomm.inference.sampling.params import SamplingParams, check_token_ids

NAN, INF = float("nan"), float("inf")
WRONG = {
    "temperature": [-0.1, NAN, INF, "1", None, True, 10**400],
    "top_p": [0, -0.5, 1.0001, NAN, "0.9", None],
    "min_p": [-0.01, 1.01, NAN, None],
    "repetition_penalty": [0, -1.0, 9.9e-7, 1.001e6, NAN, INF, None],
    "presence_penalty": [1.001e6, -1.001e6, NAN, INF, "0", None],
    "frequency_penalty": [1.001e6, -1.001e6, NAN, -INF, "0", None],
    "top_k": [-1, 2.0, True, "5", None],
    "seed": [-(2**63) - 1, 2**64, 1.0, True, None],
    "max_tokens": [0, -1, 1.5, None],
    "min_tokens": [-1, 129, 1.5, None],
    "logprobs": [-1, 1.0, True, "5"],
    "prompt_logprobs": [-1, 1.0, False],
    "stop": ["abc", b"abc", ("a", ""), (1,), None, 5],
    "stop_token_ids": [(-1,), (1.0,), (True,), "12", 5, None],
    "ignore_eos": [0, 1, None, "no"],
    "logit_bias": [
        *({-1: 1.0}, {1: NAN}, {1: None}, {"1": 1.0}, {True: 1.0}, [(1, 1.0)], None),
        *({1: 1.001e6}, {1: -1.001e6}, {0: 1.0, 5: 1e39}),
    ],
    "json_schema": [{}, True, b"{}"],
    "regex": [1, b"a", "\ud800"],
    "grammar": [1, b"a", "\ud800"],
}
assert set(WRONG) == set(SamplingParams.__dataclass_fields__)
RIGHT = {
    "temperature": [0, 5e-324, 1e308, 1],
    "top_p": [5e-324, 1],
    "min_p": [0, 1],
    "repetition_penalty": [1e-6, 1e6],
    "presence_penalty": [-1e6, 1e6],
    "frequency_penalty": [-1e6, 1e6],
    "logit_bias": [{0: -1e6, 5: 1e6}],
    "seed": [-(2**63), 2**64 - 1],
    "max_tokens": [1],
    "min_tokens": [128],
    "logprobs": [0, None],
    "top_k": [0, 10**9],
}
CASES = [(name, value) for name, values in WRONG.items() for value in values]


@pytest.mark.parametrize(("name", "value"), CASES, ids=lambda one: repr(one)[:20])
def test_a_wrong_value_is_an_error_that_names_the_field(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**{name: value})
    assert name in caught.value.asked
    assert all((caught.value.found, caught.value.why, caught.value.fix))


def test_the_ends_of_ranges_are_right() -> None:
    for name, values in RIGHT.items():
        for value in values:
            assert getattr(SamplingParams(**{name: value}), name) == value
    with pytest.raises(ConfigError, match="json_schema and regex"):
        SamplingParams(json_schema="{}", regex="a")
    with pytest.raises(ConfigError, match="regex and grammar"):
        SamplingParams(regex="a", grammar='start: "a"')


def test_lists_become_tuples_and_a_later_change_changes_nothing() -> None:
    stop, ids, bias = ["a"], [1], {1: 2.0}
    params = SamplingParams(stop=stop, stop_token_ids=ids, logit_bias=bias)
    stop.append("b")
    ids.append(2)
    bias[2] = 3.0
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("a",), (1,), {1: 2.0})


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("logit_bias", {16: 1.0}, {16: 1.0, 17: 1.0}),
        ("stop_token_ids", (16,), (16, 17)),
        ("logprobs", 17, 18),
        ("prompt_logprobs", 17, 18),
    ],
)
def test_token_ids_are_checked_against_the_vocabulary(name, right, wrong) -> None:
    check_token_ids(SamplingParams(**{name: right}), 17)
    with pytest.raises(ConfigError, match=name):
        check_token_ids(SamplingParams(**{name: wrong}), 17)
