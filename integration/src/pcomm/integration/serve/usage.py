"""How many tokens one HTTP request has read and written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pcomm.inference import RequestOutput

__all__ = ["Usage"]


class Usage:
    """Counts tokens while outputs come.

    Args:
        prompt_lengths: Number of tokens of each prompt, once however many texts continue it.
    """

    def __init__(self, prompt_lengths: Sequence[int]) -> None:
        self._prompt, self._written = sum(prompt_lengths), 0
        self._cached: dict[int, int] = {}

    def add(self, place: int, output: RequestOutput) -> None:
        """Count one output of the text number `place`."""
        self._written += len(output.token_ids)
        self._cached[place] = output.cached_tokens

    def to_json(self) -> dict[str, Any]:
        """The field `usage`."""
        # Texts of one prompt share its tokens, so that they may count them several times.
        cached = min(sum(self._cached.values()), self._prompt)
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": self._written,
            "total_tokens": self._prompt + self._written,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
