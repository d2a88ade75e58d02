"""The noise behind draws: its distribution, and that it depends on its key alone."""

import math

import pytest
import torch

from pcomm.inference.sampling.noise import TokenNoise

VOCABULARY = 151_936


def largest_distance(sample: torch.Tensor) -> float:
    """Kolmogorov and Smirnov's distance to the Gumbel distribution, in units of 1/sqrt(n)."""
    expected = torch.exp(-torch.exp(-sample.double().flatten().sort().values))
    steps = torch.arange(1, len(expected) + 1) / len(expected)
    return float((expected - steps).abs().max()) * math.sqrt(len(expected))


@pytest.fixture(scope="module")
def noise() -> TokenNoise:
    return TokenNoise(VOCABULARY, "cpu")


def test_it_is_gumbel_noise_over_tokens_over_seeds_and_over_positions(noise) -> None:
    # 2.2 is exceeded with a probability of 1e-4; seeds are fixed, so each of them always passes.
    few = torch.tensor([[0, 17, 151_935]])
    number = 50_000
    over_seeds = noise.gumbel(noise.keys(range(number), [5] * number), few.expand(number, 3))
    over_positions = noise.gumbel(noise.keys([5] * number, range(number)), few.expand(number, 3))
    for sample in (noise.gumbel(noise.keys([0], [0])), *over_seeds.T, *over_positions.T):
        assert largest_distance(sample) < 2.2
    # Neighbours in seed, position or token are no more alike than strangers are.
    for sample in (over_seeds, over_positions):
        assert largest_distance(sample[:-1] - sample[1:]) > 2.2  # no Gumbel, but logistic
        pairs = [(sample[:-1, 0], sample[1:, 0]), (sample[:, 0], sample[:, 1])]
        for one, other in pairs:
            correlation = torch.corrcoef(torch.stack([one, other]))[0, 1]
            assert abs(correlation) < 4 / math.sqrt(number)


def test_large_noise_is_as_frequent_as_it_should_be(noise) -> None:
    keys = noise.keys(range(12), range(12))
    found = torch.cat([noise.gumbel(keys[row : row + 1]) for row in range(12)])
    assert found.isfinite().all()
    expected = found.numel() * -math.expm1(-math.exp(-11.0))
    assert abs((found > 11).sum() - expected) < 4 * math.sqrt(expected)


def test_a_number_depends_on_seed_position_and_token_alone(noise) -> None:
    keys = noise.keys([3, 2**64 - 1, -1, 0, 4], [9, 9, 9, 0, 8])
    # -1 and 2^64 - 1 are the same 64 bits; otherwise no two are related.
    assert keys[1] == keys[2]
    assert len(set(keys.tolist())) == 4
    ids = torch.tensor([[5, 0, 151_935], [7, 7, 1]])
    whole = noise.gumbel(keys[:2])
    assert torch.equal(noise.gumbel(keys[:2], ids), whole.gather(1, ids))
    assert torch.equal(noise.gumbel(keys[1:2]), whole[1:])
    assert torch.equal(TokenNoise(200, "cpu").gumbel(keys[:2]), whole[:, :200])


def test_the_integers_are_those_of_python(noise) -> None:
    # Written again with Python's integers, so that wrapping, shifts and signs are checked.
    def mix(z: int) -> int:
        z = (z + 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    for seed, position in [(0, 0), (12345, 678), (2**64 - 1, 151_935)]:
        key = mix((mix(seed) + position) % 2**64)
        assert noise.keys([seed], [position]).item() % 2**64 == key
        for token in (0, 1, 99_999):
            bits = (mix(token) ^ key) * 0xFF51AFD7ED558CCD % 2**64
            sign = (2**64 - 2**32) * (bits >> 63)
            bits = (bits ^ (bits >> 32 | sign)) * 0xC4CEB9FE1A85EC53 % 2**64
            uniform = (bits >> 24 ^ 1 << 39) / 2**40
            expected = -math.log(-math.log1p(-uniform))
            found = noise.gumbel(noise.keys([seed], [position]), torch.tensor([[token]]))
            assert found.item() == pytest.approx(expected, rel=1e-5, abs=1e-5)
