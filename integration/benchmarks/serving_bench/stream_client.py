"""A client of several streams, in a process of its own: it reads bytes and notes when they came.

    python stream_client.py < request.json

Standard input is JSON: `host`, `port`, and `bodies`, one for each stream. Each stream is a
connection of its own. While streams run nothing is parsed: one thread waits for all sockets, takes
what is there and the time. Standard output is JSON: for each stream the seconds from its first to
its last event with text, and its number of tokens as the server counts them. Needs no torch.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_READ_BYTES = 1 << 16
_EVENT, _DONE = b"data: {", b"data: [DONE]"


@dataclass
class Stream:
    """What has come of one stream.

    Attributes:
        reads: Time in seconds, and bytes, of each read.
    """

    reads: list[tuple[float, bytes]] = field(default_factory=list)

    def events(self) -> list[tuple[float, dict[str, Any]]]:
        """Time and content of each event, which came with the read that ends its line.

        Raises:
            RuntimeError: The server has answered something else, or the stream is not complete.
        """
        found: list[tuple[float, dict[str, Any]]] = []
        text, has_ended = b"", False
        for when, read in self.reads:
            *lines, text = (text + read).split(b"\n")
            for line in lines:
                has_ended = has_ended or line.startswith(_DONE)
                if line.startswith(_EVENT):
                    found.append((when, json.loads(line.removeprefix(b"data: "))))
        if not has_ended:
            raise RuntimeError(b"".join(read for _, read in self.reads)[:2000].decode())
        return found

    def summary(self) -> dict[str, float]:
        """Seconds from the first event with text to the last one, and tokens of the stream."""
        events = self.events()
        with_text = [when for when, event in events if event["choices"]]
        counted = [event["usage"] for _, event in events if event.get("usage")]
        return {"seconds": with_text[-1] - with_text[0], "tokens": counted[-1]["completion_tokens"]}


def read_streams(host: str, port: int, bodies: Sequence[dict[str, Any]]) -> list[Stream]:
    """Send every body over a connection of its own, and read until the server closes all.

    Args:
        host: Address of the server.
        port: Port of the server.
        bodies: Bodies of `POST /v1/completions`.
    """
    streams = [Stream() for _ in bodies]
    with selectors.DefaultSelector() as waiting:
        for stream, body in zip(streams, bodies, strict=True):
            connection = socket.create_connection((host, port))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            content = json.dumps(body).encode()
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\n"
                "Content-Type: application/json\r\nConnection: close\r\n"
                f"Content-Length: {len(content)}\r\n\r\n"
            )
            connection.sendall(head.encode() + content)
            waiting.register(connection, selectors.EVENT_READ, stream)
        while waiting.get_map():
            for key, _ in waiting.select():
                connection = key.fileobj  # type: ignore[assignment]
                read = connection.recv(_READ_BYTES)
                if read:
                    key.data.reads.append((time.perf_counter(), read))
                else:
                    waiting.unregister(connection)
                    connection.close()
    return streams


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    json.dump([stream.summary() for stream in read_streams(**asked)], sys.stdout)
