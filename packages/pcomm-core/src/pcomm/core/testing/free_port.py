"""A port for a program that is told its port before it listens."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

__all__ = ["free_port"]

# Below the ports that systems give to connections and to listeners that ask for any: what a test
# beside takes meanwhile is never one of these.
_PORTS = range(12_000, 32_000)


def free_port() -> int:
    """A TCP port that is free, and that only a program which names it will take. Local."""
    # Tests seed the usual generator, and then processes would draw the same ports.
    draw = random.SystemRandom()
    while True:
        port = draw.choice(_PORTS)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
