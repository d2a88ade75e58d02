"""What every layer of one forward pass shares."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pcomm.integration.models.rotary import Rotation
from pcomm.integration.models.sequences import PackedSequences

__all__ = ["Context", "KeyValueCache", "LayerCache", "RecurrentCache"]


class KeyValueCache:
    """Keys and values of the tokens that one attention layer has seen of one sequence.

    Args:
        max_tokens: How many tokens it can hold.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens held."""
        return self._length

    def append(self, k_THK: Tensor, v_THK: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens so far, the given ones last."""
        if self._keys is None or self._values is None:
            shape = (self._max_tokens, *k_THK.shape[1:])
            self._keys, self._values = k_THK.new_empty(shape), v_THK.new_empty(shape)
        stop = self._length + k_THK.shape[0]
        assert stop <= self._max_tokens, f"{stop} tokens in a cache of {self._max_tokens}"
        self._keys[self._length : stop] = k_THK
        self._values[self._length : stop] = v_THK
        self._length = stop
        return self._keys[:stop], self._values[:stop]


@dataclass
class RecurrentCache:
    """What a recurrent layer keeps of one sequence: as much after a thousand tokens as after one.

    Args:
        halo: `[1, W - 1, C]`, the last inputs of its convolution; None before the prompt.
        state: `[1, H, ...]`; None before the prompt.
    """

    halo: Tensor | None = None
    state: Tensor | None = None


LayerCache = KeyValueCache | RecurrentCache


@dataclass(frozen=True)
class Context:
    """Shared by the layers of one forward pass.

    Args:
        sequences: Which tokens see each other.
        rotation: Of the tokens' positions.
        cache: While text is generated: what each layer has seen; one sequence only.
    """

    sequences: PackedSequences
    rotation: Rotation
    cache: tuple[LayerCache, ...] | None = None
