"""Texts and bytes of single tokens, for log-probabilities."""

from __future__ import annotations

import json
import re
from functools import lru_cache

import tokenizers

__all__ = ["TokenTexts"]

_BYTE = re.compile("<0x([0-9A-F]{2})>")
_BLANK = "\u2581"


class TokenTexts:
    """What each token of a vocabulary stands for by itself.

    Args:
        tokenizer_json: Content of `tokenizer.json`.
    """

    def __init__(self, tokenizer_json: str) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
        content = json.loads(tokenizer_json)
        self._added = {one["id"]: one["content"] for one in content.get("added_tokens") or ()}
        self._is_byte_level = '"ByteLevel"' in tokenizer_json
        self._bytes = {character: byte for byte, character in _byte_alphabet().items()}

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token; of a special one its name, and none of an id without a token."""
        if token_id in self._added:
            return str(self._added[token_id]).encode()
        name = self._tokenizer.id_to_token(token_id)
        if name is None:
            return b""
        if self._is_byte_level:
            return bytes(self._bytes[one] for one in name if one in self._bytes)
        if single := _BYTE.fullmatch(name):
            return bytes([int(single[1], 16)])
        return str(name).replace(_BLANK, " ").encode()

    def text_of(self, token_id: int) -> str:
        """The text of a token; bytes that are no whole character become U+FFFD."""
        return self.bytes_of(token_id).decode(errors="replace")


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[int, str]:
    """The printable character that GPT-2's byte-level alphabet has for each byte."""
    kept = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in kept]
    return {byte: chr(byte) for byte in kept} | {
        byte: chr(256 + place) for place, byte in enumerate(others)
    }
