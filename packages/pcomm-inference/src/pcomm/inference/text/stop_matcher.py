"""Stop strings in a text that comes in parts, by the automaton of Aho and Corasick."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

__all__ = ["StopMatcher"]


class StopMatcher:
    """Text up to the first stop string, whatever the parts in which it comes.

    The first one is that which is complete first; among those that are complete with the same
    character, the longest. Text is held back only while it may become a stop string.

    Args:
        stop: Strings that end the text, none of them empty.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        # Each node is a beginning of a stop string: its continuations, the node of its longest own
        # ending that is a beginning too, its length, and the longest stop string that ends there.
        self._next: list[dict[str, int]] = [{}]
        self._shorter: list[int] = [0]
        self._depth: list[int] = [0]
        self._match: list[int] = [0]
        for text in stop:
            self._add(text)
        self._link()
        self._node = 0
        self._held = ""
        self.is_stopped = False
        """True from the first stop string on."""

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Text that can be shown: none of it is, or can become, part of a stop string. Local.

        Args:
            text: Next part of the text.
            may_stop: False for text whose end can end no stop string, such as that of the first
                `min_tokens` tokens.
        """
        if self.is_stopped:
            return ""
        if len(self._next) == 1:
            return text
        text = self._held + text
        for end in range(len(self._held), len(text)):
            self._node = self._step(text[end])
            length = self._match[self._node]
            if length and may_stop:
                self.is_stopped, self._held = True, ""
                return text[: end + 1 - length]
            while self._node and not self._next[self._node]:
                # A whole stop string that was passed over; no longer one begins with it.
                self._node = self._shorter[self._node]
        certain = len(text) - self._depth[self._node]
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """Text that was held back, at the end of the text."""
        held, self._held, self._node = self._held, "", 0
        return held

    def _step(self, character: str) -> int:
        node = self._node
        while node and character not in self._next[node]:
            node = self._shorter[node]
        return self._next[node].get(character, 0)

    def _add(self, text: str) -> None:
        node = 0
        for character in text:
            if character not in self._next[node]:
                self._next[node][character] = len(self._next)
                self._next.append({})
                self._shorter.append(0)
                self._depth.append(self._depth[node] + 1)
                self._match.append(0)
            node = self._next[node][character]
        self._match[node] = len(text)

    def _link(self) -> None:
        waiting = deque(self._next[0].values())
        while waiting:
            node = waiting.popleft()
            for character, child in self._next[node].items():
                self._node = self._shorter[node]
                self._shorter[child] = self._step(character)
                # The node's own string is longer than any that ends within it.
                self._match[child] = self._match[child] or self._match[self._shorter[child]]
                waiting.append(child)
