"""Tokens that are chosen in three launches, interpreted, against the operations of torch.

Vocabularies lie on both sides of a turn of a loop (1,024 ids) and of a part (4,096); the tokens
between which a cut lies are fewer than a turn of the list, and more.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from core_support.fake_driver import STREAM, fake_driver
from core_support.kernel_launches import compiled, recorded, resources
from inference_support.kernels import interpreted_kernels
from pcomm.core.testing.assertions import assert_equal, poisoned_memory
from pcomm.inference.sampling.filters import edit_logits
from pcomm.inference.sampling.params import SamplingParams, SamplingRow
from pcomm.inference.sampling.sampler import NotFiniteLogitsError, Sampler

pytest.importorskip("triton", reason="triton has wheels for Linux only")

BF16, FP32 = torch.bfloat16, torch.float32
# numpy, which interprets, tells of infinity less infinity.
INFINITE = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture
def interpreted() -> Iterator[dict[str, ModuleType]]:
    with interpreted_kernels() as modules, poisoned_memory():
        yield modules


def row(position: int = 0, **settings: Any) -> SamplingRow:
    return SamplingRow(SamplingParams(**settings), (), (), position, ())


def by_kernels(logits: Tensor, rows: list[SamplingRow]) -> list[int]:
    """What the sampler does where logits are on a GPU."""
    sampler = Sampler(logits.shape[1], "cpu")
    sampler._has_kernels = True
    return sampler.sample(logits, rows).token_ids


def by_torch(logits: Tensor, rows: list[SamplingRow]) -> list[int]:
    return Sampler(logits.shape[1], "cpu").sample(logits, rows).token_ids


def logits_of(count: int, vocabulary: int, dtype: torch.dtype, spread: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(vocabulary + count)
    return (spread * torch.randn(count, vocabulary, generator=generator)).to(dtype)


def any_settings(chance: random.Random, vocabulary: int) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "temperature": chance.choice([0.0, 1.0, 0.6, 3.0, 1e-40]),
        "seed": chance.randrange(-(2**40), 2**40),
    }
    if chance.random() < 0.6:
        settings["top_k"] = chance.choice([1, 2, 40, 250, vocabulary - 1, vocabulary + 3])
    if chance.random() < 0.6:
        settings["top_p"] = chance.choice([0.01, 0.5, 0.9, 0.999])
    if chance.random() < 0.4:
        settings["min_p"] = chance.choice([0.001, 0.1, 0.9])
    return settings


# In bf16 many logits are equal, and so are the last that top-k and top-p keep.
VOCABULARIES = {FP32: (1, 1025, 4097), BF16: (7, 1024)}


@INFINITE
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_rows_with_any_settings_get_the_tokens_of_torch(
    interpreted: dict[str, ModuleType], dtype: torch.dtype
) -> None:
    chance = random.Random(str(dtype))
    for vocabulary in VOCABULARIES[dtype]:
        check_any_settings(chance, vocabulary, dtype, 0)


@INFINITE
@pytest.mark.soak
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_many_rows_with_any_settings(
    interpreted: dict[str, ModuleType], dtype: torch.dtype
) -> None:
    chance = random.Random(str(dtype))
    for vocabulary in (1, 7, 300, 1024, 4097):
        for turn in range(3):
            check_any_settings(chance, vocabulary, dtype, turn)


def check_any_settings(
    chance: random.Random, vocabulary: int, dtype: torch.dtype, turn: int
) -> None:
    logits = logits_of(5, vocabulary, dtype, spread=chance.choice([0.3, 2.0]))
    rows = [row(turn, **any_settings(chance, vocabulary)) for _ in logits[1:]]
    # Of all tokens, those that are far less likely than the likeliest are left out.
    rows.append(row(turn, temperature=3.0, min_p=0.9))
    assert by_kernels(logits, rows) == by_torch(logits, rows), rows


# The first three of equal ones; a mass of 2.5 of them; a cut among the lower ones, which are more
# than a turn of the list.
CUTS: dict[str, tuple[dict[str, Any], int]] = {
    "k": ({"top_k": 3}, 7),
    "p": ({"top_p": 2.5 / 750, "top_k": 750}, 0),
    "both": ({"top_k": 5, "top_p": 0.5}, 7),
    "lower": ({"top_k": 752, "temperature": 1e9}, 1),
}


@pytest.mark.parametrize(
    ("cut", "draws"),
    [
        *((cut, draws) for cut, (_, draws) in CUTS.items() if draws),
        *(pytest.param(cut, 40, marks=pytest.mark.soak) for cut in CUTS),
    ],
)
def test_cuts_among_equal_logits_keep_the_lowest_ids(
    interpreted: dict[str, ModuleType], cut: str, draws: int
) -> None:
    """As many draws as show each token that is kept: all of those, and no other."""
    logits = torch.zeros(1, 1500, dtype=FP32)
    logits[:, ::2] = 1.0
    rows = [row(place, **CUTS[cut][0]) for place in range(draws)]
    found = by_kernels(logits.expand(draws, -1), rows)
    assert found == by_torch(logits.expand(draws, -1).contiguous(), rows)
    if cut != "lower":
        assert set(found) == {0, 2, 4}


@INFINITE
def test_rows_that_are_no_numbers_have_no_token(interpreted: dict[str, ModuleType]) -> None:
    logits = logits_of(7, 300, FP32)
    logits[0, 7] = torch.nan
    logits[1, 8] = torch.inf
    logits[2] = -torch.inf
    logits[3, 10:] = -torch.inf
    logits[4, :9] = torch.nan
    settings: list[dict[str, Any]]
    settings = [{}, {"top_k": 5}, {"top_p": 0.5}, {"top_k": 200}, {"temperature": 0.0}]
    rows = [row(**one) for one in (*settings, *({"top_k": 3}, {"temperature": 0.0}))]
    found = by_kernels(logits, rows)
    assert found == by_torch(logits, rows)
    assert found[:3] == [-1, -1, -1]
    assert found[4] == -1
    sampler = Sampler(300, "cpu")
    sampler._has_kernels = True
    errors = sampler.sample(logits, rows).errors
    assert {*errors} == {0, 1, 2, 4}
    assert all(isinstance(error, NotFiniteLogitsError) for error in errors.values())


def test_a_row_gets_its_token_in_any_batch(interpreted: dict[str, ModuleType]) -> None:
    """And with logits that are rows of a wider tensor."""
    wide = logits_of(4, 1100, BF16)
    logits = wide[:, :1030]
    settings: list[dict[str, Any]]
    settings = [{"top_k": 30}, {}, {"top_p": 0.8, "seed": 5}, {"temperature": 0.0}]
    rows = [row(n, **one) for n, one in enumerate(settings)]
    together = by_kernels(logits, rows)
    assert together == [by_kernels(logits[n : n + 1], rows[n : n + 1])[0] for n in range(4)]


def test_edits_are_those_of_torch(interpreted: dict[str, ModuleType]) -> None:
    """Tokens that occur once and often, more than a turn of the loop; all kinds on one token."""
    chance = random.Random(1)
    vocabulary = 400
    for dtype in (FP32, BF16):
        rows = []
        for n in range(4):
            texts = [array("q", (chance.randrange(300) for _ in range(k))) for k in (n * 150, 70)]
            settings: dict[str, Any] = {"repetition_penalty": 1.3} if n != 1 else {}
            if n:
                settings |= {"presence_penalty": 0.7, "frequency_penalty": -0.1 * n}
                settings |= {"logit_bias": {texts[1][0]: 3.0, 399: -2.0}, "min_tokens": 100}
            one = SamplingRow(SamplingParams(**settings), texts[0], texts[1], 5, (texts[1][0], 17))
            rows.append(one)
        logits = logits_of(4, vocabulary, dtype)
        found, expected = logits.float(), logits.float()
        edit_kernel = interpreted["sampling.edit_kernel"]
        edit_kernel.edit(found, logits, edit_kernel.told_of_edits(rows, vocabulary))
        edit_logits(expected, rows)
        assert_equal(found, expected)
        assert by_kernels(logits, rows) == by_torch(logits, rows)


# That of Llama 3: kernels are compiled for it once, to be looked at and to be launched.
VOCABULARY = 128_256


def long_form(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.soak)


@pytest.mark.parametrize(
    ("dtype", "capability"),
    [(BF16, 90), long_form(FP32, 100), long_form(FP32, 90), long_form(BF16, 100)],
    ids=str,
)
def test_registers_suffice(dtype: torch.dtype, capability: int) -> None:
    from pcomm.inference.sampling import draw_kernels, edit_kernel

    told, mixed = (torch.empty(n, dtype=torch.int64) for n in (6 * 3, VOCABULARY))
    logits = torch.empty(3, VOCABULARY, dtype=dtype)
    with recorded() as edits:
        edits_told = edit_kernel.told_of_edits(3 * [row(logit_bias={1: 1.0})], VOCABULARY)
        edit_kernel.edit(logits.float(), logits, edits_told)
    for launch in (*draw_kernels.launches(logits, told.view(6, -1), mixed, told), *edits):
        found = compiled(launch, capability)
        used = resources(found)
        assert (used["STACK"], used["LOCAL"]) == (0, 0)
        assert "div.s64" not in found.asm["ptx"]
        if launch not in edits:
            assert "ld.global.v4.b32" in found.asm["ptx"], "logits by 16 bytes"


@pytest.mark.parametrize(
    ("vocabulary", "capability"),
    [(VOCABULARY, 90), long_form(300, 100), long_form(5000, 100), long_form(300, 90)],
)
def test_tokens_are_chosen_in_five_launches(vocabulary: int, capability: int) -> None:
    """With the copy that is edited; the driver refuses what no launch may have."""
    chance = random.Random(0)
    logits = logits_of(3, vocabulary, BF16)
    found: list[tuple[Any, ...]] = []
    rows = [row(**any_settings(chance, vocabulary)) for _ in logits]
    with fake_driver(capability, found):
        by_kernels(logits, rows)
        rows[0] = row(logit_bias={1: 1.0})
        by_kernels(logits, rows)
    names = ["largest_kernel", "draw_kernel", "choose_kernel"]
    assert [launch[0] for launch in found] == [*names, "edit_kernel", *names]
    assert {launch[2] for launch in found} == {STREAM}


@pytest.mark.parametrize(
    ("vocabulary", "dtype", "settings", "edits"),
    [
        (1, FP32, {"repetition_penalty": 2.0}, ["edit_kernel"]),
        long_form(300, BF16, {"top_k": 5}, []),
    ],
)
def test_a_row_alone_is_launched_as_well(
    vocabulary: int, dtype: torch.dtype, settings: dict[str, Any], edits: list[str]
) -> None:
    """Triton compiles a size of 1 as a constant, which has no methods."""
    found: list[tuple[Any, ...]] = []
    with fake_driver(90, found):
        by_kernels(logits_of(1, vocabulary, dtype), [row(**settings)])
    names = ["largest_kernel", "draw_kernel", "choose_kernel"]
    assert [launch[0] for launch in found] == [*edits, *names]
