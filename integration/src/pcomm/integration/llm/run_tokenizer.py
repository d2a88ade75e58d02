"""The tokenizer of a run, as an engine wants it."""

from __future__ import annotations

import json
from collections.abc import Sequence

from pcomm.integration.data.tokenizer import BytePairTokenizer

__all__ = ["RunTokenizer"]


class RunTokenizer:
    """Text to token ids and back with the tokenizer that `pcomm train` has made.

    Args:
        tokenizer: The run's.
    """

    def __init__(self, tokenizer: BytePairTokenizer) -> None:
        self._tokenizer = tokenizer

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Id of the end of a document."""
        return self._tokenizer.eos_ids

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; names of special tokens in it are text like any other."""
        return self._tokenizer.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; special tokens give none."""
        return self._tokenizer.decode(ids)

    def to_json(self) -> str:
        """The vocabulary as `tokenizer.json`, without the rule that cuts very long words.

        Grammars need the bytes of each token alone, and their library cannot compile that rule.
        """
        content = json.loads(self._tokenizer.to_json())
        steps = (content.get("pre_tokenizer") or {}).get("pretokenizers")
        if steps:
            content["pre_tokenizer"]["pretokenizers"] = [s for s in steps if s["type"] != "Split"]
        return json.dumps(content)
