"""Writing text: long prompts, extreme temperatures, and no limit that matters."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from pcomm.integration import recipes
from pcomm.integration.config_rules import validate
from pcomm.integration.data.tokenizer import train_tokenizer
from pcomm.integration.generate.sampling import sample
from pcomm.integration.generate.writer import Writer
from pcomm.integration.models.context import KeyValueCache
from pcomm.integration.models.initialisation import initialise
from pcomm.integration.models.language_model import LanguageModel
from pcomm.integration.parallelize import plan_sequences


def model_of(pattern: str = "A", **sizes: int) -> LanguageModel:
    """A model whose weights are so large that each token decides those that follow."""
    tiny = recipes.tiny()
    layers = max(2, len(pattern))
    shape = dataclasses.replace(tiny.model, pattern=pattern, layers=layers, init_std=0.3, **sizes)
    config = validate(dataclasses.replace(tiny, model=shape), 1)
    model = LanguageModel(config.model, config.data.vocabulary, dtype=torch.float64)
    initialise(model, config.model, seed=0)
    return model.eval()


def random_tokens(count: int) -> Tensor:
    return torch.randint(320, (count,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kv_heads", [2, 4], ids=["shared keys", "own keys"])
@pytest.mark.parametrize("count", [1, 3, 2500])
@torch.inference_mode()
def test_a_prompt_takes_the_fast_path_of_attention(kv_heads: int, count: int) -> None:
    """The oracle is the forward pass of training, which packs sequences in four dimensions."""
    model, tokens = model_of(kv_heads=kv_heads), random_tokens(count + 1)
    cache = model.new_cache(count + 1)
    # The other kernel writes the matrix of all scores, and is 11 times as slow for this prompt.
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        prompt = model.extend(tokens[:-1], cache)
        last = model.extend(tokens[-1:], cache)
    expected = model(tokens, plan_sequences(model, (0, count + 1)))
    assert (torch.cat([prompt, last]) - expected).abs().max() <= 1e-11 * expected.abs().max()


@pytest.mark.parametrize("pattern", ["A", "GM", "MA"])
@torch.inference_mode()
def test_only_the_logits_that_are_asked_for_are_computed(pattern: str) -> None:
    model, tokens = model_of(pattern), random_tokens(50)
    rows: list[int] = []
    model.head.register_forward_hook(lambda _, inputs, __: rows.append(len(inputs[0])))
    every = model.extend(tokens, model.new_cache(50))
    for num_logits in (1, 3, 50):
        found = model.extend(tokens, model.new_cache(50), num_logits=num_logits)
        # In fp64, in which a matrix product of fewer rows may add in another order.
        assert found.shape == (num_logits, every.shape[1])
        assert (found - every[-num_logits:]).abs().max() <= 1e-13 * every.abs().max()
    assert rows == [50, 1, 3, 50]


def writer() -> tuple[Writer, list[int]]:
    """A writer, and the rows of logits that it computes at a time."""
    tokenizer = train_tokenizer(["some words to learn " * 5], 320)
    model, rows = model_of(), []
    model.head.register_forward_hook(lambda _, inputs, __: rows.append(len(inputs[0])))
    return Writer(model, tokenizer, 0), rows


def test_a_long_prompt_costs_one_row_of_logits() -> None:
    found, rows = writer()
    found.write("words " * 700, max_tokens=3, temperature=0, seed=0)
    assert set(rows) == {1}


def test_a_limit_beyond_all_memory_is_only_a_limit() -> None:
    found, _ = writer()
    text = found.write("some", max_tokens=10**10, temperature=3.0, seed=0)
    assert text.finish_reason == "end"
    assert text.num_tokens < 10_000


@pytest.mark.parametrize("steps", [[1, 1, 1], [300, 1, 1], [256, 1], [1, 255, 1, 200]])
def test_a_cache_that_grows_holds_what_it_was_given(steps: list[int]) -> None:
    cache, given = KeyValueCache(1000), torch.rand(sum(steps), 2, 4)
    done = 0
    for count in steps:
        keys, values = cache.append(given[done : done + count], -given[done : done + count])
        done += count
        assert torch.equal(keys, given[:done])
        assert torch.equal(values, -given[:done])
    assert cache.length == done
    with pytest.raises(AssertionError, match="in a cache of 1000"):
        cache.append(torch.rand(1000, 2, 4), torch.rand(1000, 2, 4))


@pytest.mark.parametrize("temperature", [1e-8, 1e-40, 1e-320, 5e-324])
def test_a_tiny_temperature_takes_the_likeliest_token(temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1000, generator=generator) * 50
    for shift in (0.0, 1e4, -1e4):
        shifted = logits + shift
        assert sample(shifted, temperature, generator) == int(shifted.argmax())


def test_a_temperature_without_measure_takes_any_token() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([0.0, 50.0])
    drawn = [sample(logits, 1e300, generator) for _ in range(200)]
    # Binomial with standard deviation 7.
    assert 60 < sum(drawn) < 140


def test_the_draw_follows_the_softmax() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([0.0, math.log(3.0)])
    drawn = sum(sample(logits, 1.0, generator) for _ in range(1000))
    # Binomial around 750 with standard deviation 14.
    assert 680 < drawn < 820
