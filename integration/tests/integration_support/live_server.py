"""A server on a port of this machine, in a thread of this process."""

from __future__ import annotations

import asyncio
import socket
import threading
from types import TracebackType
from typing import Any

import uvicorn

from pcomm.integration.llm import LLM
from pcomm.integration.serve.app import Served, create_app
from pcomm.integration.serve.server import bind, listen
from pcomm.integration.serve.service import ServeSettings

__all__ = ["LiveServer"]


class LiveServer:
    """Serves a model while the context is open.

    Args:
        llm: The model; usable by others again after the context.
        settings: Fields of `ServeSettings` that differ from the defaults.

    Attributes:
        served: The application and its service.
        url: Address of the server.
    """

    def __init__(self, llm: LLM, **settings: Any) -> None:
        found = ServeSettings(**{"model_name": "tiny", **settings})
        self.served: Served = create_app(llm, found)
        self._socket = bind("127.0.0.1", 0)
        self.url = listen(self._socket)
        config = uvicorn.Config(self.served.app, log_level="error", lifespan="on", ws="none")
        self._server = _Server(config)
        self._thread = threading.Thread(target=self._run, name="live server", daemon=True)

    def stats(self) -> Any:
        """The engine's, between two of its steps."""
        service = self.served.service
        return service.loop.call(service.engine_stats).result()

    def __enter__(self) -> LiveServer:
        self._thread.start()
        while not self._server.is_up.wait(0.05):
            assert self._thread.is_alive(), "the server has ended at once"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._socket]))


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.is_up.set()
