"""What every layer of one forward pass shares."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pcomm.gdn_cp import Plan, Spec
from pcomm.integration.models.moe.balance import Balance
from pcomm.integration.models.rotary import Rotation

__all__ = ["Cache", "Context", "KeyValueCache", "LayerCache", "RecurrentCache"]


# Room for a short text, which then never grows.
_FIRST_TOKENS = 256


class KeyValueCache:
    """Keys and values of the tokens that one attention layer has seen of one sequence.

    Its memory grows with the tokens that it holds, by half each time it is full.

    Args:
        max_tokens: Most tokens that it can hold.
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
        stop = self._length + k_THK.shape[0]
        assert stop <= self._max_tokens, f"{stop} tokens in a cache of {self._max_tokens}"
        self._keys = self._with_room(self._keys, k_THK, stop)
        self._values = self._with_room(self._values, v_THK, stop)
        self._keys[self._length : stop] = k_THK
        self._values[self._length : stop] = v_THK
        self._length = stop
        return self._keys[:stop], self._values[:stop]

    def _with_room(self, held: Tensor | None, new: Tensor, stop: int) -> Tensor:
        """A buffer of at least `stop` tokens, which begins with what is held."""
        if held is not None and stop <= held.shape[0]:
            return held
        room = min(self._max_tokens, max(stop + stop // 2, _FIRST_TOKENS))
        grown = new.new_empty((room, *new.shape[1:]))
        if held is not None:
            grown[: self._length] = held[: self._length]
        return grown


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


@dataclass
class Cache:
    """What a model keeps of one sequence while it writes text; see `LanguageModel.new_cache`.

    Args:
        layers: One for each block.
        num_tokens: Tokens seen.
    """

    layers: tuple[LayerCache, ...]
    num_tokens: int = 0


@dataclass(frozen=True)
class Context:
    """Shared by the layers of one forward pass over packed sequences.

    Args:
        plan: The plan of the sequences, which tells what tokens belong together, and how they
            travel between context-parallel ranks.
        rotation: Rotation of the tokens that attention sees; None in a model without attention.
        has_stream_shares: True if the residual stream is split over tensor-parallel ranks. Then no
            strategy of the plan moves hidden states, and projections gather the tokens.
        balance: Counts for the balance losses of layers with experts; None without these.
    """

    plan: Plan
    rotation: Rotation | None
    has_stream_shares: bool = False
    balance: Balance | None = None

    def enter(self, spec: Spec, x: Tensor) -> Tensor:
        """Hidden states as the projections of a mixer want them; collective, see `Plan.enter`."""
        return x if self.has_stream_shares else self.plan.enter(spec, x)

    def leave(self, spec: Spec, y: Tensor) -> Tensor:
        """What `enter` undoes."""
        return y if self.has_stream_shares else self.plan.leave(spec, y)
