"""A server on a port of this machine, in a thread of this process."""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType
from typing import Any

import uvicorn

from pcomm.core.testing.patience import scaled_s, wait_until
from pcomm.integration.llm import LLM
from pcomm.integration.serve.app import Served, create_app
from pcomm.integration.serve.server import bind, listen
from pcomm.integration.serve.settings import ServeSettings

__all__ = ["LiveServer"]

_END_S = 120.0


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
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="live server", daemon=True)

    def stats(self) -> Any:
        """The engine's, between two of its steps."""
        service = self.served.service
        return service.loop.call(service.engine_stats).result(scaled_s(_END_S))

    def __enter__(self) -> LiveServer:
        self._thread.start()
        wait_until(lambda: self._server.started or not self._thread.is_alive(), "a server")
        assert self._server.started, "it has ended at once"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.should_exit = True
        self._thread.join(scaled_s(_END_S))
        self._socket.close()
        assert not self._thread.is_alive(), "the server has not ended"

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._socket]))
