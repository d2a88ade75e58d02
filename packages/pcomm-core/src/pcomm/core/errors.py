"""The errors that pcomm raises for a caller's mistake, each told in four parts."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "ClosedError",
    "ConfigError",
    "DivergenceError",
    "FencedError",
    "LayoutError",
    "PcommError",
    "PeerError",
    "PeerTimeoutError",
    "TopologyError",
    "UnsupportedError",
    "near_misses",
]


class PcommError(Exception):
    """A mistake that the caller can repair, told in four parts.

    Args:
        asked: The request, with the name of the function or key: `open_groups: group 'tpp'`.
        found: The state that was found instead, with its values.
        why: The reason why it cannot work.
        fix: The action that resolves it.
    """

    def __init__(self, asked: str, *, found: str, why: str, fix: str) -> None:
        self.asked, self.found, self.why, self.fix = asked, found, why, fix
        super().__init__(f"{asked}: {found}\n{why}\n{fix}")

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments do not survive the default pickling, and errors cross processes.
        return _rebuild, (type(self), self.asked, self.found, self.why, self.fix)


def _rebuild(kind: type[PcommError], asked: str, found: str, why: str, fix: str) -> PcommError:
    return kind(asked, found=found, why=why, fix=fix)


class ConfigError(PcommError, ValueError):
    """A setting, an argument or an environment variable has a value that cannot be used."""


class TopologyError(PcommError, ValueError):
    """Axes, sizes, ranks or groups do not fit together."""


class LayoutError(PcommError, ValueError):
    """A tensor cannot be split or exchanged in the way that was asked for."""


class UnsupportedError(PcommError):
    """What was asked for is sound, but this build, machine or version cannot do it."""


class ClosedError(PcommError, RuntimeError):
    """What was asked for needs groups, a model or a plan that was closed before."""


class DivergenceError(PcommError):
    """Ranks that must agree do not; raised on all of them, naming the first difference."""


class PeerError(PcommError):
    """Another rank failed, and this rank stops with it.

    Most are raised before a collective is entered; `Pending.wait_or` leaves one that is in flight.
    """


class FencedError(PcommError):
    """A newer generation of ranks has begun; this process's one is over. See `core.control`."""


class PeerTimeoutError(PcommError, TimeoutError):
    """A rank did not arrive in time."""


def near_misses(name: str, known: Iterable[str]) -> str:
    """A sentence that names the known words closest to `name`, for the last part of an error.

    Those of which `name` is the initials come first: `learning_rate` for `lr`.
    """
    words = sorted(known)
    parts = {word: word.split("_") for word in words if "_" in word}
    close = [word for word, own in parts.items() if name == "".join(part[:1] for part in own)]
    close += difflib.get_close_matches(name, words, n=3, cutoff=0.55)
    if close:
        return "Did you mean " + " or ".join(repr(word) for word in dict.fromkeys(close)) + "?"
    return "Known here: " + (", ".join(repr(word) for word in words) or "nothing") + "."
