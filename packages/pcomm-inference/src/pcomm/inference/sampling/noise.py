"""Random numbers that are keyed by integers: of a row, whatever else is in its batch."""

# Shape suffixes: R rows, V vocabulary, C candidates of a row.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["DRAW_1", "DRAW_2", "UNIFORM_BITS", "TokenNoise", "row_keys"]

# The constants of SplitMix64 and, for the two rounds of a draw, those of MurmurHash3's 64-bit
# finaliser, as signed integers.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
DRAW_1, DRAW_2 = 0xFF51AFD7ED558CCD - 2**64, 0xC4CEB9FE1A85EC53 - 2**64
# Of 64 mixed bits the upper ones make a uniform number.
UNIFORM_BITS = 40


class TokenNoise:
    """Noise by which the largest of `logits + noise` is a draw from their softmax (Gumbel-max).

    The integers behind the noise are equal on all devices; its floating-point numbers are equal up
    to the rounding of the device's logarithm. A number does not depend on other rows, on other
    tokens, or on which tokens were removed.

    Args:
        vocabulary: Number of token ids.
        device: Device of the noise.

    Attributes:
        mixed_V: int64, what each token id contributes.
    """

    def __init__(self, vocabulary: int, device: torch.device | str) -> None:
        self.mixed_V = _mix(torch.arange(vocabulary, device=device))

    def keys(self, seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
        """int64 `[R]`, the state from which all noise of a row comes; on the device of the noise.

        Args:
            seeds: Seed of each row, from -2^63 to 2^64 - 1.
            positions: Position of each row in its request.
        """
        return row_keys(seeds, positions, self.mixed_V.device)

    def gumbel(self, keys_R: Tensor, ids_RC: Tensor | None = None) -> Tensor:
        """fp32 `[R, C]`, standard Gumbel noise from -2.9 to 28.5.

        Args:
            keys_R: Keys of the rows, from `keys`.
            ids_RC: Token ids of each row; None for all, in order.
        """
        mixed = self.mixed_V if ids_RC is None else self.mixed_V[ids_RC]
        bits = mixed ^ keys_R[:, None]
        bits.mul_(DRAW_1)
        # The shift copies the sign, which costs one of 64 bits and saves a pass.
        bits.bitwise_xor_(bits >> 32)
        bits.mul_(DRAW_2)
        # From -2^(b-1) to 2^(b-1) - 1, then from 0 to 1; neither of them, which have no logarithm.
        uniform = (bits >> (64 - UNIFORM_BITS)).float()
        uniform.add_(2.0 ** (UNIFORM_BITS - 1)).mul_(2.0**-UNIFORM_BITS)
        uniform.clamp_(2.0 ** -(UNIFORM_BITS + 1), 1 - 2.0**-24)
        # log1p keeps the many digits of small numbers, from which large noise comes.
        return uniform.neg_().log1p_().neg_().log_().neg_()


def row_keys(seeds: Sequence[int], positions: Sequence[int], device: torch.device) -> Tensor:
    """`TokenNoise.keys` on any device. Local.

    Args:
        seeds: Seed of each row, from -2^63 to 2^64 - 1.
        positions: Position of each row in its request.
        device: Device of the keys.
    """
    signed = [seed if seed < 2**63 else seed - 2**64 for seed in seeds]
    seeds_R, positions_R = torch.tensor([signed, list(positions)], device=device)
    return _mix(_mix(seeds_R) + positions_R)


def _mix(numbers: Tensor) -> Tensor:
    # SplitMix64: 64 bits to 64 bits, one to one; neighbours come out unrelated.
    mixed = numbers + _GOLDEN
    mixed = (mixed ^ _shifted(mixed, 30)) * _MIX_1
    mixed = (mixed ^ _shifted(mixed, 27)) * _MIX_2
    return mixed ^ _shifted(mixed, 31)


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)
