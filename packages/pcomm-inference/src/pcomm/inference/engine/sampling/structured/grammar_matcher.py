"""The place in a grammar that one request has reached."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pcomm.core.errors import UnsupportedError

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["GrammarMatcher"]


class GrammarMatcher:
    """A `GrammarState` of llguidance; made by `GrammarCompiler.compile`.

    Args:
        matcher: Matcher at the begin of a text, used by no other request.
        vocabulary: Number of logits of the model.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: int) -> None:
        self._matcher = matcher
        self._num_words = -(-vocabulary // 32)

    @property
    def is_finished(self) -> bool:
        """Whether the text is complete and no token can follow but an end."""
        return bool(self._matcher.is_stopped())

    def allowed_words(self) -> Tensor:
        """int32 `[ceil(V / 32)]` on the CPU: bit `i % 32` of word `i // 32` allows token `i`."""
        words = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.int32)
        self._check("allowed_words")
        return words[: self._num_words]

    def accept(self, token_id: int) -> None:
        """Go on behind a token.

        Raises:
            UnsupportedError: The grammar forbids the token, or became larger than llguidance can
                follow. The request cannot go on; others are not affected.
        """
        self._matcher.consume_token(token_id)
        self._check(f"accept({token_id})")

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens that were accepted."""
        self._matcher.rollback(num_tokens)
        self._check(f"rollback({num_tokens})")

    def _check(self, asked: str) -> None:
        if self._matcher.is_error():
            raise UnsupportedError(
                f"grammar of a request: {asked}",
                # Behind the first line llguidance shows the state of its parser.
                found=str(self._matcher.get_error()).strip().split("\n")[0],
                why="llguidance cannot go on, so that no token is known to be allowed.",
                fix="End the request; a simpler schema or expression avoids limits of size.",
            )
