"""What a server is told, beside the model."""

from __future__ import annotations

from dataclasses import dataclass

from pcomm.core.errors import ConfigError

__all__ = ["ServeSettings"]


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Limits of a server.

    Attributes:
        model_name: Name that clients give as `model`.
        api_key: Key that clients show for `/v1`, of printable ASCII; None for none.
        max_body_bytes: Most bytes of the body of a request.
        max_unread_tokens: Most tokens of a request that wait for a client which does not read.
        write_timeout_s: Seconds that such a client may leave one part unread.
        max_compiling: Most grammars that are compiled at once.
        max_waiting_grammars: Most others that wait for that; more are 429.
        grammar_limit_s: Seconds after which a request is refused whose grammar is not compiled.
        step_limit_s: Seconds after which a step that has not returned makes `/health` fail.
        shutdown_s: Seconds that running requests have to end after SIGTERM.
    """

    model_name: str
    api_key: str | None = None
    max_body_bytes: int = 4 * 1024 * 1024
    max_unread_tokens: int = 4096
    write_timeout_s: float = 60.0
    max_compiling: int = 2
    max_waiting_grammars: int = 64
    grammar_limit_s: float = 60.0
    step_limit_s: float = 60.0
    shutdown_s: float = 30.0

    def __post_init__(self) -> None:
        for name in (
            "max_body_bytes",
            "max_unread_tokens",
            "write_timeout_s",
            "max_compiling",
            "max_waiting_grammars",
            "grammar_limit_s",
            "step_limit_s",
            "shutdown_s",
        ):
            # Written so that NaN, which compares as false, is refused.
            if not getattr(self, name) > 0:
                raise ConfigError(
                    f"ServeSettings: {name}",
                    found=f"{getattr(self, name)!r}",
                    why="It is a limit, and nothing would pass it.",
                    fix="Give a number above 0.",
                )
        if self.api_key is not None and not self.api_key.strip():
            raise ConfigError(
                "ServeSettings: api_key",
                found="an empty key",
                why="Any client could show it.",
                fix="Give a key, or None for a server that asks for none.",
            )
        # A header has no other characters that each client and server read alike.
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ConfigError(
                "ServeSettings: api_key",
                found="a key with characters outside printable ASCII",
                why="Clients send the key in an HTTP header, where such characters do not arrive "
                "as they are.",
                fix="Give a key of letters, digits and signs of ASCII.",
            )
