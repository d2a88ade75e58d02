"""What the engine asks of a tokenizer; this package depends on no tokenizer library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

__all__ = ["JsonTokenizer", "Tokenizer"]


class Tokenizer(Protocol):
    """Text to token ids and back; any object with these members."""

    @property
    def eos_ids(self) -> Sequence[int]:
        """Token ids by which the model ends a text; may be empty."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without marks of its begin and end."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; special tokens give none.

        Bytes that are no UTF-8 become U+FFFD, as in every tokenizer library.
        """
        ...


@runtime_checkable
class JsonTokenizer(Tokenizer, Protocol):
    """A tokenizer that can show its vocabulary, as structured output needs."""

    def to_json(self) -> str:
        """The content of `tokenizer.json`, as the library `tokenizers` writes it."""
        ...
