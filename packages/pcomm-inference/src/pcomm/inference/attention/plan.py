"""Which calls serve the requests of a step, and where their keys lie."""

# Shape suffixes: N requests that one call serves, U units of the pool that hold their keys, L keys.

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pcomm.inference.attention.masks import CausalMask

__all__ = ["AttentionPlan", "KeyPlaces", "OneTokenCall", "PromptChunk"]


@dataclass(frozen=True)
class KeyPlaces:
    """Where the keys of some requests lie in the pool.

    Attributes:
        units: int, units of the pool, U for each of N requests: blocks on a CPU, single tokens
            elsewhere. Units behind the last token of a request are its first unit once more.
        num_requests: N.
        num_keys: L, the number of keys that are read of each request.
        is_by_block: True if units are blocks.
    """

    units: Tensor
    num_requests: int
    num_keys: int
    is_by_block: bool


@dataclass(frozen=True)
class OneTokenCall:
    """Requests with one new token each, served by one call of torch's attention.

    Attributes:
        rows_N: int64, their places among the tokens of the step; None if they are all of them.
        places: Places of their keys.
        mask_N11L: Mask of keys behind the last token; None if there are none.
    """

    rows_N: Tensor | None
    places: KeyPlaces
    mask_N11L: Tensor | None


@dataclass(frozen=True)
class PromptChunk:
    """A request with several new tokens, served by one call for every few of them.

    Attributes:
        start: Place of the first new token among the tokens of the step.
        num_new: Number of new tokens.
        context: Number of tokens before them.
        places: Places of the keys of all of them.
    """

    start: int
    num_new: int
    context: int
    places: KeyPlaces


@dataclass(frozen=True)
class AttentionPlan:
    """What one step does in every attention layer with blocks and heads of one shape.

    Attributes:
        begun_blocks: int, blocks that are begun and not filled; None if there are none.
        one_token_calls: Calls for the requests with one new token.
        chunks: Requests with several new tokens.
        causal_mask: Masks of the calls for the chunks; None if there are none.
    """

    begun_blocks: Tensor | None
    one_token_calls: tuple[OneTokenCall, ...]
    chunks: tuple[PromptChunk, ...]
    causal_mask: CausalMask | None
