"""The place of the largest number, against torch's own argmax."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pcomm.inference.sampling.sampler import place_of_largest


@pytest.mark.parametrize(
    ("width", "dtype"),
    [
        *((width, torch.bfloat16) for width in (1, 255, 256, 511, 512, 513, 1000, 1024, 50257)),
        *((width, torch.float32) for width in (512, 513, 32000)),
        (513, torch.float64),
    ],
)
def test_it_is_the_argmax_also_among_equal_numbers(width: int, dtype: torch.dtype) -> None:
    # Few different numbers: most rows have their largest many times.
    few = torch.randint(-3, 4, (5, width)).to(dtype)
    many = torch.randn(5, width).to(dtype)
    for numbers in (few, many, many[:, : width // 2 + 1], many.repeat(40, 1), many[:1], many[:0]):
        expected = numbers.argmax(-1, keepdim=True)
        assert torch.equal(place_of_largest(numbers), expected)


@given(
    width=st.sampled_from([512, 700, 1024, 9000, 10240]),
    places=st.lists(st.tuples(st.integers(0, 511), st.sampled_from(["nan", "inf", "-inf", "9"]))),
    at_end=st.sampled_from(["nan", "inf", "-inf", "9", "0"]),
)
def test_numbers_that_are_not_finite(
    width: int, places: list[tuple[int, str]], at_end: str
) -> None:
    row = torch.zeros(1, width)
    for place, value in places:
        row[0, place] = float(value)
    row[0, -1] = float(at_end)
    assert torch.equal(place_of_largest(row), row.argmax(-1, keepdim=True))


def test_rows_with_gaps_between_them() -> None:
    wide = torch.randn(4, 3000)
    numbers = wide[::2, 5:1500]
    assert torch.equal(place_of_largest(numbers), numbers.argmax(-1, keepdim=True))
